"""JSON lines from a child process to its parent: both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmcopy.errors import MmcopyError
from mmcopy.tools.process import ChildProcess

__all__ = ["Report", "ReportingProcess", "WorkerError", "wait_for_stop"]

POLL_S = 0.02


class WorkerError(MmcopyError, RuntimeError):
    """A process did not start. The message is its own, or its last lines of output."""


class Report:
    """Writes JSON lines to a file descriptor, from any thread; nothing where the reader, the parent, has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """One line."""
        line = (json.dumps({"event": event, **fields}) + "\n").encode()
        with self._lock, contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._descriptor, line) :]


async def wait_for_stop(started: Callable[[], None] = lambda: None) -> None:
    """Return at a signal, or when the parent closes its end of our stdin. Calls ``started`` once both are watched."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    stdin = sys.stdin.fileno()
    if stat.S_ISFIFO(os.fstat(stdin).st_mode):
        loop.add_reader(stdin, lambda: None if os.read(stdin, 4096) else stop.set())
    started()
    await stop.wait()
    loop.remove_reader(stdin)


class ReportingProcess:
    """A module that runs in its own process and writes ``ready`` (or ``error``) once, then lines of any kind.

    ``name`` is for messages. ``start`` returns at once, so that several processes load their libraries in parallel.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, str],
        *,
        name: str,
        log_path: Path | str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._module = module
        self._options = dict(options)
        self._log_path = Path(log_path)
        self._env = env
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._process: ChildProcess | None = None

    def start(self) -> None:
        """Starts the process; :meth:`wait_until_ready` says when it serves."""
        reading, writing = os.pipe()
        try:
            options = [f"--{name}={value}" for name, value in self._options.items()]
            self._process = ChildProcess(
                [sys.executable, "-m", self._module, f"--report-fd={writing}", *options],
                log_path=self._log_path,
                watched=False,
                env=self._env,
                pass_fds=(writing,),
            )
            self._process.start()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), name=f"report-{self.name}", daemon=True)
        self._reader.start()

    def wait_until_ready(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        """Blocks until it serves, ``deadline`` (time.monotonic) at most. Raises :class:`WorkerError`."""
        while not self.reports("ready"):
            poll()
            for line in self.reports("error"):
                raise WorkerError(f"the {self.name} did not start: {line['error']}")
            if self._process is None or not self._process.running:
                raise WorkerError(f"the {self.name} ended before it listened\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise WorkerError(f"the {self.name} did not listen in time\n{self.log_tail()}")
            time.sleep(POLL_S)

    def reports(self, *events: str) -> list[dict[str, Any]]:
        """Its lines so far, in order: of these events, or all when none is named."""
        with self._lock:
            return [line for line in self._lines if not events or line["event"] in events]

    @property
    def pid(self) -> int:
        """The process id. RuntimeError before :meth:`start`."""
        if self._process is None:
            raise RuntimeError(f"the {self.name} was not started")
        return self._process.pid

    def stop(self) -> int | None:
        """Stops it within a limit and reads its report to the end. Idempotent."""
        code = None if self._process is None else self._process.stop()
        if self._reader is not None:
            self._reader.join(5.0)
        return code

    def log_tail(self) -> str:
        """The last lines it wrote."""
        return "" if self._process is None else "\n".join(self._process.log().splitlines()[-20:])

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError), self._lock:
                    self._lines.append(json.loads(line))
