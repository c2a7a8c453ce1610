"""The two processes of one path of ``mmcopy bench e2e``: one that sends, and its child, which receives."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from .child import Child, answer_all
from .e2e_paths import E2ePath
from .load import BytesDifferError, Load
from .paths import Path, Role
from .peer import Peer, Receive, Setup, digest
from .place import HostPlace
from .plan import Case

__all__ = ["Delivery", "Pair"]

TURN_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """Seconds of one delivery: from the sender's own array to the answer; of the receiving process alone, in time and
    in its processor time."""

    total_s: float
    receive_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Take:
    case: Case
    seed: int


@dataclass(frozen=True, slots=True)
class _Check:
    pass


@dataclass(frozen=True, slots=True)
class _Deliver:
    untimed: int
    timed: int


_Request: TypeAlias = "_Take | _Check | _Deliver"


class Pair(Child):
    """Two processes that were told to start; :meth:`ready` waits until they have. Not thread-safe."""

    def __init__(self, path: E2ePath, setup: Setup) -> None:
        super().__init__(_serve, path, setup, name="the sending process", has_children=True)
        self.path = path

    def ready(self) -> str:
        """Wait, and return what the receiving process runs on."""
        header: str = self.answer()
        return header

    def check(self) -> None:
        """Deliver new bytes and compare them. Raises :class:`BytesDifferError`."""
        self.send(_Check())
        self.answer(TURN_LIMIT_S)

    def deliver(self, *, untimed: int, timed: int) -> list[Delivery]:
        """Deliver so many times back to back, and return the later ones."""
        self.send(_Deliver(untimed, timed))
        deliveries: list[Delivery] = self.answer(TURN_LIMIT_S)
        return deliveries

    def begin_case(self, case: Case, *, seed: int) -> None:
        """Have the load of ``case`` made; take the :meth:`answer` before anything else."""
        self.send(_Take(case, seed))


def _serve(connection: Connection, path: E2ePath, setup: Setup) -> None:
    answer_all(connection, lambda: _sending(path, setup))


@contextmanager
def _sending(path: E2ePath, setup: Setup) -> Iterator[tuple[str, Callable[[_Request], object]]]:
    with Peer(path.receiving, setup) as peer, path.sending(setup, peer) as sending:
        kept: list[Load] = []

        def answer(request: _Request) -> object:
            if isinstance(request, _Take):
                kept.clear()  # before the next one takes its memory
                kept.append(Load(request.case, HostPlace(), seed=request.seed))
                return None
            (load,) = kept
            way = sending(load)
            if isinstance(request, _Deliver):
                return _deliver(way, request, is_limit=path.role is Role.LIMIT)
            if path.role is not Role.LIMIT:
                load.change()
                with way.message() as message:
                    received = peer.ask(Receive(message, check=True))
                wanted = (load.case.total_bytes, digest(load.parts))
                if (received.nbytes, received.digest) != wanted:
                    raise BytesDifferError(
                        f"{path.name}, {load.case.label}: {received.nbytes} bytes with digest {received.digest} "
                        f"arrived, {wanted[0]} with {wanted[1]} were sent"
                    )
            return None

        yield peer.header, answer


def _deliver(way: Path, request: _Deliver, *, is_limit: bool) -> list[Delivery]:
    deliveries = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(request.untimed + request.timed):
            begun = time.perf_counter()
            with way.message() as message:
                received = way.receive(message)
                seconds = time.perf_counter() - begun
            deliveries.append(Delivery(received.seconds if is_limit else seconds, received.seconds, received.cpu_s))
    finally:
        gc.enable()
    return deliveries[request.untimed :]
