"""A program that is a sender with an arena, or a worker: ``tests.rigs.arena_process sender|worker DIRECTORY``."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from mmcopy import _native
from mmcopy.endpoint import SenderLink, WorkerEndpoint

from .arena_rig import LIMIT_S, Handle, Worker, handle_of, send
from .arrays import random_bytes


class Sender:
    """Commands of a sender."""

    def __init__(self) -> None:
        self.arena: _native.Arena | None = None
        self.links: dict[int, SenderLink] = {}
        self.writers: dict[str, _native.LeaseWriter] = {}

    def create(self, data_nbytes: int, **options: Any) -> str:
        self.arena = _native.Arena(data_nbytes, **options)
        return self.arena.instance_id

    def connect(self, path: str) -> int:
        assert self.arena is not None
        link = SenderLink.connect(path, timeout_s=LIMIT_S)
        slot = self.arena.hand_over(link.native, timeout_s=LIMIT_S)
        self.links[slot] = link
        return slot

    def send(self, nbytes: int, seed: int, consumers: list[int]) -> Handle:
        assert self.arena is not None
        return send(self.arena, random_bytes(nbytes, seed).tobytes(), consumers)

    def take(self, nbytes: int, consumers: list[int]) -> Handle:
        """A lease that nothing is written to."""
        assert self.arena is not None
        (writer,) = self.arena.take([nbytes], consumers, timeout_s=LIMIT_S)
        self.writers[writer.name] = writer
        return handle_of(writer)

    def finish(self, name: str, seed: int) -> None:
        writer = self.writers.pop(name)
        writer.write(random_bytes(writer.nbytes, seed).tobytes())
        writer.commit()

    def statistics(self) -> dict[str, Any]:
        assert self.arena is not None
        return self.arena.statistics()

    def fork(self) -> int:
        """The pid of a child that lives on after this process; what it could do with its inheritance is in its exit."""
        assert self.arena is not None
        child = os.fork()
        if child == 0:
            try:
                self.arena.take([1], [0], timeout_s=1)
            except _native_closed():
                os.close(0)
                os.close(1)
                threading.Event().wait(60)
            finally:
                os._exit(3)
        return child


class WorkerProcess:
    """Commands of a worker."""

    def __init__(self, directory: str) -> None:
        self.worker = Worker(pathlib.Path(directory))
        self.leases: dict[str, _native.Lease] = {}

    def path(self) -> str:
        return self.worker.path

    def receive(self, handle: Handle, nbytes: int, seed: int) -> bool:
        return self.worker.receive(tuple(handle)) == random_bytes(nbytes, seed).tobytes()

    def claim(self, handle: Handle) -> None:
        self.leases[handle[0]] = self.worker.claim(tuple(handle))

    def check(self, name: str, nbytes: int, seed: int) -> bool:
        return bytes(self.leases[name]) == random_bytes(nbytes, seed).tobytes()

    def wait(self, name: str, upto: int, timeout_s: float) -> int:
        return self.leases[name].wait_written(upto, timeout_s)

    def release(self, name: str) -> bool:
        return self.leases.pop(name).release()

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            os.close(0)
            os.close(1)
            threading.Event().wait(60)
            os._exit(3)
        return child

    def arenas(self) -> int:
        endpoint: WorkerEndpoint = self.worker.endpoint
        return len(endpoint.native.arenas())


def _native_closed() -> type[Exception]:
    from mmcopy.errors import ClosedError

    return ClosedError


def main() -> None:
    role: Sender | WorkerProcess = Sender() if sys.argv[1] == "sender" else WorkerProcess(sys.argv[2])
    for line in sys.stdin:
        command, arguments = json.loads(line)
        call: Callable[..., Any] = getattr(role, command)
        try:
            answer = {"result": call(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(1, json.dumps(answer).encode() + b"\n")
    if isinstance(role, WorkerProcess):
        role.worker.endpoint.close()


if __name__ == "__main__":
    main()
