"""A sender's arena and a worker, each in a process of its own when a test wants that."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from mmcopy import _native
from mmcopy.endpoint import SenderLink, WorkerEndpoint

LIMIT_S = 20.0

Handle = tuple[str, int, int, str]


def handle_of(writer: _native.LeaseWriter) -> Handle:
    """The four fields that go into a ShmHandle."""
    return writer.name, writer.offset, writer.nbytes, writer.owner_id


def send(arena: _native.Arena, data: bytes, consumers: list[int]) -> Handle:
    (writer,) = arena.take([len(data)], consumers, timeout_s=LIMIT_S)
    writer.write(data)
    writer.commit()
    return handle_of(writer)


class Worker:
    """An endpoint in this process, and the arenas that it was given."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.endpoint = WorkerEndpoint(directory)

    @property
    def path(self) -> str:
        return self.endpoint.path

    def claim(self, handle: Handle) -> _native.Lease:
        found = self.endpoint.native.find_arena(_native.lease_arena_id(*handle))
        assert found is not None, f"no arena for {handle[0]}"
        return found.claim(*handle)

    def receive(self, handle: Handle) -> bytes:
        lease = self.claim(handle)
        lease.wait_written(lease.nbytes, LIMIT_S)
        got = bytes(lease)
        assert lease.release()
        return got

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.endpoint.close()


def connect(arena: _native.Arena, path: str) -> tuple[int, SenderLink]:
    """The worker's number as a consumer, and the link."""
    link = SenderLink.connect(path, timeout_s=LIMIT_S)
    return arena.hand_over(link.native, timeout_s=LIMIT_S), link


class Process:
    """A sender or a worker in a process of its own: takes one JSON command a line, answers one JSON line each."""

    def __init__(self, role: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.rigs.arena_process", role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(__file__).resolve().parents[2],
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer; raises RuntimeError with the class and message of what the process raised."""
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(timeout=30)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)

    def end(self) -> int:
        self.process.communicate("", timeout=30)
        return self.process.returncode
