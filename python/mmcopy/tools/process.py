"""One child process: started with its log in a file, stopped by its own process id within a limit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["LIFELINE", "ChildProcess"]

LIFELINE = Path(__file__).with_name("lifeline.py")


class ChildProcess:
    """A command in a session of its own, so that a terminal's Ctrl-C reaches only the parent, which stops it.

    ``stdin`` is a pipe that the parent holds open: with ``watched=False`` the command is expected to end when that
    pipe does; with ``watched=True`` a watcher ends the command (see :mod:`.lifeline`), which then reads
    nothing from stdin. Either way the command does not outlive a parent that was killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path | str,
        watched: bool,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.command = [str(part) for part in command]
        self.log_path = Path(log_path)
        self.stop_timeout_s = stop_timeout_s
        self._env = None if env is None else dict(env)
        self._watched = watched
        self._pass_fds = tuple(pass_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def start(self) -> None:
        """Starts the command; returns when it was started, not when it is ready. OSError when that fails."""
        reading, writing = os.pipe()
        try:
            if self._watched:
                command = [sys.executable, "-I", "-S", str(LIFELINE), str(reading), *self.command]
                stdin: int = subprocess.DEVNULL
                fds = (*self._pass_fds, reading)
            else:
                command, stdin, fds = self.command, reading, self._pass_fds
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    pass_fds=fds,
                    start_new_session=True,
                )
            self._lifeline = writing
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """The process id. RuntimeError before :meth:`start`."""
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, None while the command runs. RuntimeError before :meth:`start`."""
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} was not started")
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """All that the command wrote so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL after ``stop_timeout_s``; the process has ended afterwards. Idempotent."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                self._process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                return self.kill()
        self._close_lifeline()
        return self._process.returncode

    def kill(self) -> int | None:
        """SIGKILL, and wait for the end: to everything else it looks like a crash. Idempotent."""
        if self._process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            return self._process.wait(self.stop_timeout_s)
        finally:
            self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
