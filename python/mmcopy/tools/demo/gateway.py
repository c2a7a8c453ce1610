"""A real SMG gateway on 127.0.0.1, started and stopped by its own process id.

    with Gateway(model_dir, [Worker("grpc://127.0.0.1:5001")], transport="shm") as gateway:
        reply = gateway.chat(images=[png_bytes])
        assert reply.status == 200, reply.text

Nothing is simulated: the gateway takes the requests, preprocesses the pictures, writes the pixels (inline or to shared
memory) and calls the workers. A worker must listen before the gateway starts: the gateway checks it once then, and the
next time half a minute later.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mmcopy.errors import ConfigError, MissingDependencyError, MmcopyError
from mmcopy.tools.process import ChildProcess

from .chat import HttpReply, chat_body, http

__all__ = ["Gateway", "GatewayError", "Worker", "find_smg"]

TOPOLOGIES = ("regular", "pd", "epd")
ROLES = ("regular", "encode", "prefill", "decode")
POLL_S = 0.02
START_TRIES = 3

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TELLING = re.compile(r"\b(WARN|ERROR)\b|rror:")


class GatewayError(MmcopyError, RuntimeError):
    """The gateway did not start, or did not get ready in time; the message ends with its last log lines."""


class _WorthAnotherTryError(GatewayError):
    """Another start may succeed."""


@dataclass(frozen=True)
class Worker:
    """A worker's address as the gateway gets it. ``bootstrap_port``: encode and prefill workers have one."""

    url: str
    role: str = "regular"
    bootstrap_port: int | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"worker role is {self.role!r}, want one of {', '.join(ROLES)}")


def find_smg() -> str:
    """The path of the ``smg`` command: beside this Python first, then on PATH. MissingDependencyError without it."""
    beside = Path(sysconfig.get_path("scripts")) / "smg"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("smg")
    if found is None:
        raise MissingDependencyError(
            f"the SMG gateway (command smg) was found neither in {beside.parent} nor on PATH: "
            "pip install 'mmcopy[demo]'"
        )
    return found


class Gateway:
    """One gateway process; a context manager that starts it and, whatever happens, stops it.

    Args:
        model_dir: What :func:`.model_dir.write_model_dir` wrote.
        workers: Who serves. Without any the gateway starts empty: add ``--enable-igw`` to ``flags`` and register
            workers with :meth:`request`.
        topology: ``regular``, ``pd`` (prefill and decode workers) or ``epd`` (encode, prefill and decode).
        transport: The gateway's flag; None leaves it out.
        shm_min_bytes: The gateway's flag; None leaves it out.
        flags: More arguments.
        env: More variables. This process's SMG_* variables are never passed on.
        model: The served name that :meth:`chat` asks for, and that :meth:`start` waits for.
        log_path: Where its output goes; by default a temporary file that is removed when it stops.
        start_timeout_s: The limit of :meth:`start`, all tries together.
        stop_timeout_s: The limit of a polite stop, before SIGKILL.
        shutdown_grace_s: How long running requests may take when it stops (its flag; whole seconds).
        wait_until_serving: False returns from :meth:`start` as soon as the gateway answers HTTP.
        poll: Called in every wait; raising ends the wait. For a caller that handles signals by itself.

    Blocking: every method blocks the calling thread. :meth:`chat`, :meth:`request` and the readers are thread-safe.
    """

    def __init__(
        self,
        model_dir: Path | str,
        workers: Sequence[Worker] = (),
        *,
        topology: str = "regular",
        transport: str | None = None,
        shm_min_bytes: int | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        model: str = "mmcopy-demo",
        log_path: Path | str | None = None,
        start_timeout_s: float = 30.0,
        stop_timeout_s: float = 10.0,
        shutdown_grace_s: int = 1,
        wait_until_serving: bool = True,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        if topology not in TOPOLOGIES:
            raise ConfigError(f"topology is {topology!r}, want one of {', '.join(TOPOLOGIES)}")
        self.model_dir = Path(model_dir)
        self.registered = tuple(workers)
        self.topology = topology
        self.model = model
        self.transport = transport
        self.shm_min_bytes = shm_min_bytes
        self.flags = tuple(flags)
        self.env = dict(env or {})
        self.url = ""
        self.metrics_url = ""
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.shutdown_grace_s = shutdown_grace_s
        self.wait_until_serving = wait_until_serving
        self._poll = poll
        self._log_path = None if log_path is None else Path(log_path)
        self._log_is_ours = log_path is None
        self._process: ChildProcess | None = None
        self.pids: list[int] = []

    # ---- life ------------------------------------------------------------

    def start(self) -> None:
        """Starts the gateway and waits until every worker is healthy and the model is served.

        When a port was taken meanwhile, or a worker was too slow for the one early probe, it is started again.
        Raises :class:`GatewayError` when it ends early or the limit passes (it is stopped then), and
        :class:`MissingDependencyError` when there is no ``smg``.
        """
        if self._process is not None:
            raise RuntimeError("the gateway was started already")
        smg = find_smg()
        if self._log_path is None:
            handle, name = tempfile.mkstemp(prefix="mmcopy-gateway-", suffix=".log")
            os.close(handle)
            self._log_path = Path(name)
        for tries_left in reversed(range(START_TRIES)):
            port, metrics_port = _free_ports(2)
            self.url, self.metrics_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}"
            self._process = ChildProcess(
                self._command(smg, port, metrics_port),
                log_path=self._log_path,
                watched=True,
                env=self._environment(),
                stop_timeout_s=self.stop_timeout_s,
            )
            try:
                self._process.start()
                self.pids.append(self._process.pid)
                self._wait_until_ready(time.monotonic() + self.start_timeout_s / START_TRIES)
                return
            except BaseException as error:
                self._process.stop()
                if not (tries_left and isinstance(error, _WorthAnotherTryError)):
                    self._drop_log()
                    raise

    def stop(self) -> int | None:
        """SIGTERM, patience, SIGKILL; returns the exit status. Idempotent."""
        code = None if self._process is None else self._process.stop()
        self._drop_log()
        return code

    @property
    def pid(self) -> int:
        """The gateway's process id, also the one in the names of its segments."""
        if self._process is None:
            raise RuntimeError("the gateway was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- requests --------------------------------------------------------

    def chat(
        self, *, images: Sequence[bytes | str] = (), videos: Sequence[bytes | str] = (), timeout_s: float = 60.0
    ) -> HttpReply:
        """One chat request; returns the answer whatever its status (None: no answer within the limit).

        ``images`` and ``videos``: encoded files (PNG, JPEG, MP4 ...) or URLs.
        """
        body = chat_body(self.model, images=images, videos=videos)
        return self.request("POST", "/v1/chat/completions", body, timeout_s=timeout_s)

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float = 10.0) -> HttpReply:
        """Any request to the gateway; ``body`` is sent as JSON (bytes as they are)."""
        return http(method, self.url + path, body, timeout_s=timeout_s)

    def workers(self) -> list[dict[str, Any]]:
        """The workers as the gateway sees them: url, worker_type, is_healthy, labels ... Empty when it is down."""
        reply = self.request("GET", "/workers")
        return list(reply.json().get("workers", [])) if reply.status == 200 else []

    def log_text(self) -> str:
        """Its output so far, without colours. Empty after the stop when the log was a temporary file."""
        return _COLOUR.sub("", self._process.log()) if self._process is not None else ""

    # ---- inside ----------------------------------------------------------

    def _command(self, smg: str, port: int, metrics_port: int) -> list[str]:
        command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--model-path", str(self.model_dir), "--shutdown-grace-period-secs", str(self.shutdown_grace_s)]
        if self.transport is not None:
            command += ["--multimodal-tensor-transport", self.transport]
        if self.shm_min_bytes is not None:
            command += ["--multimodal-shm-min-bytes", str(self.shm_min_bytes)]
        if self.topology != "regular":
            command.append(f"--{self.topology}-disaggregation")
            for worker in self.registered:
                command += [f"--{worker.role}", worker.url]
                command += [] if worker.bootstrap_port is None else [str(worker.bootstrap_port)]
        elif self.registered:
            command += ["--worker-urls", *(worker.url for worker in self.registered)]
        return [*command, *self.flags]

    def _environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SMG_")}
        clean.update(HF_HUB_OFFLINE="1", NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
        return {**clean, **self.env}

    def _wait_until_ready(self, deadline: float) -> None:
        wanted = len(self.registered) if self.wait_until_serving else 0
        steps: list[tuple[str, Callable[[], bool]]] = [
            ("answer HTTP", lambda: self.request("GET", "/workers", timeout_s=2.0).status == 200),
        ]
        if wanted:
            steps.append((f"find its {wanted} workers healthy", lambda: self._healthy() >= wanted))
            steps.append((f"serve {self.model}", lambda: self.model in self._models()))
        for what, done in steps:
            while not done():
                self._poll()
                if not self.running:
                    kind = _WorthAnotherTryError if "ddress already in use" in self.log_text() else GatewayError
                    raise kind(f"the gateway ended before it could {what}\n{self._log_tail()}")
                if time.monotonic() > deadline:
                    raise _WorthAnotherTryError(f"the gateway did not {what} in time\n{self._log_tail()}")
                time.sleep(POLL_S)

    def _healthy(self) -> int:
        return sum(bool(worker.get("is_healthy")) for worker in self.workers())

    def _models(self) -> list[str]:
        reply = self.request("GET", "/v1/models", timeout_s=2.0)
        return [card["id"] for card in reply.json().get("data", [])] if reply.status == 200 else []

    def _log_tail(self) -> str:
        lines = self.log_text().splitlines()
        errors = [line for line in lines if _TELLING.search(line) and "SECURITY POSTURE" not in line]
        return "\n".join((errors or lines)[-5:])

    def _drop_log(self) -> None:
        if self._log_is_ours and self._log_path is not None:
            self._log_path.unlink(missing_ok=True)
            self._log_path = None


def _free_ports(count: int) -> list[int]:
    """Different ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
