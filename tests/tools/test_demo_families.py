"""Every family through the real gateway: what arrives is what numpy computes, bit for bit."""

from __future__ import annotations

import pytest

from mmcopy.tools.demo.families import FAMILIES, Layout
from mmcopy.tools.demo.job import Job, run_job
from mmcopy.tools.demo.pictures import Hand, gradient, noise

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
    family = FAMILIES[name]
    sizes = family.small_sizes
    hand = Hand((noise(*sizes[0]), gradient(*sizes[-1])))
    outcome = run_job(
        Job(family=family, hands=[hand], engine=engine, framework="numpy", encoder_dtype=dtype)  # type: ignore[arg-type]
    )
    assert outcome.faults == []
    assert [row.fault for row in outcome.rows] == [""] * len(outcome.rows)
    assert outcome.leftovers == []
    pixels = [row for row in outcome.rows if row.tensor.endswith((".encoder_input", ".pixel_values"))]
    assert [row.dtype for row in pixels] == [dtype] * (1 if engine == "vllm" else 2)
    kind = "checksum" if family.layout is Layout.NOT_RECOMPUTED else "numpy"
    assert {row.check for row in outcome.rows} == {kind}
