"""Compiled encoders: what is counted, that what was warmed compiles nothing, and that forecasts hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch._dynamo.utils import counters

from mmcopy import PrewarmReport
from mmcopy.encoders import explain_encoder_dtypes
from mmcopy.prewarm import PrewarmStatus, foresee
from mmcopy.prewarm.feed import make_tensors
from mmcopy.prewarm.inputs import Shape
from tests.rigs.encoder_models import build
from tests.rigs.warming import warm_with

LIMIT = 32 * 32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """A compiler that has seen nothing, and does not give up: otherwise "compiles nothing" could mean that it did."""
    trace = logging.getLogger("torch.__trace")
    level = trace.level
    trace.setLevel(logging.CRITICAL)  # pytest would keep every line of it
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        yield
    torch._dynamo.reset()
    counters.clear()
    trace.setLevel(level)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled(name: str, scope: str = "blocks", attention: str | None = None) -> Any:
    """The tiny model with its vision tower, or the blocks of that, compiled in place."""
    model = build(name)
    tower = model.get_submodule(explain_encoder_dtypes(model)["image"].path)
    if attention is not None:
        tower.config._attn_implementation = attention
    if scope == "tower":
        tower.compile(backend="eager")
    else:
        for block in tower.blocks if hasattr(tower, "blocks") else tower.layers:
            block.compile(backend="eager")
    return model


def warm(model: Any, **options: Any) -> PrewarmReport:
    options = {"modalities": ["image"], "max_pixels": LIMIT, "required": True, **options}
    return warm_with(model, role="aggregated", device="cpu", **options)


def encode(report: PrewarmReport, model: Any, shape: Shape) -> int:
    """Encode as a request would, on this thread, ordinary tensors in inference mode; how many graphs that compiled."""
    assert report.family is not None
    before = graphs()
    inputs = report.family.inputs(report.config, report.family.fit(report.config, shape))
    tensors = make_tensors(inputs, dtype="float32", device=CPU)
    assert not any(each.is_inference() for each in tensors.values())
    with torch.inference_mode():
        report.family.encode(model, shape.modality, tensors)
    return graphs() - before


HELD_OUT = [
    Shape("image", ((24, 32),)),
    Shape("image", ((16, 24),)),
    Shape("image", ((8, 24),)),
    Shape("image", ((24, 16), (32, 24))),
    Shape("image", ((24, 24),) * 3),
    Shape("image", ((8, 8),)),
]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("qwen3_vl", "blocks"),
        ("qwen2_5_vl", "blocks"),
        ("qwen3_vl", "tower"),
        ("mistral3", "tower"),
        ("gemma4", "tower"),
        ("llama4", "tower"),
    ],
)
def test_what_was_warmed_compiles_nothing_and_forecasts_hold(name: str, scope: str) -> None:
    model = compiled(name, scope)
    report = warm(model)
    assert report.compiled
    assert report.attention == "sdpa"
    assert report.graphs == sum(each.graphs for each in report.shapes) == graphs() > 0
    assert report.shapes[0].graphs > 0, "the count sees compilations"
    for shape in report.warmed:  # the first real image, on another thread
        assert encode(report, model, shape) == 0
        assert not report.forecast(shape.modality, *shape.items).compiles
    answers = set()
    for shape in HELD_OUT:
        forecast = report.forecast(shape.modality, *shape.items)
        seen = encode(report, model, shape)
        assert forecast.compiles or seen == 0, f"{forecast}, but it compiled {seen} graphs"
        answers.add(forecast.compiles)
    assert False in answers, "a forecast that always says yes is none"
    if name == "qwen2_5_vl":
        assert_windows_are_said_to_compile_nearly_always(report, model)


def assert_windows_are_said_to_compile_nearly_always(report: PrewarmReport, model: Any) -> None:
    """Qwen2.5-VL with sdpa: the number of windows follows from the size."""
    forecast = report.forecast("image", (56, 72))
    assert forecast.compiles
    assert "attention runs in 1 and 20 pieces, and 20 was seen in 0 sizes" in forecast.why
    assert "flash_attention_2" in forecast.remedy
    assert encode(report, model, Shape("image", ((56, 72),))) > 0
    assert len(report.outlooks) == 1
    assert report.outlooks[0].startswith("image: nearly every other size compiles again")


def test_an_encoder_that_is_not_compiled() -> None:
    report = warm(build("qwen3_vl"))
    assert not report.compiled
    assert (report.graphs, report.outlooks) == (0, [])
    assert str(report.forecast("image", (1000, 1000))).endswith("compiles nothing, the encoder is not compiled")


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, cu_seq_lens_q: Any, **options: Any
) -> Any:
    """Stands for flash attention, which needs a GPU: any number of pieces at once, told apart by a mask."""
    positions = torch.arange(query.shape[2])
    piece = torch.searchsorted(cu_seq_lens_q.long(), positions, right=True)
    mask = piece[:, None] == piece[None, :]
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return output.transpose(1, 2).contiguous(), None


def test_variable_length_attention_covers_every_size() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("flash_stand_in", packed_attention)
    try:
        model = compiled("qwen2_5_vl", attention="flash_stand_in")
        report = warm(model)
        assert report.varlen
        assert report.outlooks == []
        for shape in (*HELD_OUT, Shape("image", ((56, 72),)), Shape("image", ((16, 16),) * 5)):
            forecast = report.forecast(shape.modality, *shape.items)
            assert forecast.compiles == (8 in shape.items[0] and shape.items != ((8, 8),)), str(forecast)
            seen = encode(report, model, shape)
            assert forecast.compiles or seen == 0, f"{forecast}, but it compiled {seen} graphs"
    finally:
        AttentionInterface._global_mapping.pop("flash_stand_in")


def test_giving_up_is_told() -> None:
    """After recompile_limit compilations torch runs eagerly, and compiles nothing any more."""
    with torch._dynamo.config.patch(recompile_limit=2):
        report = warm(compiled("qwen3_vl"))
    assert report.status is PrewarmStatus.WARM
    assert any("recompile_limit" in warning for warning in report.warnings)


def test_the_thread_that_compiled_leaves_a_process_that_can_compile() -> None:
    """torch 2.11 without a GPU crashes when a thread compiles after the first one that did has ended."""
    model = compiled("qwen3_vl")
    report = warm(model, sizes={"image": [(16, 16)]})
    assert report.outlooks == ["image: every other size compiles again, because 1 sizes were warmed; warm two"]
    threads = [each for each in threading.enumerate() if each.name == "mmcopy-prewarm"]
    assert torch.cuda.is_available() or threads
    assert all(each.daemon for each in threads)
    assert encode(report, model, Shape("image", ((32, 24), (16, 16)))) > 0


def test_foreseeing_is_a_pure_function() -> None:
    report = warm(build("qwen3_vl"))
    assert report.family is not None

    def compiles(*items: tuple[int, ...], warmed: list[Shape], varlen: bool = False) -> bool:
        assert report.family is not None
        shape = Shape("image", items)
        return foresee(report.family, report.config, shape, warmed, compiled=True, varlen=varlen).compiles

    singles = [Shape("image", ((32, 32),)), Shape("image", ((24, 16),))]
    pair, pairs = Shape("image", ((32, 32), (16, 24))), Shape("image", ((24, 16), (16, 32)))
    assert compiles((16, 16), warmed=[])
    assert not compiles((16, 16), warmed=singles)
    assert compiles((8, 16), warmed=singles), "one row of tokens"
    assert compiles((16, 16), (16, 16), warmed=singles)
    assert compiles((16, 16), (16, 16), warmed=[*singles, pair]), "compiled for these two sizes"
    assert not compiles((16, 16), (16, 16), warmed=[*singles, pair, pairs])
    assert not compiles((16, 16), (16, 16), warmed=[*singles, pair], varlen=True)
    assert compiles((16, 16), (16, 16), warmed=singles, varlen=True)
