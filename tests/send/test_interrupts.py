"""An exception out of a signal's handler in the middle of a send or a receive: nothing is left without an owner."""

from __future__ import annotations

import contextlib
import pathlib
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from mmcopy import Receiver, Sender, TransportConfig
from tests.rigs.arrays import MIB
from tests.rigs.lease_side import Side, is_empty, side, sockets
from tests.rigs.waiting import settle

__all__ = ["side", "sockets"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_left_open")

LARGE = np.ones(64 * MIB, np.uint8)
"""Takes many times as long to copy as the signal takes to come."""


class Interrupted(BaseException):
    """What the handler raises."""


@contextlib.contextmanager
def interrupted(seconds: float = 0.0005) -> Iterator[None]:
    """The block ends by the handler of a signal that comes ``seconds`` after its begin."""

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Interrupted):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_send_leaves_no_segment(shm_dir: pathlib.Path) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir, num_threads=2) as sender:
        with interrupted():
            sender.send(LARGE)
        with interrupted():
            sender.send_many([np.ones(3, np.uint8), LARGE])
        assert settle(lambda: [path.name for path in shm_dir.iterdir() if path.suffix != ".lock"] == [])


def test_an_interrupted_send_leaves_no_lease(side: Side) -> None:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=130 * MIB, num_threads=2) as sender:
        assert sender.connect(side.spec, timeout_s=20).has_arena
        with interrupted():
            sender.send(LARGE, worker=side.spec)
        with interrupted():
            sender.send_many([np.ones(3, np.uint8), LARGE], worker=side.spec)
        assert settle(lambda: is_empty(sender)), "at once, and not when they have been unclaimed for a minute"


def test_an_interrupted_receive_gives_all_back(side: Side, shm_dir: pathlib.Path) -> None:
    leases = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=130 * MIB, num_threads=2)
    segments = Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir, arena_bytes=0)
    with leases, segments, Receiver("cpu", framework="numpy", shm_dir=shm_dir, endpoint=side.endpoint) as receiver:
        assert leases.connect(side.spec, timeout_s=20).has_arena
        items = [leases.send(LARGE, worker=side.spec), segments.send(LARGE), leases.send(LARGE[:9], worker=side.spec)]
        assert [item.path for item in items] == ["lease", "segment", "lease"]
        with interrupted():
            receiver.receive(items)
        assert settle(lambda: is_empty(leases))
        assert [path.name for path in shm_dir.iterdir() if path.suffix != ".lock"] == []
