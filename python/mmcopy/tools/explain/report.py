"""What is found out about a router's workers, as plain values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmcopy.config import (
    MODALITIES,
    ResolvedDtype,
    ResolvedTransport,
    RouterConfig,
    TransportMode,
    WorkerSpec,
    read_environment,
    wire_dtype_in,
)
from mmcopy.errors import ConfigError, MmcopyError
from mmcopy.integrations.smg.ask import Advertised, ask_worker, with_advertised
from mmcopy.send.routing import Decision, Delivery, Snapshot, decide, deliver, plan_route
from mmcopy.send.sender import Sender
from mmcopy.send.workers import Connection
from mmcopy.tools.doctor.arena import TRIAL_BYTES

__all__ = ["SIZES", "Explanation", "LegLines", "WorkerLines", "explain"]

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10, "64 MiB": 64 << 20}
"""The sizes whose path is shown."""
PROBE_LIMIT_S = 2.0
BY_LEASE = "written into the arena, which the worker has mapped: /dev/shm does not matter"


@dataclass(frozen=True)
class WorkerLines:
    """One worker by itself. ``fault``: why it could not be asked ("" when it answered)."""

    worker: WorkerSpec
    fault: str
    delivery: Delivery
    connection: Connection
    dtypes: Mapping[str, ResolvedDtype]
    decisions: Mapping[str, Decision]


@dataclass(frozen=True)
class LegLines:
    """One kind of tensor of a request that all the workers serve together."""

    name: str
    delivery: Delivery
    decisions: Mapping[str, Decision]


@dataclass(frozen=True)
class Explanation:
    """``router``: the settings for no worker in particular. ``legs``: pixels and side tensors, where the workers are
    those of one request; ``no_legs`` says why not."""

    router: ResolvedTransport
    probe_max_age_s: float
    workers: tuple[WorkerLines, ...]
    legs: tuple[LegLines, ...]
    no_legs: str
    warnings: tuple[str, ...]

    @property
    def all_answered(self) -> bool:
        """Whether every worker answered."""
        return not any(lines.fault for lines in self.workers)


def explain(
    config: RouterConfig,
    *,
    environ: Mapping[str, str] | None = None,
    shm_dir: str | os.PathLike[str] = "/dev/shm",
    timeout_s: float = 5.0,
    ask: Callable[..., Advertised] = ask_worker,
) -> Explanation:
    """Ask the workers of ``config`` and decide for each. Blocks, ``timeout_s`` per worker and a little more at most.

    A worker that does not answer is decided about by the labels that the config has for it. Raises
    :class:`ConfigError` for bad settings.
    """
    environment = read_environment(environ)
    warnings: dict[str, None] = dict.fromkeys(environment.smg.warnings)
    lines: list[WorkerLines] = []

    def resolve(worker: WorkerSpec | None) -> ResolvedTransport:
        return config.transport.resolve_in(environment, worker)

    with Sender(config.transport, shm_dir=shm_dir, environ=environ, arena_bytes=TRIAL_BYTES) as sender:
        for asked in config.workers:
            worker, fault = asked, ""
            try:
                worker = with_advertised(asked, ask(asked.url, timeout_s=timeout_s))
            except MmcopyError as error:
                fault = str(error)
            # Whatever the mode, so that it can be seen what auto would do.
            found = sender.connect(worker, timeout_s=PROBE_LIMIT_S)
            dtypes = {modality: wire_dtype_in(environment, modality, worker=worker) for modality in MODALITIES}
            warnings |= dict.fromkeys(text for dtype in dtypes.values() for text in dtype.warnings)
            delivery = deliver((worker,), resolve)
            decisions = _decisions(delivery, [found], by_segment=f"no arena: {found.no_arena}")
            lines.append(WorkerLines(worker, fault, delivery, found, dtypes, decisions))
    legs, no_legs = _legs(lines, resolve)
    return Explanation(
        router=config.transport.resolve_in(environment),
        probe_max_age_s=config.transport.probe_max_age_in(environment),
        workers=tuple(lines),
        legs=legs,
        no_legs=no_legs,
        warnings=tuple(warnings),
    )


def _decisions(delivery: Delivery, found: Sequence[Connection], *, by_segment: str = "") -> dict[str, Decision]:
    """The paths, each with the reason in words: a sender says only why something goes inline."""
    slots = tuple(each.slot for each in found if each.slot is not None)
    is_auto = delivery.mode is TransportMode.AUTO
    snapshot = Snapshot(
        sharing=tuple(each.sharing for each in found) if is_auto else (),
        slots=slots if len(slots) == len(found) else (),
    )
    details = {"lease": BY_LEASE, "segment": by_segment}
    decisions = {name: decide(delivery, snapshot, nbytes) for name, nbytes in SIZES.items()}
    return {name: each._replace(detail=each.detail or details.get(each.path, "")) for name, each in decisions.items()}


def _legs(
    lines: Sequence[WorkerLines], resolve: Callable[[WorkerSpec | None], ResolvedTransport]
) -> tuple[tuple[LegLines, ...], str]:
    if len(lines) < 2:
        return (), "one worker serves a request alone"
    found = {each.worker.url: each.connection for each in lines}
    try:
        route = plan_route([each.worker for each in lines], resolve, lambda worker: found[worker.url].sharing)
    except ConfigError as error:
        return (), str(error)
    return tuple(
        LegLines(name, delivery, _decisions(delivery, [found[worker.url] for worker in delivery.receivers]))
        for name, delivery in (("pixels", route.pixels), ("side tensors", route.side_tensors))
    ), ""
