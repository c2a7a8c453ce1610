"""Senders and workers in processes of their own, to be killed, stopped, forked, and asked several things at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from mmcopy import Sender as PlainSender
from mmcopy import TransportConfig
from mmcopy.endpoint import WorkerEndpoint

from .waiting import settle

LIMIT_S = 40.0

Told = dict[str, Any]
_P = TypeVar("_P", bound="Process")


class Gone(Exception):
    """The process ended before it answered."""


class Failed(Exception):
    """What the process raised: the name of the class, and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Process:
    """One side."""

    def __init__(self, role: str, *, prefix: tuple[str, ...] = (), **options: Any) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.rigs.fault_process", role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=pathlib.Path(__file__).resolve().parents[2],
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self._is_over

    def begin(self, command: str, /, **arguments: Any) -> Future[Any]:
        """Its answer, in time; raises :class:`Failed` or :class:`Gone`."""
        answer: Future[Any] = Future()
        stdin = self.process.stdin
        assert stdin is not None
        with self._lock:
            if self._is_over:
                answer.set_exception(Gone())
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
            try:
                stdin.write(json.dumps([number, command, arguments]).encode() + b"\n")
                stdin.flush()
            except BrokenPipeError:  # the reader says so
                pass
        return answer

    def ask(self, command: str, /, **arguments: Any) -> Any:
        return self.begin(command, **arguments).result(LIMIT_S)

    def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        for line in stdout:
            try:
                answer = json.loads(line)
            except ValueError:  # cut off by the kill
                break
            with self._lock:
                waiting = self._asked.pop(answer["number"])
            if "error" in answer:
                waiting.set_exception(Failed(*answer["error"]))
            else:
                waiting.set_result(answer["result"])
        with self._lock:
            self._is_over = True
            left, self._asked = self._asked, {}
        for each in left.values():
            each.set_exception(Gone())

    def stop(self) -> None:
        """All its threads stand still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        self.await_stop()

    def await_stop(self) -> None:
        """The same for one that stops by itself."""
        tasks = pathlib.Path(f"/proc/{self.pid}/task")
        stands = lambda: all(  # noqa: E731
            (task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt" for task in tasks.iterdir()
        )
        assert settle(stands, limit_s=LIMIT_S)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        if self.process.poll() is None:
            self.process.kill()
        self._finish()

    def end(self) -> None:
        """Let it close everything; it must end well."""
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0
        self._finish()

    def _finish(self) -> None:
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with self._lock, contextlib.suppress(BrokenPipeError):
                pipe.close()

    # ---- descriptors ---------------------------------------------------------

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208

    def limit_descriptors(self, free: int) -> Callable[[], None]:
        """Leave room for ``free`` more; what lifts the limit again."""
        self.ask("metrics")  # it has started
        before = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (self.num_descriptors() + free, before[1]))
        return lambda: _ignore(resource.prlimit(self.pid, resource.RLIMIT_NOFILE, before))


class Worker(Process):
    """A worker with its socket."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__("worker", **options)
        self.url = url
        self.address: list[str] = [url, self.ask("path")]

    def receive(self, *items: Told, seeds: list[int]) -> bool:
        return bool(self.ask("receive", items=list(items), seeds=seeds))


class Sender(Process):
    """A sender."""

    def __init__(self, **options: Any) -> None:
        super().__init__("sender", **options)

    def send(self, *workers: Worker, nbytes: int, seed: int) -> Told:
        told: Told = self.ask("send", nbytes=nbytes, seed=seed, workers=[worker.address for worker in workers])
        return told

    def is_empty(self) -> bool:
        found = self.ask("statistics")
        return not found or (found["leases_out"], found["used_nbytes"]) == (0, 0)

    def uses_leases(self, worker: Worker) -> bool:
        """Whether a tensor for ``worker`` goes by a lease now, and arrives."""
        told = self.send(worker, nbytes=999, seed=1)
        assert worker.receive(told, seeds=[1])
        return bool(told["path"] == "lease")

    def check_books(self) -> dict[str, Any]:
        """Nothing is out, and what was taken is accounted for; the statistics."""
        assert settle(self.is_empty), self.ask("statistics")
        found: dict[str, Any] = self.ask("statistics")
        assert found["taken"] == found["committed"] + found["aborted"], found
        assert self.ask("metrics")["tensors_sent"].get("lease", 0) == found["taken"], found
        return found


def _ignore(_: object) -> None:
    """A function's result that nobody wants."""


class Host:
    """Where the processes of one test live: their shared memory and their sockets."""

    def __init__(self, shm_dir: pathlib.Path, sockets: pathlib.Path) -> None:
        self.shm_dir = shm_dir
        self.sockets = sockets
        self._processes: list[Process] = []

    def worker(self, url: str, **options: Any) -> Worker:
        return self._noted(Worker(url, **{"directory": str(self.sockets), "shm_dir": str(self.shm_dir), **options}))

    def sender(self, *workers: Worker, **options: Any) -> Sender:
        """One that has probed ``workers`` and given them its arena."""
        sender = self._noted(Sender(**{"shm_dir": str(self.shm_dir), **options}))
        for worker in workers:
            assert sender.ask("connect", worker=worker.address) is None
        return sender

    def close(self) -> None:
        """Everybody ends, and well; nothing is left that the next start does not remove."""
        try:
            for process in self._processes:
                if process.process.poll() is None:
                    process.go_on()
                    process.end()
        finally:
            for process in self._processes:
                process.kill()
        with WorkerEndpoint(self.sockets):  # sockets of the killed
            pass
        assert list(self.sockets.iterdir()) == []
        with PlainSender(TransportConfig(mode="shm"), shm_dir=self.shm_dir):  # segments and locks of the killed
            assert settle(lambda: list(self.shm_dir.iterdir()) == []), list(self.shm_dir.iterdir())

    def _noted(self, process: _P) -> _P:
        self._processes.append(process)
        return process


@pytest.fixture
def host(shm_dir: pathlib.Path) -> Iterator[Host]:
    """Whose end checks that nothing is left."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name:  # paths of sockets are short
        host = Host(shm_dir, pathlib.Path(name) / "run")
        yield host
        host.close()
