"""Prewarm on cuda:0: streams, memory that is measured and that really runs out, the receiver, inductor."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmcopy import Metrics, Readiness, Receiver
from mmcopy.errors import ConfigError
from mmcopy.prewarm import PrewarmStatus
from mmcopy.prewarm.inputs import Shape
from tests.rigs.arrays import MIB
from tests.rigs.waiting import settle
from tests.rigs.warming import warm_with

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_cached(torch: Any) -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def fakes(torch: Any) -> Any:
    from tests.rigs import encoder_fakes

    return encoder_fakes


def warm(model: Any, fakes: Any, **options: Any) -> Any:
    return warm_with(model.to("cuda:0"), **{"role": "encode", "device": "cuda:0", "family": fakes.PLAIN, **options})


def taking(torch: Any, bytes_per_pixel: int) -> Callable[[Any], object]:
    """An encode that needs so much memory while it runs."""

    def behave(pixels: Any) -> None:
        torch.empty(pixels.numel() * bytes_per_pixel, dtype=torch.uint8, device=pixels.device)

    return behave


# ---- streams ---------------------------------------------------------------


def test_the_callers_current_stream_is_used_and_another_one_if_it_is_given(torch: Any, fakes: Any) -> None:
    seen: list[int] = []
    model = fakes.Model(lambda pixels: seen.append(torch.cuda.current_stream().cuda_stream))
    mine, given = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(mine):
        warm(model, fakes)
    assert set(seen) == {mine.cuda_stream}
    seen.clear()
    warm(model, fakes, stream=given)
    assert set(seen) == {given.cuda_stream}
    assert {call.device.index for call in model.visual.calls} == {0}


def test_an_encode_is_waited_for(torch: Any, fakes: Any) -> None:
    """Work that the encoder queues has been done when its shape is counted as warm."""
    events: list[Any] = []

    def behave(pixels: Any) -> None:
        torch.cuda._sleep(50_000_000)
        events.append(torch.cuda.Event())
        events[-1].record()

    done: list[bool] = []
    readiness = Readiness()
    readiness.watch(lambda snapshot: done.extend(event.query() for event in events))
    warm(fakes.Model(behave), fakes, readiness=readiness)
    assert len(events) == 6, "three shapes, on the prewarm's thread and on ours"
    assert done
    assert all(done)


# ---- memory ----------------------------------------------------------------


def test_peak_and_retained_bytes(torch: Any, fakes: Any) -> None:
    kept: list[Any] = []

    def behave(pixels: Any) -> None:
        torch.empty(pixels.numel() * MIB // 4, dtype=torch.uint8, device=pixels.device)
        if pixels.numel() == 64 and not kept:
            kept.append(torch.empty(8 * MIB, dtype=torch.uint8, device=pixels.device))

    model = fakes.Model(behave)
    report = warm(model, fakes)
    assert report.status is PrewarmStatus.WARM
    peaks = [each.peak_bytes for each in report.shapes]
    assert peaks == sorted(peaks)
    assert 256 * MIB <= report.peak_bytes == peaks[-1] < 300 * MIB
    assert 8 * MIB <= report.retained_bytes < 12 * MIB
    assert report.reserved_bytes >= 256 * MIB, "kept for the next encode"


def test_the_largest_is_what_the_memory_left_has_room_for(torch: Any, fakes: Any) -> None:
    free, _ = torch.cuda.mem_get_info(0)
    report = warm(fakes.Model(taking(torch, free // 300)), fakes, required=True)
    largest = report.shapes[-1]
    assert largest.planned == Shape("image", ((32, 32),))
    assert largest.shape.volume < 300
    assert largest.note.startswith("less than planned")
    assert "out of memory" not in largest.note, "it was estimated, not tried"


def test_out_of_memory_goes_smaller(torch: Any, fakes: Any) -> None:
    free, _ = torch.cuda.mem_get_info(0)
    report = warm(fakes.Model(taking(torch, free // 300)), fakes, sizes={"image": [(32, 32)]}, required=True)
    assert report.shapes[0].shape == Shape("image", ((16, 16),))
    assert report.shapes[0].note == "out of memory at image 32x32; out of memory at image 23x23"
    torch.cuda.synchronize(0)


def test_a_full_device_is_told(torch: Any, fakes: Any) -> None:
    free, _ = torch.cuda.mem_get_info(0)
    report = warm(fakes.Model(taking(torch, free * 2)), fakes)
    assert report.status is PrewarmStatus.INCOMPLETE
    assert isinstance(report.error, torch.OutOfMemoryError)


def test_a_model_on_the_host_is_an_error(torch: Any, fakes: Any) -> None:
    with pytest.raises(ConfigError, match="the image encoder visual is on cpu, device is cuda:0"):
        warm_with(fakes.Model(), role="encode", device="cuda:0", family=fakes.PLAIN)


# ---- transport and compilers -----------------------------------------------


def test_the_receivers_pinned_ring_and_copy_stream_are_used(torch: Any, fakes: Any) -> None:
    metrics = Metrics()
    with Receiver("cuda:0", metrics=metrics) as receiver:
        report = warm(fakes.Model(), fakes, receiver=receiver)
    assert report.warnings == ()
    assert report.transport_seconds > 0
    assert sum(sum(each.values()) for name, each in metrics.snapshot().items() if "tensors_received" in name) == 4


def test_real_towers_encode_on_the_gpu(torch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.rigs.encoder_models import BUILDERS, build

    is_old = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)
    for name in BUILDERS:
        # 5.17 raises for the videos of these two.
        modalities = ["image"] if is_old and name in ("kimi_k25", "gemma4") else None
        model = build(name, torch.bfloat16).to("cuda:0")
        report = warm_with(
            model, role="encode", device="cuda:0", max_pixels=64 * 64, deadline_s=60, modalities=modalities
        )
        assert report.status is PrewarmStatus.WARM, (name, report.reason)
        assert report.peak_bytes
        assert all(each.again_seconds > 0 for each in report.shapes)


def takes_cudnn_attention(torch: Any, report: Any, model: Any, shape: Shape) -> bool:
    """Whether an encode on this thread runs cuDNN's attention, by the operators that torch's profiler sees."""
    from mmcopy.prewarm.feed import make_tensors

    inputs = report.family.inputs(report.config, shape)
    tensors = make_tensors(inputs, dtype="bfloat16", device=torch.device("cuda:0"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler, about itself
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with torch.inference_mode():
                report.family.encode(model, "image", tensors)
            torch.cuda.synchronize(0)
    names = {event.name for event in profile.events()}
    assert any("scaled_dot_product" in name for name in names), "torch's attention ran"
    return any("cudnn_attention" in name for name in names)


@pytest.mark.parametrize("allowed", [True, False])
def test_cudnns_attention_is_told_where_torch_takes_it(torch: Any, allowed: bool) -> None:
    pytest.importorskip("transformers")
    from tests.rigs.encoder_models import build

    warmed, new = Shape("image", ((32, 32),)), Shape("image", ((40, 24),))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        model = build("qwen3_vl", torch.bfloat16).to("cuda:0")
        report = warm_with(
            model, role="encode", device="cuda:0", sizes={"image": [(32, 32), (24, 16)]}, modalities=["image"],
            required=True,
        )  # fmt: skip
        taken = takes_cudnn_attention(torch, report, model, warmed)
        assert report.cudnn_attention == {"image": taken}
        assert not (taken and not allowed)
        assert report.settled == report.warmed
        assert report.forecast("image", *warmed.items).plans is False
        assert report.forecast("image", *new.items).plans is taken
        assert any("enable_cudnn_sdp(False)" in line for line in report.outlooks) is taken
        assert ("attention plans (cuDNN)" in str(report)) is taken
        if allowed and not taken:
            pytest.skip("torch does not take cuDNN's attention on this GPU: only its absence was seen")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_what_inductor_compiled_on_the_prewarms_thread_serves_this_one(torch: Any) -> None:
    pytest.importorskip("transformers")
    from mmcopy.prewarm.compiles import count_graphs
    from mmcopy.prewarm.feed import make_tensors
    from tests.rigs.encoder_models import build

    model = build("qwen3_vl", torch.bfloat16).to("cuda:0")
    for block in model.model.visual.blocks:
        block.compile()
    report = warm_with(
        model, role="encode", device="cuda:0", sizes={"image": [(32, 32), (24, 16)]}, modalities=["image"],
        required=True, deadline_s=150,
    )  # fmt: skip
    assert report.compiled
    assert report.graphs > 0
    shape = Shape("image", ((40, 24),))
    assert not report.forecast("image", (40, 24)).compiles
    before = count_graphs()
    inputs = report.family.inputs(report.config, shape)
    tensors = make_tensors(inputs, dtype="bfloat16", device=torch.device("cuda:0"))  # ordinary ones, as a receiver's
    with torch.inference_mode():
        report.family.encode(model, "image", tensors)
    torch.cuda.synchronize(0)
    assert count_graphs() == before
    assert settle(lambda: "mmcopy-prewarm" not in {thread.name for thread in threading.enumerate()})
