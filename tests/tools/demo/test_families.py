"""Every family through the real gateway: what arrives is what numpy computes, bit for bit."""

from __future__ import annotations

import pytest

from mmcopy.tools.demo.families import FAMILIES
from mmcopy.tools.demo.job import Job, run_job
from mmcopy.tools.demo.pictures import Attachments, gradient, noise
from tests.rigs.oracle import expected_tensors
from tests.rigs.oracle_families import PREPROCESSING, Layout

pytestmark = pytest.mark.gateway

# float32 shows the order of every rounding; the others add one rounding each, over all 256 values of each channel.
RUNS = {
    "qwen3_vl": ("vllm", "uint8"),
    "qwen2_vl": ("vllm", "float16"),
    "kimi_k25": ("tokenspeed", "bfloat16"),
    "llama4": ("vllm", "bfloat16"),
}


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    [(name, "tokenspeed", "float32") for name in sorted(FAMILIES)] + [(name, *run) for name, run in RUNS.items()],
)
def test_bit_for_bit(name: str, engine: str, dtype: str) -> None:
    sizes = PREPROCESSING[name].sizes
    attached = Attachments((noise(*sizes[0]), gradient(*sizes[-1])))
    job = Job(
        family=FAMILIES[name],
        attachments=[attached],
        engine=engine,  # type: ignore[arg-type]
        framework="numpy",
        encoder_dtype=dtype,
    )
    outcome = run_job(job, expect=expected_tensors)
    assert outcome.errors == []
    assert [row.error for row in outcome.rows] == [""] * len(outcome.rows)
    assert outcome.leftovers == []
    pixels = [row for row in outcome.rows if row.tensor.endswith((".encoder_input", ".pixel_values"))]
    assert [row.dtype for row in pixels] == [dtype] * (1 if engine == "vllm" else 2)
    kind = "checksum" if PREPROCESSING[name].layout is Layout.NOT_RECOMPUTED else "numpy"
    assert {row.check for row in outcome.rows} == {kind}
