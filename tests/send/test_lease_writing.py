"""Leases that are announced before they are written: streams and reservations, committed, failed, taken back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmcopy import Sender, ShmHandle, TensorData, TransportConfig, _native
from mmcopy.errors import ClosedError, LeaseError
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.lease_side import Side, is_empty, sender, side, sockets, statistics
from tests.rigs.waiting import settle

__all__ = ["sender", "side", "sockets"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_left_open")


class HeldWriter:
    """A lease whose writing begins when ``go`` is set."""

    def __init__(self, writer: _native.LeaseWriter, go: threading.Event) -> None:
        self._writer = writer
        self._go = go
        self.describe = writer.describe

    def write_later(self, tensor: Any, *, num_threads: int) -> HeldWrite:
        return HeldWrite(self._go, lambda: self._writer.write_later(tensor, num_threads=num_threads))


class HeldWrite:
    def __init__(self, go: threading.Event, begin: Callable[[], _native.LaterWrite]) -> None:
        self._go = go
        self._writing: _native.LaterWrite | None = None
        self._thread = threading.Thread(target=self._begin, args=(begin,))
        self._thread.start()

    def _begin(self, begin: Callable[[], _native.LaterWrite]) -> None:
        assert self._go.wait(20)
        self._writing = begin()

    def done(self) -> bool:
        return self._writing is not None and self._writing.done()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self._writing is not None and self._writing.wait(timeout_s)


def hold_streams(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Streams that begin from now on are not written until the event is set."""
    go = threading.Event()
    lease_one = sender._lease_one

    def held(*args: Any) -> tuple[Any, bool]:
        writer, may_lease = lease_one(*args)
        return (None if writer is None else HeldWriter(writer, go)), may_lease

    monkeypatch.setattr(sender, "_lease_one", held)
    return go


def is_closed(sender: Sender) -> bool:
    try:
        sender.send(np.zeros(1, np.uint8))
    except ClosedError:
        return True
    return False


def test_a_stream_is_received_while_it_is_written(sender: Sender, side: Side) -> None:
    array = random_bytes(9 * MIB + 5)
    sending = sender.send_streaming(array, worker=side.spec)
    assert sending.data.path == "lease"
    assert side.receiver.receive(sending.data).tobytes() == array.tobytes()
    assert sending.wait(20) is sending.data
    assert sending.done()


def test_without_an_arena_a_stream_is_an_ordinary_send(side: Side, segments: Callable[[], list[str]]) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1), arena_bytes=0) as plain:
        plain.connect(side.spec, timeout_s=20)
        sending = plain.send_streaming(random_bytes(1000), worker=side.spec)
        assert sending.done()
        assert sending.wait().path == "segment"
        assert side.receiver.receive(sending.data).tobytes() == random_bytes(1000).tobytes()
        with plain.reserve((3, 2), "int32", worker=side.spec) as reserved:
            assert reserved.array is not None
            reserved.array[:] = [[1, 2], [3, 4], [5, 6]]
        assert reserved.data is not None
        assert reserved.data.path == "segment"
        assert side.receiver.receive(reserved.data).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_reservation_is_the_memory_itself(sender: Sender, side: Side) -> None:
    with sender.reserve((2, 3), "float32", worker=side.spec) as reserved:
        assert reserved.array is not None
        reserved.array[:] = np.arange(6).reshape(2, 3)
    assert reserved.data is not None
    assert reserved.data.path == "lease"
    assert side.receiver.receive(reserved.data).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ClosedError):
        reserved.commit()


def test_a_reservation_is_given_back_when_it_fails_or_is_forgotten(sender: Sender, side: Side) -> None:
    with pytest.raises(KeyError), sender.reserve((MIB,), "uint8", worker=side.spec):
        raise KeyError("the preprocessor")
    assert settle(lambda: is_empty(sender))
    reserved = sender.reserve((MIB,), "uint8", worker=side.spec)
    assert statistics(sender)["leases_out"] == 1
    del reserved
    assert settle(lambda: is_empty(sender))


def test_a_reservation_that_is_not_handed_over_is_taken_back_with_its_array_still_there(
    sender: Sender, side: Side
) -> None:
    reserved = sender.reserve((MIB,), "uint8", worker=side.spec)
    array = reserved.array
    data = reserved.commit()
    with pytest.raises(KeyError), sender.guard(data):
        raise KeyError("the call to the worker")
    with pytest.raises(LeaseError, match="is over"):
        side.receiver.receive(data)
    assert statistics(sender)["leases_out"] == 1  # it could still be written to
    del array
    assert settle(lambda: is_empty(sender))


def test_a_failed_writer_is_the_receivers_error(sender: Sender, side: Side) -> None:
    arena = sender.arena
    assert arena is not None
    (writer,) = arena.take([2 * MIB], [0], timeout_s=1.0)
    handle = ShmHandle(writer.name, writer.offset, writer.nbytes, writer.owner_id)
    timer = threading.Timer(0.1, writer.abort)
    timer.start()
    with pytest.raises(LeaseError, match="given up by its sender"):
        side.receiver.receive(TensorData("uint8", (2 * MIB,), handle))
    timer.join()
    del writer


def test_a_stream_that_comes_while_the_sender_closes_is_refused(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the streams that it finds, and for no further one."""
    sender = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=4 * MIB)
    sender.connect(side.spec, timeout_s=20)
    go = hold_streams(sender, monkeypatch)
    sending = sender.send_streaming(random_bytes(1000), worker=side.spec)
    closing = threading.Thread(target=sender.close)
    closing.start()
    try:
        assert settle(lambda: is_closed(sender))
        with pytest.raises(ClosedError):
            sender.send_streaming(random_bytes(1000), worker=side.spec)
    finally:
        go.set()
        side.receiver.receive(sending.data)
        closing.join(20)
    assert not closing.is_alive()
    assert sending.done()


def test_a_dropped_stream_is_written_and_its_source_let_go(sender: Sender, side: Side) -> None:
    arrays = [random_bytes(3 * MIB + n, n) for n in range(3)]
    sources = [array.copy() for array in arrays]
    gone = [weakref.ref(source) for source in sources]
    sent = [sender.send_streaming(source, worker=side.spec).data for source in sources]
    del sources
    assert all((side.receiver.receive(data) == array).all() for data, array in zip(sent, arrays, strict=True))
    side.receiver.receive(sender.send_streaming(b"the next", worker=side.spec).wait())
    assert settle(lambda: not any(source() is not None for source in gone))


def test_a_stream_is_taken_back_while_it_is_written(
    sender: Sender, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a guard whose call fails at once: the writing goes on, and nobody can claim what is written."""
    go = hold_streams(sender, monkeypatch)
    array = random_bytes(100_001)
    sending, claimed = (sender.send_streaming(array, worker=side.spec) for _ in range(2))
    received = side.receiver.receive_async(claimed.data)
    try:
        assert settle(lambda: statistics(sender)["held"][0] == 2)
        with pytest.raises(KeyError), sender.guard(sending.data):
            raise KeyError
        with pytest.raises(LeaseError, match="is over"):
            side.receiver.receive(sending.data)
        assert statistics(sender)["held"][0] == 1
    finally:
        go.set()
    sending.wait(20)
    assert np.array_equal(received.wait(20), array)
    assert settle(lambda: is_empty(sender))
    assert not sender.cancel(sending.data)
