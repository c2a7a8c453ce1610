"""Real encodes on a thread: deadlines, failures, memory that runs out, order, readiness, transport."""

from __future__ import annotations

import importlib
import json
import logging
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.utils")  # takes seconds the first time, which short deadlines here do not have

from mmcopy import Metrics, PrewarmReport, Readiness, Receiver
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import MmcopyTimeoutError, PrewarmError
from mmcopy.metrics import Counter
from mmcopy.prewarm import Outcome, PrewarmStatus
from mmcopy.prewarm.inputs import Shape
from mmcopy.prewarm.memory import largest_that_fits
from mmcopy.prewarm.progress import following
from mmcopy.prewarm.readiness import ReadinessSnapshot
from tests.rigs.encoder_fakes import PLAIN, Model
from tests.rigs.waiting import settle
from tests.rigs.warming import warm_with


def warm(model: Any, **options: Any) -> Any:
    return warm_with(model, **{"role": "aggregated", "device": "cpu", "family": PLAIN, **options})


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hanging encode waits for; opened at the end, so that its thread ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def hang_at(side: int, gate: threading.Event) -> Callable[[torch.Tensor], object]:
    return lambda pixels: gate.wait(60) if pixels.shape[-1] == side else None


# ---- a true encode ---------------------------------------------------------


@pytest.mark.usefixtures("nothing_left_open")
def test_every_shape_is_really_encoded_in_inference_mode_on_a_thread_of_its_own() -> None:
    model = Model()
    report = warm(model)
    assert model.sizes == [(1, 8, 8), (1, 8, 16), (1, 32, 32)]
    assert model.visual.inference == [True] * 3
    assert set(model.visual.threads) == {"mmcopy-prewarm"}
    assert not torch.is_inference_mode_enabled()
    assert [each.outcome for each in report.shapes] == [Outcome.WARM] * 3
    assert all(each.seconds > 0 for each in report.shapes)
    assert report.seconds >= sum(each.seconds for each in report.shapes)
    assert (report.dtypes, report.compiled, report.graphs) == ({"image": "float16"}, False, 0)
    assert (report.peak_bytes, report.retained_bytes, report.reserved_bytes) == (None, None, None)


def test_repeats() -> None:
    model = Model()
    warm(model, repeats=3, sizes={"image": [(4, 4)]})
    assert model.sizes == [(1, 4, 4)] * 3


def test_without_a_deadline_it_runs_on_the_callers_thread() -> None:
    model = Model()
    warm(model, deadline_s=None)
    assert set(model.visual.threads) == {threading.current_thread().name}


def test_the_report_is_json_and_text() -> None:
    report = warm(Model())
    record = json.loads(json.dumps(report.as_dict()))
    assert record["status"] == "warm"
    assert [each["shape"] for each in record["shapes"]] == ["image 8x8", "image 8x16", "image 32x32"]
    assert str(report).startswith("prewarm of aggregated on cpu: warm; 3 of 3 shapes in ")


# ---- the deadline ----------------------------------------------------------


def test_a_hanging_encode_ends_the_wait_with_a_warning(gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    model, readiness, sized = Model(hang_at(16, gate)), Readiness(), []
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        report = warm(model, deadline_s=2, readiness=readiness, before_ready=sized.append)
    assert report.status is PrewarmStatus.INCOMPLETE
    assert report.reason == "image 8x16 was still running after 2 s, the deadline"
    assert [each.outcome for each in report.shapes] == [Outcome.WARM, Outcome.HUNG, Outcome.NOT_RUN]
    assert readiness.is_ready
    assert "still running after 2 s" in readiness.snapshot().reason
    assert sized == [report]
    assert "still running" in caplog.text
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert model.sizes == [(1, 8, 8), (1, 8, 16)], "what was left behind begins nothing more"


def test_a_required_one_is_a_failure(gate: threading.Event) -> None:
    readiness, sized = Readiness(), []
    with pytest.raises(MmcopyTimeoutError, match=r"image 8x8 was still running after 2 s") as caught:
        warm(Model(hang_at(8, gate)), deadline_s=2, required=True, readiness=readiness, before_ready=sized.append)
    assert isinstance(caught.value, TimeoutError)
    report = caught.value.report
    assert isinstance(report, PrewarmReport)
    assert [each.outcome for each in report.shapes] == [Outcome.HUNG, Outcome.NOT_RUN, Outcome.NOT_RUN]
    assert sized == []
    assert str(readiness.snapshot()).startswith("failed: MmcopyTimeoutError: prewarm: aggregated on cpu: incomplete")


@pytest.mark.parametrize("required", [False, True])
def test_a_deadline_between_shapes(monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    """The clock jumps while the second shape is encoded; the third is not begun."""
    import time

    real, jump = time.monotonic, [0.0]
    model = Model(lambda pixels: jump.__setitem__(0, 1000.0) if pixels.shape[-1] == 16 else None)
    # mmcopy.prewarm is the function, so the module has to be asked for by name.
    clock = types.SimpleNamespace(monotonic=lambda: real() + jump[0])
    monkeypatch.setattr(importlib.import_module("mmcopy.prewarm.run"), "time", clock)
    if required:
        with pytest.raises(MmcopyTimeoutError, match="the deadline of 300 s passed"):
            warm(model, required=True)
    else:
        report = warm(model)
        assert [each.outcome for each in report.shapes] == [Outcome.WARM, Outcome.WARM, Outcome.NOT_RUN]
        assert report.reason == "the deadline of 300 s passed"
    assert len(model.sizes) == 2


def test_a_thread_that_was_left_behind_does_not_move_readiness() -> None:
    """It may be about to begin a shape, just when the deadline passes and the worker becomes ready without it."""
    readiness, shape = Readiness(), Shape("image", ((8, 8),))
    with following(readiness, 2, bar=False) as step:
        step(shape, 0, 2)
        assert readiness.state == "warming"
    readiness.ready()
    step(shape, 1, 2)
    assert readiness.is_ready


@pytest.mark.parametrize("deadline_s", [float("inf"), 1e12])
def test_a_deadline_that_never_comes(deadline_s: float) -> None:
    report = warm(Model(lambda pixels: threading.Event().wait(0.2)), deadline_s=deadline_s)  # so that it is waited for
    assert report.status is PrewarmStatus.WARM


# ---- failures --------------------------------------------------------------


class Broken(RuntimeError):
    pass


def raise_at(side: int, error: BaseException) -> Callable[[torch.Tensor], object]:
    def behave(pixels: torch.Tensor) -> None:
        if pixels.shape[-1] >= side:
            raise error

    return behave


def test_a_failing_encoder_is_kept_and_the_rest_of_its_modality_left(caplog: pytest.LogCaptureFixture) -> None:
    error, readiness = Broken("bad kernel"), Readiness()
    model = Model(raise_at(16, error))
    report = warm(model, readiness=readiness)
    assert report.status is PrewarmStatus.INCOMPLETE
    assert report.error is error
    assert [each.outcome for each in report.shapes] == [Outcome.WARM, Outcome.FAILED, Outcome.NOT_RUN]
    assert report.shapes[1].note == "Broken: bad kernel"
    assert report.reason == "image 8x16 failed: Broken: bad kernel"
    assert report.as_dict()["error"] == "Broken: bad kernel"
    assert readiness.is_ready
    assert "bad kernel" in readiness.snapshot().reason
    assert "image 8x16 failed: Broken: bad kernel" in caplog.text


def test_another_modality_is_still_warmed() -> None:
    model = Model(video=True)
    model.get_image_features = lambda pixel_values: (_ for _ in ()).throw(Broken("only pictures"))  # type: ignore[method-assign]
    report = warm(model)
    assert {shape.modality for shape in report.warmed} == {"video"}
    assert len(report.warmed) == 3


def test_a_required_failure_has_the_encoders_exception_as_its_cause() -> None:
    error, readiness = Broken("bad kernel"), Readiness()
    with pytest.raises(PrewarmError, match="image 8x8 failed: Broken: bad kernel") as caught:
        warm(Model(raise_at(1, error)), required=True, readiness=readiness)
    assert not isinstance(caught.value, TimeoutError)
    assert caught.value.__cause__ is error
    assert readiness.snapshot().state == "failed"


def test_frames_of_a_failed_encode_hold_no_tensors() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def behave(pixels: torch.Tensor) -> None:
        alive.append(weakref.ref(pixels))
        raise Broken("with pixels in hand")

    model = Model(behave)
    report = warm(model)
    model.visual.calls.clear()
    gc.collect()
    assert report.error is not None
    assert [each() for each in alive] == [None]


def test_frames_of_the_errors_that_it_came_from_hold_none_either() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def compute(pixels: torch.Tensor) -> None:
        hidden = pixels + 1
        alive.append(weakref.ref(hidden))
        raise Broken("with a tensor in hand")

    def behave(pixels: torch.Tensor) -> None:
        try:
            compute(pixels)
        except Broken as error:
            raise RuntimeError("a wrapper's words") from error

    report = warm(Model(behave))
    gc.collect()
    assert isinstance(report.error, RuntimeError)
    assert isinstance(report.error.__cause__, Broken)
    assert [each() for each in alive] == [None]


# ---- memory ----------------------------------------------------------------


def room_for(pixels_max: int, error: Callable[[], BaseException]) -> Callable[[torch.Tensor], object]:
    def behave(pixels: torch.Tensor) -> None:
        if pixels.shape[-2] * pixels.shape[-1] * pixels.shape[0] > pixels_max:
            raise error()

    return behave


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_goes_smaller_until_it_fits(error: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(room_for(300, lambda: error("tried to allocate 20 GiB")))
    report = warm(model, required=True)
    assert report.status is PrewarmStatus.WARM
    largest = report.shapes[-1]
    assert (str(largest.planned), str(largest.shape)) == ("image 32x32", "image 16x16")
    assert largest.outcome is Outcome.WARM
    assert largest.note == "out of memory at image 32x32; out of memory at image 23x23"
    assert report.error is None
    assert "out of memory at image 32x32: " in caplog.text


def test_a_size_above_the_one_that_failed_is_not_tried() -> None:
    model = Model(room_for(300, lambda: torch.OutOfMemoryError("full")))
    report = warm(model, sizes={"image": [(32, 32), (40, 40), (8, 8), (64, 64)]})
    tried = [height * width for _, height, width in model.sizes]
    assert tried[:3] == [1024, 23 * 23, 16 * 16]
    assert max(tried[3:]) < 23 * 23
    assert len(report.warmed) == 4
    assert report.shapes[1].note.startswith("less than planned: image 40x40 would not fit into the memory left")


def test_a_device_that_is_full_fails_the_shape_and_says_so() -> None:
    error = torch.OutOfMemoryError("0 bytes free")
    readiness = Readiness()
    report = warm(Model(room_for(0, lambda: error)), readiness=readiness, sizes={"image": [(4, 4)]})
    assert report.error is error
    assert report.shapes[0].outcome is Outcome.FAILED
    assert report.shapes[0].note.endswith("OutOfMemoryError: 0 bytes free")
    assert report.shapes[0].shape.volume == 1
    assert readiness.is_ready
    with pytest.raises(PrewarmError, match="0 bytes free") as caught:
        warm(Model(room_for(0, lambda: error)), required=True, sizes={"image": [(4, 4)]})
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("available", "wanted"),
    [(10**9, (64, 64)), (64 * 64 * 10 * 10 // 9 + 1, (64, 64)), (64 * 64 * 10, (45, 45)), (1000, (8, 8)), (1, (1, 1))],
)
def test_the_largest_that_fits(available: int, wanted: tuple[int, int]) -> None:
    shape = largest_that_fits(Shape("image", ((64, 64),)), 10.0, available, lambda each: PLAIN.shrink({}, each))
    assert shape.items == (wanted,)


# ---- order and readiness ---------------------------------------------------


def test_the_kv_cache_is_sized_after_the_encodes_and_before_ready() -> None:
    order: list[str] = []
    readiness = Readiness()
    readiness.watch(lambda snapshot: order.append(str(snapshot)))
    model = Model(lambda pixels: order.append(f"encode {pixels.shape[-1]}"))

    def size_kv_cache(report: PrewarmReport) -> None:
        assert report.status is PrewarmStatus.WARM
        assert not readiness.is_ready
        order.append("kv cache")

    warm(model, readiness=readiness, before_ready=size_kv_cache)
    assert order == [
        "warming image 8x8 (0 of 3 done)", "encode 8", "warming image 8x16 (1 of 3 done)", "encode 16",
        "warming image 32x32 (2 of 3 done)", "encode 32", "kv cache", "ready",
    ]  # fmt: skip


def test_a_skipped_prewarm_sizes_the_kv_cache_too() -> None:
    sized: list[PrewarmReport] = []
    readiness = Readiness()
    warm(Model(), role="decode", before_ready=sized.append, readiness=readiness)
    assert [each.status for each in sized] == [PrewarmStatus.SKIPPED]
    assert readiness.is_ready


def test_a_kv_cache_that_fails_is_raised_and_not_ready() -> None:
    readiness = Readiness()

    def fail(report: PrewarmReport) -> None:
        raise Broken("no room for a KV cache")

    with pytest.raises(Broken):
        warm(Model(), before_ready=fail, readiness=readiness)
    assert str(readiness.snapshot()) == "failed: Broken: no room for a KV cache"


def test_readiness_tells_modality_shape_and_progress() -> None:
    seen: list[ReadinessSnapshot] = []
    readiness = Readiness()
    readiness.watch(seen.append)
    warm(Model(video=True), readiness=readiness)
    warming = [(each.modality, each.shape, each.done, each.total) for each in seen if each.state == "warming"]
    assert warming[0] == ("image", "image 8x8", 0, 6)
    assert warming[-1] == ("video", "video 2x32x32", 5, 6)
    assert seen[-1].state == "ready"


# ---- transport -------------------------------------------------------------


def test_the_receiver_is_warmed_and_leaves_nothing(segments: Callable[[], list[str]]) -> None:
    metrics = Metrics()
    with Receiver("cpu", metrics=metrics) as receiver:
        report = warm(Model(), receiver=receiver)
        counted = metrics.snapshot()
        assert report.transport_seconds > 0
        assert report.warnings == ()
        assert segments() == []
    assert sum(sum(each.values()) for name, each in counted.items() if "tensors_received" in name) == 4


def test_leases_are_warmed_where_the_receiver_has_an_endpoint(
    tmp_path: pathlib.Path, segments: Callable[[], list[str]]
) -> None:
    metrics = Metrics()
    with WorkerEndpoint(tmp_path / "s") as endpoint, Receiver("cpu", metrics=metrics, endpoint=endpoint) as receiver:
        report = warm(Model(), receiver=receiver)
        assert report.warnings == ()
        assert metrics.get(Counter.TENSORS_RECEIVED, "lease") == 8
        assert metrics.get(Counter.TENSORS_RECEIVED, "segment") == 2
        assert settle(lambda: not endpoint.native.arenas())  # its sender has gone
    assert segments() == []


def test_a_receiver_that_cannot_is_a_warning(shm_dir: pathlib.Path) -> None:
    with Receiver("cpu", shm_dir=shm_dir, accept_prefixes=["smg-tokenspeed-"]) as receiver:
        report = warm(Model(), receiver=receiver)
    assert report.status is PrewarmStatus.WARM
    assert report.warnings[0].startswith("the receiver could not be warmed: PayloadError")


# ---- what is shown ---------------------------------------------------------

SCRIPT = """
import logging
from tests.rigs.encoder_fakes import PLAIN, Model
from tests.rigs.warming import warm_with
logging.basicConfig(level=logging.INFO, format="%(message)s")
warm_with(Model(), role="aggregated", device="cpu", family=PLAIN)
"""


def test_log_lines_where_there_is_no_terminal() -> None:
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True, cwd=root
    )
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert lines[0] == "image 8x8 begins, 0 of 3 done"
    assert lines[1].startswith("image 8x8: 0.")
    assert lines[-1].startswith("prewarm of aggregated on cpu: warm; 3 of 3 shapes")


def test_a_bar_at_a_terminal() -> None:
    """In a pseudo terminal of its own."""
    import os
    import pty

    root = pathlib.Path(__file__).parents[2]
    master, slave = pty.openpty()
    script = SCRIPT.replace("logging.INFO", "logging.ERROR")
    try:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        process = subprocess.Popen(
            [sys.executable, "-c", script], stderr=slave, stdout=subprocess.DEVNULL, cwd=root, env=environment
        )
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
        assert process.wait(120) == 0
    finally:
        os.close(master)
    assert b"prewarm" in shown
    assert b"/3" in shown
