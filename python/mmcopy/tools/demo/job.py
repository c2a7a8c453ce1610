"""The whole run: start workers and gateway, send the requests, stop everything, check."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmcopy.errors import ConfigError

from .checks import Checker, Expect, Linked, Row, Sent, is_primary, linked
from .expected import check_picture
from .families import Family
from .gateway import Gateway
from .leftovers import Leftover, Leftovers, sender_ids_of
from .model_dir import write_model_dir
from .own_gateway_process import OwnGatewayProcess
from .pictures import Attachments
from .worker_process import NIXL, WorkerProcess

__all__ = ["ROLES", "Job", "Outcome", "default_framework", "missing", "run_job"]

ROLES = {"regular": ("regular",), "pd": ("prefill", "decode"), "epd": ("encode", "prefill", "decode")}
BOOTSTRAP_PORTS = {"encode": 9000, "prefill": 9101}  # the gateway passes them on; nothing connects to them
WORKER_START_LIMIT_S = 120.0
GATEWAY_START_LIMIT_S = 30.0
REQUEST_LIMIT_S = 120.0
REPORT_LIMIT_S = 20.0
SETTLE_LIMIT_S = 2.0
SOCKETS = "s"  # a unix socket's path is short
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run. Raises :class:`ConfigError` for a combination that no gateway supports."""

    family: Family
    attachments: Sequence[Attachments]
    gateway: Literal["smg", "mmcopy"] = "smg"
    """The real one, or mmcopy's own, which preprocesses with numpy and sends through its arena."""
    engine: Literal["tokenspeed", "vllm"] = "tokenspeed"
    topology: Literal["regular", "pd", "epd"] = "regular"
    transport: str = "shm"
    shm_min_bytes: int | None = None
    device: str = "cpu"
    framework: Literal["torch", "numpy"] = "torch"
    encoder_dtype: str = "bfloat16"
    requests: int = 1
    concurrency: int = 1
    shm_namespace: Literal["own", "foreign", "none"] = "own"
    """The shared-memory namespace that the workers advertise: their own, another host's, or none."""

    def __post_init__(self) -> None:
        if self.engine == "vllm" and self.topology == "epd":
            raise ConfigError("topology epd needs engine tokenspeed: SMG has no encode workers for vllm")
        if self.engine == "tokenspeed" and self.encoder_dtype == "uint8":
            raise ConfigError("encoder dtype uint8 needs engine vllm: TokenSpeed workers take normalised pixels")
        for name in ("requests", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, want 1 or more")
        if self.gateway == "mmcopy":
            self._check_own_gateway()

    def _check_own_gateway(self) -> None:
        if self.topology != "regular":
            raise ConfigError(f"topology {self.topology} needs gateway smg: gateway mmcopy calls one worker")
        for attached in self.attachments[: self.requests]:
            if attached.videos:
                raise ConfigError("videos need gateway smg: gateway mmcopy takes pictures")
            for picture in attached.pictures:
                check_picture(self.family, picture.width, picture.height)


@dataclass
class Outcome:
    """What a run gave."""

    sent: list[Sent] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: tuple[str, ...] = ("inline", "segment")
    """The paths that this gateway can take."""
    device: str = ""
    wall_s: float = 0.0

    @property
    def mismatches(self) -> int:
        return sum(bool(row.error) for row in self.rows)

    @property
    def good(self) -> bool:
        return not (self.mismatches or self.errors or self.leftovers)

    def bytes_by(self, path: str) -> int:
        return sum(row.nbytes for row in self.rows if row.path == path)

    def count_by(self, path: str) -> int:
        return sum(row.path == path for row in self.rows)


def default_framework(device: str) -> Literal["torch", "numpy"]:
    """torch, or numpy on the CPU of a machine without it."""
    return "numpy" if device == "cpu" and importlib.util.find_spec("torch") is None else "torch"


def run_job(
    job: Job,
    *,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    expect: Expect | None = None,
) -> Outcome:
    """Runs it and stops everything it started, whatever happens. Blocks for seconds.

    Args:
        job: What to run.
        poll: Called in every wait; may raise to stop the run.
        say: Called with what happens next.
        expect: Recomputes a request's tensors. None: :func:`.expected.expected_tensors`, of one family.

    Raises:
        MmcopyError: A worker or the gateway did not start. What goes wrong later is in the outcome.
    """
    outcome = Outcome() if job.gateway == "smg" else Outcome(paths=("inline", "segment", "lease"))
    leftovers = Leftovers()
    gateway: Gateway | OwnGatewayProcess | None = None
    workers: list[WorkerProcess] = []
    start = time.monotonic()

    def look(sender_ids: Iterable[str] = ()) -> list[Leftover]:
        pids = [] if gateway is None else gateway.pids
        return leftovers.found(gateway_pids=pids, handed=_handed(workers), sender_ids=sender_ids)

    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcopy-demo-")))
            model_dir = write_model_dir(job.family, directory / "model")
            # When all have ended, before the directory goes.
            stack.callback(lambda: outcome.errors.extend(_sockets_left(directory / SOCKETS)))
            say("starting the workers")
            workers += _workers(job, model_dir, directory)
            for worker in workers:
                stack.callback(worker.stop)
                worker.start()
            for worker in workers:
                worker.wait_until_ready(start + WORKER_START_LIMIT_S, poll)
            outcome.device = workers[0].device
            say("starting the gateway")
            gateway = _gateway(job, model_dir, directory, workers, poll)
            stack.callback(gateway.stop)
            gateway.start()
            say("sending the requests")
            outcome.sent = _send(job, gateway, poll)
            _wait_for_reports(job, outcome.sent, workers, poll)
            leftovers.settle(look, limit_s=SETTLE_LIMIT_S, poll=poll)
            outcome.wall_s = time.monotonic() - start
            say("stopping, and checking")
    finally:
        # Every process that could use these segments has ended.
        outcome.leftovers = look(sender_ids_of(_handed(workers)))
        leftovers.unlink(outcome.leftovers)
    if isinstance(gateway, OwnGatewayProcess):
        outcome.errors += gateway.errors()
        outcome.notes += gateway.notes()
    _judge(job, outcome, workers, expect)
    return outcome


def _workers(job: Job, model_dir: Path, directory: Path) -> list[WorkerProcess]:
    return [
        WorkerProcess(
            model_dir,
            served_model_name=job.family.served_name,
            log_path=directory / f"{role}.log",
            role=role,
            engine=job.engine,
            device=job.device,
            framework=job.framework,
            encoder_dtype=job.encoder_dtype,
            shm_namespace=job.shm_namespace,
            bootstrap_port=BOOTSTRAP_PORTS.get(role) if job.engine == "tokenspeed" else None,
            kv_connector=NIXL if job.engine == "vllm" and job.topology == "pd" else "",
            endpoint_dir=directory / SOCKETS if job.gateway == "mmcopy" else None,
        )
        for role in ROLES[job.topology]
    ]


def _gateway(
    job: Job, model_dir: Path, directory: Path, workers: Sequence[WorkerProcess], poll: Callable[[], None]
) -> Gateway | OwnGatewayProcess:
    if job.gateway == "mmcopy":
        return OwnGatewayProcess(
            model_dir,
            workers[0].address,
            family=job.family.name,
            transport=job.transport,
            shm_min_bytes=job.shm_min_bytes,
            model=job.family.served_name,
            log_path=directory / "gateway.log",
            start_timeout_s=GATEWAY_START_LIMIT_S,
            poll=poll,
        )
    return Gateway(
        model_dir,
        [worker.address for worker in workers],
        topology=job.topology,
        transport=job.transport,
        shm_min_bytes=job.shm_min_bytes,
        # The gateway preprocesses, also for engines that could do it themselves.
        flags=["--mm-processing", "router"],
        model=job.family.served_name,
        log_path=directory / "gateway.log",
        start_timeout_s=GATEWAY_START_LIMIT_S,
        shutdown_grace_s=0,
        poll=poll,
    )


def _send(job: Job, gateway: Gateway | OwnGatewayProcess, poll: Callable[[], None]) -> list[Sent]:
    """All requests, ``concurrency`` at a time, in the order of their numbers."""

    def one(number: int, attached: Attachments) -> Sent:
        images = [picture.file for picture in attached.pictures]
        reply = gateway.chat(images=images, videos=attached.videos, timeout_s=REQUEST_LIMIT_S)
        if reply.status == 200:
            return Sent(number, attached, str(reply.json().get("id", "")))
        return Sent(number, attached, "", f"status {reply.status}: {reply.text.strip()[:400]}")

    with _pool(job.concurrency) as pool:
        futures: list[Future[Sent]] = [
            pool.submit(one, number + 1, job.attachments[number % len(job.attachments)])
            for number in range(job.requests)
        ]
        waiting = set(futures)
        while waiting:
            poll()
            _, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
        return [future.result() for future in futures]


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Like the pool's own ``with``, but an interruption does not wait: the requests end with the gateway."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="chat")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _wait_for_reports(
    job: Job, sent: Sequence[Sent], workers: Sequence[WorkerProcess], poll: Callable[[], None]
) -> None:
    """Wait until every worker has reported every answered request: with epd, encoding runs beside the answer."""
    wanted = sum(_wanted_reports(job, each) for each in sent)
    deadline = time.monotonic() + REPORT_LIMIT_S
    while len(linked(sent, _reports(workers))) < wanted and time.monotonic() < deadline:
        poll()
        time.sleep(POLL_S)


def _wanted_reports(job: Job, sent: Sent) -> int:
    if not sent.id:
        return 0
    generate = [role for role in ROLES[job.topology] if role != "encode"]
    encode = len(sent.attached.pictures) + len(sent.attached.videos) if job.topology == "epd" else 0
    return len(generate) + encode


def _judge(job: Job, outcome: Outcome, workers: Sequence[WorkerProcess], expect: Expect | None) -> None:
    checker = Checker(job.family, engine=job.engine, dtype=job.encoder_dtype, device=outcome.device, expect=expect)
    links = linked(outcome.sent, _reports(workers))
    for link in links:
        outcome.rows += checker.rows(link)
    for sent in outcome.sent:
        if sent.error:
            outcome.errors.append(f"request {sent.number} failed: {sent.error}")
        else:
            outcome.errors += missing(job, sent, [link for link in links if link.sent is sent])
    for worker in workers:
        outcome.errors += [
            f"the {line['role']} worker refused a tensor: {line['error']}" for line in worker.reports("failed")
        ]


def missing(job: Job, sent: Sent, links: Sequence[Linked]) -> list[str]:
    """What is missing of a request that was answered."""
    errors = []
    if len(links) != _wanted_reports(job, sent):
        errors.append(
            f"request {sent.number}: {len(links)} of {_wanted_reports(job, sent)} calls were reported by the workers"
        )
    media = len(sent.attached.pictures) + len(sent.attached.videos)
    kinds = bool(sent.attached.pictures) + bool(sent.attached.videos)
    wanted = kinds if job.engine == "vllm" else media
    found = sum(is_primary(t["name"]) for link in links for item in link.report["items"] for t in item["tensors"])
    if found != wanted:
        errors.append(f"request {sent.number}: {found} of {wanted} encoder inputs arrived")
    return errors


def _sockets_left(directory: Path) -> list[str]:
    if not directory.exists():
        return []
    return [f"a worker left its socket {path.name}" for path in sorted(directory.iterdir())]


def _reports(workers: Sequence[WorkerProcess]) -> list[dict[str, Any]]:
    return [line for worker in workers for line in worker.reports("request")]


def _handed(workers: Sequence[WorkerProcess]) -> list[str]:
    names = []
    for line in _reports(workers):
        for item in line["items"]:
            names += [tensor["segment"] for tensor in item["tensors"] if tensor["segment"]]
    return names
