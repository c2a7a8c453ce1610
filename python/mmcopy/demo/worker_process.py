"""The parent's side of a worker process: starts it, reads its report, stops it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mmcopy.errors import MmcopyError

from .gateway import Worker
from .process import ChildProcess

__all__ = ["NIXL", "WorkerError", "WorkerProcess"]

Framework = Literal["torch", "numpy"]
POLL_S = 0.02
NIXL = "NixlConnector"
"""A connector with which vLLM workers take part in pd: decode is told what prefill answered."""


class WorkerError(MmcopyError, RuntimeError):
    """A worker did not start; the message is its own, or the last lines it wrote."""


class WorkerProcess:
    """One :mod:`mmcopy.demo.worker`. ``start`` returns at once, so that several load their libraries side by side."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        served_model_name: str,
        log_path: Path | str,
        role: str = "regular",
        engine: str = "tokenspeed",
        device: str = "cpu",
        framework: Framework = "torch",
        encoder_dtype: str = "bfloat16",
        shm_namespace: str = "own",
        bootstrap_port: int | None = None,
        kv_connector: str = "",
    ) -> None:
        self.role = role
        self.bootstrap_port = bootstrap_port
        self._reading, self._writing = -1, -1
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._options = {
            "model-dir": str(model_dir),
            "served-model-name": served_model_name,
            "role": role,
            "engine": engine,
            "device": device,
            "framework": framework,
            "encoder-dtype": encoder_dtype,
            "shm-namespace": shm_namespace,
            "kv-connector": kv_connector,
        }
        self._log_path = Path(log_path)
        self._process: ChildProcess | None = None

    def start(self) -> None:
        """Starts the process; :meth:`wait_until_ready` says when it serves."""
        reading, writing = os.pipe()
        try:
            options = [f"--{name}={value}" for name, value in self._options.items()]
            self._process = ChildProcess(
                [sys.executable, "-m", "mmcopy.demo.worker", f"--report-fd={writing}", *options],
                log_path=self._log_path,
                watched=False,
                pass_fds=(writing,),
            )
            self._process.start()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), name=f"report-{self.role}", daemon=True)
        self._reader.start()

    def wait_until_ready(self, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        """Blocks until the worker listens, ``deadline`` (time.monotonic) at most. Raises :class:`WorkerError`."""
        while not self.reports("ready"):
            poll()
            for line in self.reports("error"):
                raise WorkerError(f"the {self.role} worker did not start: {line['error']}")
            if self._process is None or not self._process.running:
                raise WorkerError(f"the {self.role} worker ended before it listened\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise WorkerError(f"the {self.role} worker did not listen in time\n{self.log_tail()}")
            time.sleep(POLL_S)

    def reports(self, *events: str) -> list[dict[str, Any]]:
        """Its lines so far, of these events (all when none is named), in order."""
        with self._lock:
            return [line for line in self._lines if not events or line["event"] in events]

    @property
    def address(self) -> Worker:
        """What the gateway is given."""
        return Worker(str(self.reports("ready")[0]["address"]), self.role, self.bootstrap_port)

    @property
    def device(self) -> str:
        return str(self.reports("ready")[0]["device"])

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"the {self.role} worker was not started")
        return self._process.pid

    def stop(self) -> int | None:
        """Stops it within a limit and reads its report to the end. Idempotent."""
        code = None if self._process is None else self._process.stop()
        if self._reader is not None:
            self._reader.join(5.0)
        return code

    def log_tail(self) -> str:
        return "" if self._process is None else "\n".join(self._process.log().splitlines()[-20:])

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError), self._lock:
                    self._lines.append(json.loads(line))
