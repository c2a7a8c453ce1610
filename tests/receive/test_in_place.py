"""Direct copies out of real leases, on a device that the test plays: late, in order, on a thread of its own."""

from __future__ import annotations

import ctypes
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from mmcopy import Metrics, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec, _native
from mmcopy._native import Extents
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import LeaseError
from mmcopy.metrics import Counter
from mmcopy.receive.in_place import DirectCopies, Growing, Run
from mmcopy.receive.request import Request, RequestOpener
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.played_stream import PlayedStream
from tests.rigs.waiting import settle

Reading: TypeAlias = tuple[int, int, int, int]
"""A lease of a request, the first of its bytes that are wanted, how many, and the address that they go to."""


class Passed:
    """An event behind what was queued before it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.broken = False

    def query(self) -> bool:
        if self.broken:
            raise ConnectionError("the device is broken")
        return self.reached.is_set()


class Device(PlayedStream):
    """The copy stream that direct copies need."""

    def __init__(self, *, writes_words: bool) -> None:
        super().__init__()
        self.writes_words = writes_words
        self.copies: list[Run] = []
        self.words = 0
        self.events: list[Passed] = []

    def copy_all(self, runs: Sequence[Run]) -> None:
        self.copies.extend(runs)
        self.queue(lambda: [ctypes.memmove(*run) for run in runs])

    def write_word(self, address: int, value: int) -> bool:
        if self.writes_words:
            self.words += 1
            self.queue(lambda: ctypes.memmove(address, value.to_bytes(4, "little"), 4))
        return self.writes_words

    def new_event(self) -> Passed:
        self.events.append(Passed())
        self.queue(self.events[-1].reached.set)
        return self.events[-1]

    def bind_thread(self) -> None:
        pass


class Rig:
    """A sender with an arena, a worker's endpoint, and direct copies onto one played device."""

    def __init__(self, directory: pathlib.Path, *, writes_words: bool, limit_s: float = 20.0) -> None:
        self.metrics = Metrics()
        self.endpoint = WorkerEndpoint(directory)
        self.worker = WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": self.endpoint.path})
        self.sender = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=16 * MIB, num_threads=2)
        self.sender.connect(self.worker, timeout_s=20)
        self.opener = RequestOpener("/dev/shm", ["mmcopy-"], self.metrics, endpoint=self.endpoint, timeout_s=20)
        self.requests: list[Request] = []
        self.device = Device(writes_words=writes_words)
        self.direct = DirectCopies(self.device, timeout_s=limit_s, metrics=self.metrics)
        self._kept: list[np.ndarray[Any, Any]] = []  # a test may end before its copies

    def open(self, *items: TensorData) -> Request:
        self.requests.append(self.opener.request(items))
        self.requests[-1].open_all()
        return self.requests[-1]

    def close_requests(self, why: str) -> None:
        for request in self.requests:
            request.close(why)
        self.requests.clear()

    def send(self, *arrays: np.ndarray[Any, Any]) -> Request:
        return self.open(*self.sender.send_many(arrays, worker=self.worker))

    def unwritten(self, nbytes: int) -> tuple[TensorData, _native.LeaseWriter]:
        """A lease of which nothing is there yet, and its writer."""
        arena = self.sender.arena
        assert arena is not None
        (writer,) = arena.take([nbytes], [0], timeout_s=5.0)
        handle = ShmHandle(writer.name, writer.offset, writer.nbytes, writer.owner_id)
        return TensorData("uint8", (nbytes,), handle), writer

    def copy(self, request: Request, readings: list[Reading]) -> list[Growing]:
        extents = Extents([(item, 0, 0, start, dest, nbytes) for item, start, nbytes, dest in readings])
        return self.direct.copy(request, extents, [0], is_packed=True)

    def run(self, request: Request, readings: list[Reading]) -> None:
        try:
            self.direct.follow(request, self.copy(request, readings))
        finally:
            self.direct.release_behind(request)

    def dest(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self._kept.append(np.zeros(nbytes, np.uint8))
        return self._kept[-1]

    @property
    def leases_out(self) -> int:
        return self.sender.leases_out

    def close(self) -> None:
        self.device.finish()
        self.direct.close(time.monotonic() + 20)
        self.device.close()
        self.close_requests("received")
        assert settle(lambda: self.leases_out == 0)
        self.sender.close()
        self.endpoint.close()


@pytest.fixture(params=[True, False], ids=["stream flags", "event flags"])
def rig(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, nothing_left_open: None, segments: Callable[[], list[str]]
) -> Iterator[Rig]:
    rig = Rig(tmp_path / "s", writes_words=request.param)
    yield rig
    rig.close()
    assert segments() == []


def test_parts_of_leases_are_copied_and_nothing_else(rig: Rig) -> None:
    arrays = [random_bytes(n) for n in (70_001, 5, 3000, 1)]
    request = rig.send(*arrays)
    dest = rig.dest(200_000)
    at = dest.ctypes.data
    parts = [(0, 69_000, 1001, 0), (1, 0, 5, 1024), (2, 100, 2000, 2048), (0, 17, 50_000, 100_096), (3, 1, 0, 9)]
    rig.run(request, [(n, start, nbytes, at + to) for n, start, nbytes, to in parts])
    rig.device.finish()
    wanted = np.zeros_like(dest)
    for n, start, nbytes, to in parts:
        wanted[to : to + nbytes] = arrays[n][start : start + nbytes]
    assert (dest == wanted).all()
    assert len(rig.device.copies) == 4
    rig.close_requests("received")  # also the lease of which nothing was read


def test_neighbours_are_one_copy_also_where_a_window_cuts_them(rig: Rig) -> None:
    request = rig.send(random_bytes(1000), random_bytes(513), random_bytes(4096))
    dest = rig.dest(8192)
    at = dest.ctypes.data
    rig.run(request, [(0, 256, 744, at), (1, 0, 513, at + 768), (2, 0, 1000, at + 1536)])
    assert [nbytes for _, _, nbytes in rig.device.copies] == [2536]
    rig.run(request, [])
    assert len(rig.device.copies) == 1


def test_a_lease_of_two_copies_goes_back_once_and_behind_the_last(rig: Rig) -> None:
    rig.device.gate.clear()
    request = rig.send(random_bytes(100_000), random_bytes(10))
    dest = rig.dest(200_000)
    at = dest.ctypes.data
    rig.copy(request, [(0, 0, 1000, at), (1, 0, 10, at + 1024)])
    assert (rig.device.words, rig.device.events) == (0, [])
    rig.copy(request, [(0, 50_000, 50_000, at + 2048)])
    rig.direct.release_behind(request)
    rig.close_requests("received")  # as a receiver does, while the copies wait
    assert rig.leases_out == 2
    rig.device.finish()
    assert settle(lambda: rig.leases_out == 0)
    assert rig.metrics.get(Counter.LEASES_RELEASED, "received") == 2
    assert rig.device.words == (2 if rig.device.writes_words else 0)


def test_a_lease_that_is_being_written_is_followed(rig: Rig) -> None:
    array = random_bytes(9 * MIB + 3)
    data, writer = rig.unwritten(len(array))
    dest = rig.dest(5 * MIB)
    timer = threading.Timer(0.1, lambda: (writer.write(array), writer.commit()))
    timer.start()
    rig.run(rig.open(data), [(0, 4 * MIB + 1, 5 * MIB, dest.ctypes.data)])
    timer.join()
    rig.device.finish()
    assert (dest == array[4 * MIB + 1 :][: 5 * MIB]).all()


def test_an_error_releases_what_was_begun_and_leaves_the_rest(rig: Rig) -> None:
    rig.device.gate.clear()
    given_up, writer = rig.unwritten(MIB)
    sent = rig.sender.send_many([random_bytes(2 * MIB), random_bytes(7)], worker=rig.worker)
    request = rig.open(*sent, given_up)
    timer = threading.Timer(0.1, writer.abort)
    timer.start()
    dest = rig.dest(2 * MIB)
    at = dest.ctypes.data
    with pytest.raises(LeaseError, match="given up by its sender"):
        rig.run(request, [(0, 0, 2 * MIB, at), (2, 5, 10, at)])
    timer.join()
    del writer
    rig.close_requests("released")
    assert settle(lambda: rig.leases_out == 2)  # the copy of the first, and what reads the second, may still run
    rig.device.finish()
    assert (dest == random_bytes(2 * MIB)).all()
    assert settle(lambda: rig.leases_out == 0)


@pytest.fixture
def impatient(tmp_path: pathlib.Path, nothing_left_open: None, segments: Callable[[], list[str]]) -> Iterator[Rig]:
    """Its thread gives copies 0.1 s."""
    rig = Rig(tmp_path / "s", writes_words=False, limit_s=0.1)
    yield rig
    rig.close()
    assert segments() == []


def test_leases_of_copies_that_do_not_end_are_kept_until_they_do(
    impatient: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """And the thread goes on: what the next receive reads is waited for, too."""
    rig = impatient
    rig.device.gate.clear()
    for num_leases in (3, 2):
        request = rig.send(*(random_bytes(1000, n) for n in range(num_leases)))
        dest = rig.dest(1000).ctypes.data
        rig.run(request, [(n, 0, 1000, dest) for n in range(num_leases)])
        rig.close_requests("received")
    said = "copies out of an arena have not ended within 0.1 s: {} leases are kept until they have"
    assert settle(lambda: [r.getMessage() for r in caplog.records] == [said.format(3), said.format(2)])
    assert rig.leases_out == 5
    rig.device.gate.set()
    assert settle(lambda: rig.leases_out == 0)
    assert rig.metrics.get(Counter.LEASES_RELEASED, "received") == 5


def test_late_leases_go_back_at_the_latest_with_close(impatient: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig = impatient
    rig.device.gate.clear()
    rig.run(rig.send(random_bytes(1000)), [(0, 0, 1000, rig.dest(1000).ctypes.data)])
    assert settle(lambda: len(caplog.records) == 1)


def test_a_broken_device_reads_no_lease_any_more(impatient: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig = impatient
    rig.device.gate.clear()
    rig.run(rig.send(random_bytes(1000)), [(0, 0, 1000, rig.dest(1000).ctypes.data)])
    assert rig.leases_out == 1
    rig.device.events[0].broken = True
    assert settle(lambda: rig.leases_out == 0)
    assert "asking for the end of copies" in caplog.text
    caplog.clear()  # its traceback keeps the lease
