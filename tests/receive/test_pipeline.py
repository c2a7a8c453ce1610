"""The pipeline over a device that the test plays: a thread that copies late, in order, and marks events behind it."""

from __future__ import annotations

import ctypes
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy import Inline, MmcopyError, Sender, TensorData, TransportConfig, _native
from mmcopy.errors import MmcopyTimeoutError, SegmentSizeError
from mmcopy.metrics import Counter, Metrics
from mmcopy.receive.plan import CopyPlan, extents, pack, plan_chunks, scatter
from mmcopy.receive.request import Request, RequestOpener
from mmcopy.receive.staging import Pipeline, Slot, StagingRing
from tests.rigs.arrays import random_bytes
from tests.rigs.played_stream import PlayedStream


class Mark:
    """An event that the device sets when it has come to it."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class Device(PlayedStream):
    """The copy stream that a pipeline needs."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse_at = -1
        self.copies = 0

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.copies += 1
        if self.copies == self.refuse_at:
            raise ConnectionError("the device refuses")
        self.queue(lambda: ctypes.memmove(dst, src, nbytes))

    def record(self, slot: Slot) -> None:
        event = slot.event
        assert isinstance(event, Mark)
        event.reached.clear()
        slot.copying = True
        self.queue(event.reached.set)


class Rig:
    def __init__(self, num_slots: int, slot_bytes: int, num_threads: int) -> None:
        self.device = Device()
        memory = np.zeros(num_slots * slot_bytes, np.uint8).reshape(num_slots, slot_bytes)
        self.ring = StagingRing([Slot(row, Mark()) for row in memory])
        self.pool = _native.CopyPool(num_threads)
        self.metrics = Metrics(timings=True)
        self.pipeline = Pipeline(self.device, self.ring, self.pool, device="test", metrics=self.metrics)
        self.slot_bytes = slot_bytes
        self._kept: list[np.ndarray[Any, Any]] = []

    def run(self, request: Request, *, is_scattered: bool = False, limit_s: float = 20.0) -> list[bytes]:
        """The sources' bytes as they came to the device."""
        sizes = tuple(request.sizes)
        layout = scatter(sizes) if is_scattered else pack(sizes)
        plan = CopyPlan((), *plan_chunks(extents(layout), chunk_bytes=self.slot_bytes))
        dests = [np.zeros(n, np.uint8) for n in (sizes if is_scattered else [layout.nbytes])]
        self._kept += dests  # copies that were queued before an error still run
        if plan.num_chunks:
            with self.pipeline.begin(plan, request, deadline=time.monotonic() + limit_s) as filling:
                filling.send([dest.ctypes.data for dest in dests])
        self.device.finish()
        if is_scattered:
            return [dest.tobytes() for dest in dests]
        return [dests[0][start : start + n].tobytes() for start, n in zip(layout.starts, sizes, strict=True)]

    def close(self) -> None:
        self.device.close()
        self.ring.close(time.monotonic() + 5)
        self.pool.close(5.0)


@pytest.fixture
def rig(nothing_left_open: None) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(num_slots: int = 4, slot_bytes: int = 4096, num_threads: int = 2) -> Rig:
        rigs.append(Rig(num_slots, slot_bytes, num_threads))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()


def request_of(payloads: list[bytes], shm_dir: pathlib.Path, *, shared: Callable[[int], bool]) -> Request:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=shm_dir) as sender:
        items = [
            sender.send(payload) if shared(n) else TensorData("uint8", (len(payload),), Inline(payload))
            for n, payload in enumerate(payloads)
        ]
    request = RequestOpener(str(shm_dir), ["mmcopy-"], Metrics()).request(items)
    request.open_all()
    return request


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 16384, 100_001])
def test_edge_sizes(rig: Callable[..., Rig], shm_dir: pathlib.Path, nbytes: int, is_scattered: bool) -> None:
    payloads = [random_bytes(nbytes, 1).tobytes(), random_bytes(nbytes, 2).tobytes()]
    request = request_of(payloads, shm_dir, shared=lambda n: n == 0)
    it = rig()
    assert it.run(request, is_scattered=is_scattered) == payloads
    assert request.metrics.get(Counter.SEGMENTS_REMOVED) == (1 if nbytes else 0)
    assert it.ring.num_free == 4
    request.close("received")


@given(
    st.lists(st.integers(0, 9000), max_size=8),
    st.integers(1, 5),
    st.sampled_from([256, 1024, 4096]),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_random_requests(
    sizes: list[int], num_slots: int, slot_bytes: int, num_threads: int, is_scattered: bool
) -> None:
    payloads = [random_bytes(n, i).tobytes() for i, n in enumerate(sizes)]
    it = Rig(num_slots, slot_bytes, num_threads)
    try:
        request = RequestOpener("/dev/shm", ["mmcopy-"], Metrics()).request(
            [TensorData("uint8", (len(p),), Inline(p)) for p in payloads]
        )
        request.open_all()
        for _ in range(3):  # slots are reused with copies under way
            assert it.run(request, is_scattered=is_scattered) == payloads
    finally:
        it.close()


def test_a_slot_is_not_refilled_before_its_copy(rig: Callable[..., Rig], shm_dir: pathlib.Path) -> None:
    """The device stands still until every slot is filled: the bytes of the first slots must survive."""
    payload = random_bytes(40 * 4096, 3).tobytes()
    request = request_of([payload], shm_dir, shared=lambda n: True)
    it = rig()
    it.device.gate.clear()
    threading.Timer(0.1, it.device.gate.set).start()
    assert it.run(request) == [payload]
    assert it.metrics.get(Counter.SLOT_WAITS, "test") == it.metrics.timings()["slot_wait"].count > 0
    request.close("received")


def test_a_device_that_stands_still_is_a_timeout_and_the_next_request_works(
    rig: Callable[..., Rig], shm_dir: pathlib.Path
) -> None:
    payload = random_bytes(20 * 4096, 4).tobytes()
    request = request_of([payload], shm_dir, shared=lambda n: True)
    it = rig()
    it.device.gate.clear()
    with pytest.raises(MmcopyTimeoutError, match="staging slot did not end in time"):
        it.run(request, limit_s=0.1)
    assert it.ring.num_free == 4
    it.device.finish()
    assert it.run(request) == [payload]
    request.close("received")


@pytest.mark.parametrize("at", [1, 3, 20])
def test_a_refused_copy_gives_the_slots_back(rig: Callable[..., Rig], shm_dir: pathlib.Path, at: int) -> None:
    payload = random_bytes(20 * 4096, 5).tobytes()
    request = request_of([payload], shm_dir, shared=lambda n: True)
    it = rig()
    it.device.refuse_at = at
    with pytest.raises(ConnectionError, match="refuses"):
        it.run(request)
    assert it.ring.num_free == 4
    it.device.finish()
    assert it.run(request) == [payload]
    request.close("received")


def test_a_peer_that_truncates_is_one_error(rig: Callable[..., Rig], shm_dir: pathlib.Path) -> None:
    request = request_of([random_bytes(20 * 4096, 6).tobytes()], shm_dir, shared=lambda n: True)
    (segment,) = [path for path in shm_dir.iterdir() if path.suffix != ".lock"]
    with segment.open("r+b") as file:
        file.truncate(9 * 4096 + 5)
    it = rig()
    with pytest.raises(SegmentSizeError):
        it.run(request)
    assert it.ring.num_free == 4
    request.close("received")


def test_an_error_while_copying_stops_the_threads(rig: Callable[..., Rig], shm_dir: pathlib.Path) -> None:
    payload = random_bytes(20 * 4096, 7).tobytes()
    request = request_of([payload], shm_dir, shared=lambda n: True)
    it = rig()

    class Failing(Request):
        def unlink(self, why: str = "received") -> None:
            raise MmcopyError("on purpose")

    failing = Failing(request.native, request.items, Metrics())
    failing.sizes = request.sizes
    with pytest.raises(MmcopyError, match="on purpose"):
        it.run(failing)
    assert it.ring.num_free == 4
    assert it.run(request) == [payload]
    request.close("received")


def test_two_requests_at_once_share_the_ring(rig: Callable[..., Rig], shm_dir: pathlib.Path) -> None:
    it = rig(num_slots=6, num_threads=2)
    outcomes: dict[int, bool] = {}

    def work(seed: int) -> None:
        right = True
        for n in range(10):
            payload = random_bytes(4096 * 15 + n, seed * 100 + n).tobytes()
            request = request_of([payload], shm_dir, shared=lambda n: True)
            right = right and it.run(request) == [payload]
            request.close("received")
        outcomes[seed] = right

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {0: True, 1: True, 2: True}
    assert it.ring.num_free == 6
