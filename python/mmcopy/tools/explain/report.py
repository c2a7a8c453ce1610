"""What is found out about a router's workers, as plain values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmcopy.config import (
    MODALITIES,
    ResolvedDtype,
    ResolvedTransport,
    RouterConfig,
    WorkerSpec,
    read_environment,
    wire_dtype_in,
)
from mmcopy.errors import ConfigError, MmcopyError
from mmcopy.integrations.smg.ask import Advertised, ask_worker, with_advertised
from mmcopy.send.delivery import Choice, Delivery, Sharing
from mmcopy.send.sender import Sender
from mmcopy.tools.doctor.arena import TRIAL_BYTES, Offer, prove_and_offer

__all__ = ["SIZES", "Explanation", "LegLines", "WorkerLines", "explain"]

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10, "64 MiB": 64 << 20}
"""The sizes whose way is told."""
PROOF_LIMIT_S = 2.0
BY_LEASE = "written into the arena, which the worker has mapped: /dev/shm does not matter"


@dataclass(frozen=True)
class WorkerLines:
    """One worker by itself. ``fault``: why it could not be asked ("" when it answered)."""

    worker: WorkerSpec
    fault: str
    delivery: Delivery
    sharing: Sharing
    arena: Offer
    dtypes: Mapping[str, ResolvedDtype]
    choices: Mapping[str, Choice]


@dataclass(frozen=True)
class LegLines:
    """One kind of tensor of a request that all the workers serve together."""

    name: str
    delivery: Delivery
    choices: Mapping[str, Choice]


@dataclass(frozen=True)
class Explanation:
    """``router``: the settings for no worker in particular. ``legs``: pixels and side tensors, where the workers are
    those of one request; ``no_legs`` says why not."""

    router: ResolvedTransport
    proof_max_age_s: float
    workers: tuple[WorkerLines, ...]
    legs: tuple[LegLines, ...]
    no_legs: str
    warnings: tuple[str, ...]

    @property
    def all_answered(self) -> bool:
        """Whether every worker told its labels."""
        return not any(lines.fault for lines in self.workers)


def explain(
    config: RouterConfig,
    *,
    environ: Mapping[str, str] | None = None,
    shm_dir: str | os.PathLike[str] = "/dev/shm",
    timeout_s: float = 5.0,
    ask: Callable[..., Advertised] = ask_worker,
) -> Explanation:
    """Ask the workers of ``config`` and decide for each. Blocks, ``timeout_s`` a worker and a little more at most.

    A worker that does not answer is decided about by the labels that the config has for it. Raises
    :class:`ConfigError` for bad settings.
    """
    environment = read_environment(environ)
    warnings: dict[str, None] = dict.fromkeys(environment.smg.warnings)
    lines: list[WorkerLines] = []
    with Sender(config.transport, shm_dir=shm_dir, environ=environ, arena_bytes=TRIAL_BYTES) as sender:
        for asked in config.workers:
            worker, fault = asked, ""
            try:
                worker = with_advertised(asked, ask(asked.url, timeout_s=timeout_s))
            except MmcopyError as error:
                fault = str(error)
            # Proved whatever the mode, so that it can be seen what auto would do.
            sharing, arena = prove_and_offer(sender, worker, timeout_s=PROOF_LIMIT_S)
            dtypes = {modality: wire_dtype_in(environment, modality, worker=worker) for modality in MODALITIES}
            warnings |= dict.fromkeys(text for dtype in dtypes.values() for text in dtype.warnings)
            choices = _choices(sender, worker, by_segment=f"no arena: {arena.detail}")
            lines.append(WorkerLines(worker, fault, sender.delivery(worker), sharing, arena, dtypes, choices))
        legs, no_legs = _legs(sender, [each.worker for each in lines])
    return Explanation(
        router=config.transport.resolve_in(environment),
        proof_max_age_s=config.transport.proof_max_age_in(environment),
        workers=tuple(lines),
        legs=legs,
        no_legs=no_legs,
        warnings=tuple(warnings),
    )


def _choices(sender: Sender, target: WorkerSpec | Delivery, *, by_segment: str = "") -> dict[str, Choice]:
    """The ways, each with the reason in words: a sender says only why something goes inline."""
    told = {"lease": BY_LEASE, "segment": by_segment}
    choices = {name: sender.choose(target, nbytes) for name, nbytes in SIZES.items()}
    return {
        name: replace(choice, detail=choice.detail or told.get(choice.path, "")) for name, choice in choices.items()
    }


def _legs(sender: Sender, workers: list[WorkerSpec]) -> tuple[tuple[LegLines, ...], str]:
    if len(workers) < 2:
        return (), "one worker serves a request alone"
    try:
        route = sender.route(workers)
    except ConfigError as error:
        return (), str(error)
    return (
        LegLines("pixels", route.pixels, _choices(sender, route.pixels)),
        LegLines("side tensors", route.side_tensors, _choices(sender, route.side_tensors)),
    ), ""
