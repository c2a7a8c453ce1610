"""The probe after which an mmcopy sender uses shared memory under ``auto``: made here, and of the named workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence

from mmcopy.config import ENDPOINT_LABEL, TransportConfig, WorkerSpec
from mmcopy.endpoint import PROBE_PREFIXES, ProbeResult, SenderLink, WorkerEndpoint
from mmcopy.errors import MmcopyError
from mmcopy.send.routing import Reason
from mmcopy.send.sender import Sender
from mmcopy.send.workers import Connection

from .arena import TRIAL_BYTES
from .line import Line, Status

__all__ = ["judge_own", "judge_worker", "lines"]

LIMIT_S = 2.0
ASK_LIMIT_S = 5.0

ADVICE: dict[Reason | None, str] = {
    Reason.NAMESPACE_DIFFERS: "auto sends inline: on one host, let both containers share /dev/shm (docker run "
    "--ipc=container:NAME; Kubernetes: one emptyDir with medium: Memory at /dev/shm of both)",
    Reason.NAMESPACE_UNKNOWN: "auto sends inline: let the worker advertise shm_namespace_id, or label it in the router",
    Reason.UID_DIFFERS: "auto sends inline: run gateway and worker as one user",
    None: "auto sends inline: run both as one user, share /dev/shm and the socket's directory between their containers",
}


def lines(shm_dir: str, workers: Sequence[str] = ()) -> Iterator[Line]:
    yield judge_own(_probe_here(shm_dir), shm_dir)
    if not workers:
        return
    from mmcopy.integrations.smg.ask import ask_worker, with_advertised

    with Sender(TransportConfig(mode="auto"), shm_dir=shm_dir, arena_bytes=TRIAL_BYTES) as sender:
        for url in workers:
            worker = WorkerSpec(url)
            try:
                worker = with_advertised(worker, ask_worker(url, timeout_s=ASK_LIMIT_S))
            except MmcopyError as error:
                yield Line(f"worker {url}", Status.PROBLEM, str(error), "start it, or correct its address")
                continue
            yield judge_worker(worker, sender.connect(worker, timeout_s=LIMIT_S))


def _probe_here(shm_dir: str) -> ProbeResult | str:
    """What a worker in this process reads of a segment of ours; text when the probe cannot be made."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-doctor-") as directory:
        try:
            with (
                WorkerEndpoint(directory, shm_dir=shm_dir, accept_prefixes=PROBE_PREFIXES) as endpoint,
                SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link,
            ):
                return link.probe(shm_dir, timeout_s=LIMIT_S)
        except MmcopyError as error:
            return str(error)


def judge_own(result: ProbeResult | str, shm_dir: str) -> Line:
    """Judge the probe of an endpoint in this process."""
    name = "probe"
    if isinstance(result, str):
        return Line(
            name,
            Status.WARNING,
            f"no: {result}",
            "mmcopy's own senders and workers cannot find out that they share memory here, and send inline under auto: "
            "let this user make unix sockets in its temporary directory (TMPDIR)",
        )
    if not result.ok:
        return Line(name, Status.PROBLEM, f"no: {result.reason}", f"repair {shm_dir}; see shared memory above")
    return Line(name, Status.GOOD, f"an endpoint of this process read a segment back ({result.reason})")


def judge_worker(worker: WorkerSpec, found: Connection) -> Line:
    """Judge what a worker's labels or its answer show, and whether it takes an arena, which is enough by itself."""
    name = f"worker {worker.url}"
    asked = worker.labels.get(ENDPOINT_LABEL)
    who = f"{worker.engine or 'unknown engine'}, " + (f"asked over {asked}" if asked else "by its labels")
    segments = f"reads what uid {os.geteuid()} writes here" if found.reason is None else found.detail
    if found.has_arena:
        return Line(name, Status.GOOD, f"{who}: takes the arena, auto uses it; {segments}")
    no_arena = f"no arena ({found.no_arena})"
    if found.reason is None:
        return Line(name, Status.GOOD, f"{who}: {segments}, auto uses segments; {no_arena}")
    advice = ADVICE.get(found.reason, ADVICE[None])
    return Line(name, Status.WARNING, f"{who}: {segments}; {no_arena}", advice)
