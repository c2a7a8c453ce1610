"""One scenario's processes: workers that record, the real gateway, and what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from mmcopy.tools.demo.gateway import Worker as Registered
from mmcopy.tools.process import ChildProcess

from .gateway_pictures import Tensor, png
from .gateway_worker_process import SERVED_NAME
from .smg_gateway import ChatReply, Gateway
from .waiting import settle

SCRIPT = Path(__file__).with_name("gateway_worker_process.py")
FOREIGN = "00000000-0000-4000-8000-000000000000:1"
"""The namespace id of another host."""

GONE = 404
"""What the gateway makes of a worker's NOT_FOUND: a segment that is named is not there any more."""

START_LIMIT_S = 30.0
EVENT_LIMIT_S = 10.0
REPLY_LIMIT_S = 30.0

Row = dict[str, Any]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Leg:
    """A worker to start; the options are those of worker_process.py, None for ``namespace`` advertises none."""

    role: str = "regular"
    engine: str = "tokenspeed"
    encoder_dtype: str = "bfloat16"
    encoder: bool = False
    namespace: str | None = "own"
    framework: str = "numpy"
    behaviour: str = "ok"
    receive_threads: int = 2


class WorkerProcess:
    def __init__(self, leg: Leg, directory: Path, model_dir: Path) -> None:
        directory.mkdir()
        self.leg = leg
        self.directory = directory
        self.address = ""
        self.killed = False
        self.behave(leg.behaviour)
        command = [sys.executable, "-W", "error", SCRIPT, directory, model_dir, "--engine", leg.engine]
        command += ["--encoder-dtype", leg.encoder_dtype, "--namespace", leg.namespace or ""]
        command += ["--encoder"] if leg.encoder else []
        command += ["--framework", leg.framework, "--receive-threads", leg.receive_threads]
        self.process = ChildProcess(
            [str(part) for part in command], log_path=directory / "log", watched=False, stop_timeout_s=15.0
        )

    def start(self) -> None:
        self.process.start()

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.running, self.process.log()
            return "ready on " in self.process.log()

        assert settle(ready, limit_s=START_LIMIT_S), self.process.log()
        found = re.search(r"ready on (\S+)", self.process.log())
        assert found is not None
        self.address = found[1]

    def behave(self, behaviour: str) -> None:
        """From the next request on; one that is held reads it too, so ``ok`` lets it go on."""
        new = self.directory / "behaviour.new"
        new.write_text(behaviour)
        new.rename(self.directory / "behaviour")

    def rows(self, event: str = "") -> list[Row]:
        """What the worker wrote down so far, of one kind of event or of all."""
        path = self.directory / "rows"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if event in ("", row["event"])]

    def wait_for(self, event: str, *, count: int = 1) -> list[Row]:
        """Its rows of that event, as soon as there are ``count``; fails when they don't come."""
        assert settle(lambda: len(self.rows(event)) >= count, limit_s=EVENT_LIMIT_S), (self.rows(), self.log)
        return self.rows(event)

    def busy(self) -> bool:
        """Whether a call has begun of which the end is not written down."""
        begun, failed = len(self.rows("receiving")), len(self.rows("refused"))
        return begun > failed + len(self.rows("answered")) + len(self.rows("cancelled"))

    @property
    def log(self) -> str:
        return self.process.log()

    def segments_held(self) -> list[str]:
        """Files of /dev/shm that the process has open or mapped."""
        maps = self._proc("maps").read_text().splitlines()
        found = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
        for descriptor in self._proc("fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except FileNotFoundError:
                continue
            if target.startswith("/dev/shm/"):
                found.add(target)
        return sorted(found)

    def count_descriptors(self) -> int:
        return len(list(self._proc("fd").iterdir()))

    def count_threads(self) -> int:
        """Its threads but those of gRPC's own pool, which grows and shrinks as it likes."""
        names = []
        for thread in self._proc("task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append((thread / "comm").read_text().strip())
        return len(names) - names.count("event_engine")

    def _proc(self, name: str) -> Path:
        return Path("/proc", str(self.process.pid), name)


class Stack:
    """Workers and a gateway before them; a context manager. ``stack[role]`` is the first worker of that role.

    At the end it asserts that nothing is left: no segment of its gateways, no file of /dev/shm held by a worker, and
    that workers and gateway ended as they were asked to.
    """

    def __init__(
        self,
        directory: Path,
        model_dir: Path,
        legs: Sequence[Leg],
        *,
        topology: str = "regular",
        transport: str | None = None,
        shm_min_bytes: int | None = None,
        flags: Sequence[str] = (),
        wait_until_serving: bool = True,
    ) -> None:
        self.directory = directory
        self.model_dir = model_dir
        self.workers = [WorkerProcess(leg, directory / f"{i}-{leg.role}", model_dir) for i, leg in enumerate(legs)]
        self.gateways: list[Gateway] = []
        self._clients = ThreadPoolExecutor(8, thread_name_prefix="client")
        self._options = {
            "topology": topology,
            "transport": transport,
            "shm_min_bytes": shm_min_bytes,
            "flags": flags,
            "wait_until_serving": wait_until_serving,
            "model": SERVED_NAME,
            "start_timeout_s": START_LIMIT_S,
        }

    def __enter__(self) -> Self:
        try:
            for worker in self.workers:
                worker.start()
            for worker in self.workers:
                worker.wait_until_ready()
            self.start_gateway()
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.assert_nothing_left()
        finally:
            codes = self._stop_all()
            left = self.remove_segments()
        if error is None:
            assert not left, f"left in /dev/shm when all had ended: {left}"
            for worker, code in zip(self.workers, codes, strict=True):
                assert code == (-signal.SIGKILL if worker.killed else 0), worker.log
                for complaint in ("was never retrieved", "never awaited", "Exception ignored", "left behind"):
                    assert complaint not in worker.log, worker.log

    def __getitem__(self, role: str) -> WorkerProcess:
        return next(worker for worker in self.workers if worker.leg.role == role)

    def of(self, role: str) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.leg.role == role]

    # ---- the gateway -----------------------------------------------------

    @property
    def gateway(self) -> Gateway:
        return self.gateways[-1]

    def start_gateway(self) -> Gateway:
        """A gateway for the workers; another one when there was one already."""
        registered = [
            Registered(worker.address, worker.leg.role, 9000 + i if worker.leg.role in ("encode", "prefill") else None)
            for i, worker in enumerate(self.workers)
        ]
        log = self.directory / f"gateway{len(self.gateways)}.log"
        gateway = Gateway(self.model_dir, registered, log_path=log, **self._options)
        gateway.start()
        self.gateways.append(gateway)
        return gateway

    def ask(self, *pictures: np.ndarray, stream: bool = False) -> ChatReply:
        """A chat request about ``pictures``, and its answer whatever it is."""
        files = [png(pixels) for pixels in pictures]
        return self.gateway.chat(images=files, stream=stream, timeout_s=REPLY_LIMIT_S)

    def ask_soon(self, *pictures: np.ndarray, stream: bool = False) -> Future[ChatReply]:
        """:meth:`ask` on a thread, eight at a time."""
        return self._clients.submit(self.ask, *pictures, stream=stream)

    # ---- what is left ----------------------------------------------------

    def segments(self) -> list[str]:
        """Segments in /dev/shm of the gateways of this stack, and of no other process."""
        return sorted(name for gateway in self.gateways for name in gateway.segments())

    def assert_nothing_left(self) -> None:
        assert settle(lambda: self.segments() == []), self.segments()
        for worker in self.workers:
            if worker.process.running:
                assert settle(lambda worker=worker: worker.segments_held() == []), worker.segments_held()

    def remove_segments(self) -> list[str]:
        """Names of the segments that are left; they are gone afterwards."""
        left = self.segments()
        for name in left:
            Path("/dev/shm", name).unlink(missing_ok=True)
        return left

    def _stop_all(self) -> list[int | None]:
        for gateway in self.gateways:
            gateway.kill()  # a polite stop takes it a second; what it would still do then, no test is about
        self._clients.shutdown()
        return [worker.process.stop() for worker in self.workers]


def only(values: Sequence[Value]) -> Value:
    assert len(values) == 1, values
    return values[0]


def by_path(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Labels of the tensors of a row by the path they came by."""
    paths: dict[str, list[str]] = {}
    for label, tensor in tensors.items():
        paths.setdefault(tensor["path"], []).append(label)
    return {path: sorted(labels) for path, labels in paths.items()}


def without_path(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a row as ``pictures.expected`` describes them."""
    return {label: {k: v for k, v in tensor.items() if k != "path"} for label, tensor in tensors.items()}
