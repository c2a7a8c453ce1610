"""The receiving process of ``mmcopy bench e2e``: a worker that only receives."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from mmcopy.config import ENDPOINT_LABEL, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import MmcopyError
from mmcopy.receive.receiver import Receiver

from . import baselines
from .place import Place, framework_for, place_for

__all__ = ["Limit", "Peer", "PeerError", "Receive", "Received", "digest"]

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 120.0


class PeerError(MmcopyError):
    """The receiving process failed, or has ended."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive ``message`` by the path of that name; with ``check`` answer a digest of what arrived."""

    path: str
    message: Any
    check: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """Copy ``nbytes`` out of memory that is pinned and filled already into memory on the device that exists."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """``cpu_s``: processor seconds of all threads of the process; ``seconds``: until the device was synchronised."""

    nbytes: int
    seconds: float
    cpu_s: float
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    header: str
    endpoint: str


def digest(arrays: Sequence[Any]) -> str:
    """Of the bytes of flat uint8 arrays, one after the other."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(memoryview(array))
    return state.hexdigest()


class Peer:
    """A process with a Receiver, which ends when this process does. Not thread-safe."""

    def __init__(self, device: str, *, num_threads: int | None, shm_dir: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, device, num_threads, shm_dir), name="mmcopy-bench-peer", daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            ready: Ready = self._answer(START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.header = ready.header
        self.worker = WorkerSpec("bench", labels={ENDPOINT_LABEL: ready.endpoint})
        """The worker that a sender sends to."""

    def ask(self, request: Receive | Limit) -> Received:
        """Send a request and wait for its answer. Raises :class:`PeerError`."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise PeerError(f"the receiving process is gone: {error}") from error
        answer: Received = self._answer(ANSWER_LIMIT_S)
        return answer

    def close(self) -> None:
        """End the process and wait for that."""
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._connection.poll(limit_s):
                raise PeerError(f"the receiving process did not answer within {limit_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerError("the receiving process ended") from error
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer


def _serve(connection: Connection, device: str, num_threads: int | None, shm_dir: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the connection
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mmcopy-bench-") as directory,
            WorkerEndpoint(directory) as endpoint,
            Receiver(
                device, framework=framework_for(device), shm_dir=shm_dir, num_threads=num_threads, endpoint=endpoint
            ) as receiver,
        ):
            from .machine import describe

            place = place_for(device)
            serving = _Serving(receiver, place, shm_dir)
            connection.send(Ready(describe(device), endpoint.path))
            while True:
                try:
                    request = connection.recv()
                except EOFError:
                    return
                try:
                    answer: Received | str = serving.answer(request)
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                connection.send(answer)
    except OSError:
        pass  # the parent has gone
    except MmcopyError as error:
        connection.send(f"{type(error).__name__}: {error}")


class _Serving:
    def __init__(self, receiver: Receiver, place: Place, shm_dir: str) -> None:
        self._place = place
        self._paths: dict[str, Callable[[Any], Sequence[Any]]] = {
            "lease": receiver.receive,
            "lease_streamed": receiver.receive,
            "segment": receiver.receive,
            "shared_memory_staged": lambda named: baselines.shared_memory_staged(place, named, shm_dir=shm_dir),
            "inline": lambda messages: baselines.inline(place, messages),
        }
        self._pinned: dict[int, tuple[Any, Any]] = {}

    def answer(self, request: Receive | Limit) -> Received:
        if isinstance(request, Limit):
            return self._limit(request.nbytes)
        self._place.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        arrays = self._paths[request.path](request.message)
        self._place.synchronize()
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        nbytes = sum(len(array) for array in arrays)
        found = digest([self._place.to_numpy(array) for array in arrays]) if request.check else ""
        return Received(nbytes, seconds, cpu_s, found)

    def _limit(self, nbytes: int) -> Received:
        if nbytes not in self._pinned:
            self._pinned = {nbytes: (self._place.host(nbytes), self._place.empty(nbytes))}
        host, existing = self._pinned[nbytes]
        self._place.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        self._place.overwrite(existing, host)
        self._place.synchronize()
        return Received(nbytes, time.perf_counter() - start, time.process_time() - cpu)
