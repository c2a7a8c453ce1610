"""The receiving process of one path of ``mmcopy bench e2e``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from .child import Child, answer_all
from .machine import describe
from .place import place_for

__all__ = ["Peer", "Ready", "Receive", "Received", "Receiving", "Setup", "digest"]

ANSWER_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What both processes of a path are started with."""

    device: str
    num_threads: int | None
    """Copy threads of a sender or receiver of mmcopy; None for its own number."""
    room_bytes: int
    """Of shared memory, for the largest case."""


@dataclass(frozen=True, slots=True)
class Receiving:
    """``receive`` is timed, until the device is synchronised; ``settle`` is called behind that."""

    receive: Callable[[Any], Sequence[Any]]
    settle: Callable[[], None] = lambda: None
    address: str = ""
    """What the sending half needs to know."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive ``message``; with ``check`` answer a digest of what arrived."""

    message: Any
    check: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """``cpu_s``: processor seconds of all threads of the process; ``seconds``: until the device was synchronised."""

    nbytes: int
    seconds: float
    cpu_s: float
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a receiving process is, and what its sender needs to know of it."""

    header: str
    address: str


def digest(arrays: Sequence[Any]) -> str:
    """Of the bytes of flat uint8 arrays, one after the other."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(memoryview(array))
    return state.hexdigest()


class Peer(Child):
    """A process that receives by one path, as a child of the one that sends."""

    def __init__(self, receiving: Callable[[Setup], AbstractContextManager[Receiving]], setup: Setup) -> None:
        super().__init__(_serve, receiving, setup, name="the receiving process")
        try:
            ready: Ready = self.answer()
        except BaseException:
            self.close()
            raise
        self.header = ready.header
        self.address = ready.address

    def ask(self, request: Receive) -> Received:
        """Send a request and wait for its answer. Raises :class:`PeerError`, and what the receiving raised."""
        self.send(request)
        received: Received = self.answer(ANSWER_LIMIT_S)
        return received


def _serve(
    connection: Connection, receiving: Callable[[Setup], AbstractContextManager[Receiving]], setup: Setup
) -> None:
    answer_all(connection, lambda: _answering(receiving(setup), setup.device))


@contextmanager
def _answering(
    opened: AbstractContextManager[Receiving], device: str
) -> Iterator[tuple[Ready, Callable[[Receive], Received]]]:
    with opened as receiving:
        place = place_for(device)

        def answer(request: Receive) -> Received:
            place.synchronize()
            cpu, start = time.process_time(), time.perf_counter()
            arrays = receiving.receive(request.message)
            place.synchronize()
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
            receiving.settle()
            nbytes = sum(len(array) for array in arrays)
            found = digest([place.to_numpy(array) for array in arrays]) if request.check else ""
            return Received(nbytes, seconds, cpu_s, found)

        yield Ready(describe(device), receiving.address), answer
