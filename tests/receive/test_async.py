"""receive_async: waited for, awaited, cancelled before and while it runs; nothing is left in any case."""

from __future__ import annotations

import asyncio
import os
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import pytest

from mmcopy import Receiver, Sender, TransportConfig
from mmcopy.errors import ClosedError, MmcopyTimeoutError, SegmentNotFoundError
from mmcopy.metrics import Counter
from mmcopy.receive.pending import PendingReceive
from tests.rigs.waiting import settle

ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)


class Held(Receiver):
    """A receiver whose receives wait for the test."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)

    def _receive(self, *args: Any) -> list[Any]:
        self.entered.release()
        assert self.go.wait(20)
        return super()._receive(*args)


@pytest.fixture
def sender(shm_dir: pathlib.Path) -> Iterator[Sender]:
    with Sender(ALWAYS, shm_dir=shm_dir) as sender:
        sender.cancel(sender.send(b"x"))  # its lock file is open from now on
        yield sender


@pytest.fixture
def held(shm_dir: pathlib.Path, nothing_left_open: None) -> Iterator[Held]:
    receiver = Held("cpu", framework="numpy", shm_dir=shm_dir)
    yield receiver
    receiver.go.set()
    receiver.close()


def left(shm_dir: pathlib.Path) -> list[str]:
    return [path.name for path in shm_dir.iterdir() if path.suffix != ".lock"]


def test_wait_done_and_tensors(sender: Sender, held: Held) -> None:
    pending = held.receive_async({"a": sender.send(b"abc")})
    assert held.entered.acquire(timeout=10)
    assert not pending.done()
    with pytest.raises(MmcopyTimeoutError, match=r"did not end within 0\.01 s"):
        pending.wait(0.01)
    with pytest.raises(MmcopyTimeoutError):
        _ = pending.tensors
    held.go.set()
    assert pending.wait(10)["a"].tobytes() == b"abc"
    assert pending.done()
    assert pending.tensors["a"].tobytes() == b"abc"
    assert not pending.cancel()


def test_one_that_ends_just_behind_the_limit_has_ended() -> None:
    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            try:
                return super().result(timeout)
            except FutureTimeoutError:
                self.set_result("tensors")
                raise

    assert PendingReceive(Late(), lambda: None).wait(0.0) == "tensors"


def test_out_and_errors(sender: Sender, held: Held) -> None:
    held.go.set()
    out = np.zeros(3, np.uint8)
    data = sender.send(b"abc")
    assert held.receive_async(data, out=out).wait(10) is out
    assert out.tobytes() == b"abc"
    with pytest.raises(SegmentNotFoundError):
        held.receive_async(data).wait(10)


def test_cancelled_before_it_begins(sender: Sender, held: Held, shm_dir: pathlib.Path) -> None:
    running = [held.receive_async(sender.send(b"abc")) for _ in range(2)]
    for _ in running:
        assert held.entered.acquire(timeout=10)
    queued = held.receive_async(sender.send(b"def"))
    assert len(left(shm_dir)) == 3
    assert queued.cancel()
    assert len(left(shm_dir)) == 2
    assert not running[0].cancel()
    held.go.set()
    assert [pending.wait(10).tobytes() for pending in running] == [b"abc"] * 2
    assert held.metrics.get(Counter.SEGMENTS_REMOVED, "released") == 1


def test_awaited(sender: Sender, held: Held) -> None:
    held.go.set()

    async def main() -> list[bytes]:
        got = await asyncio.gather(*(held.receive_async(sender.send(bytes([n]))) for n in range(20)))
        return [array.tobytes() for array in got]

    assert asyncio.run(main()) == [bytes([n]) for n in range(20)]


def test_an_await_that_is_cancelled(sender: Sender, held: Held, shm_dir: pathlib.Path) -> None:
    async def main() -> None:
        pending = [held.receive_async(sender.send(b"abc")) for _ in range(3)]
        tasks = [asyncio.ensure_future(awaited(each)) for each in pending]
        assert await asyncio.to_thread(held.entered.acquire, timeout=10)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError)
        held.go.set()

    async def awaited(pending: Any) -> Any:
        return await pending

    asyncio.run(main())
    assert settle(lambda: left(shm_dir) == [])


def test_close_lets_what_was_submitted_end(sender: Sender, held: Held, shm_dir: pathlib.Path) -> None:
    pending = [held.receive_async(sender.send(b"abc")) for _ in range(4)]
    threading.Timer(0.05, held.go.set).start()
    held.close()
    for each in pending:
        assert each.done()
    assert left(shm_dir) == []
    with pytest.raises(ClosedError):
        held.receive_async(sender.send(b"abc"))
    assert left(shm_dir) == []


def test_close_has_a_limit(sender: Sender, shm_dir: pathlib.Path) -> None:
    receiver = Held("cpu", framework="numpy", shm_dir=shm_dir, timeout_s=0.1)
    begun = [receiver.receive_async(sender.send(b"abc")) for _ in range(2)]
    queued = receiver.receive_async(sender.send(b"def"))
    for _ in begun:
        assert receiver.entered.acquire(timeout=10)
    with pytest.raises(MmcopyTimeoutError, match=r"2 asynchronous receives did not end within 0\.1 s, 1 more had not"):
        receiver.close()
    assert len(left(shm_dir)) == 2  # the queued one's is gone
    with pytest.raises(CancelledError):
        queued.wait(10)
    receiver.go.set()
    for each in begun:
        with pytest.raises(ClosedError):
            each.wait(10)
    assert settle(lambda: left(shm_dir) == [])


def test_a_forked_child_is_refused_at_once(sender: Sender, held: Held) -> None:
    held.go.set()
    held.receive_async(sender.send(b"abc")).wait(10)  # its threads are there, in this process
    data = sender.send(b"def")
    child = os.fork()
    if child == 0:
        try:
            held.receive_async(data)
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert held.receive_async(data).wait(10).tobytes() == b"def"


def test_receives_and_a_close_at_once_leave_nothing(sender: Sender, shm_dir: pathlib.Path) -> None:
    for _ in range(20):
        receiver = Receiver("cpu", framework="numpy", shm_dir=shm_dir)
        receiver.receive_async(sender.send(b"x")).wait(10)
        closer = threading.Thread(target=receiver.close)
        pending = []
        closer.start()
        for n in range(10):
            try:
                pending.append((n, receiver.receive_async(sender.send(bytes([n])))))
            except ClosedError:
                break
        closer.join(20)
        for n, each in pending:
            try:
                assert each.wait(10).tobytes() == bytes([n])
            except ClosedError:
                assert receiver._closed
        assert settle(lambda: left(shm_dir) == [])


def test_a_receiver_without_a_limit_of_its_own(sender: Sender, shm_dir: pathlib.Path) -> None:
    source = np.ones(300_000, np.uint8)
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir, timeout_s=float("inf")) as receiver:
        pending = receiver.receive_async(sender.send(source))
        assert pending.wait(float("inf")).tobytes() == source.tobytes()
