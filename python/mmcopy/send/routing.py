"""Which path a tensor takes, and why: pure functions of settings, of what is known of the workers, and of sizes.

    resolve settings   ->  Delivery    who receives this kind of tensor, in which mode, from which threshold on
    look at workers    ->  Snapshot    whether they share memory, have the arena, or are down (workers.py)
    decide             ->  Decision    lease, segment or inline for one tensor, and the reason

:func:`decide` is the answer to "why did this tensor go inline".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mmcopy.config import ResolvedTransport, Role, TransportMode, WorkerSpec
from mmcopy.config.worker import NAMESPACE_LABEL, UID_LABEL
from mmcopy.errors import ConfigError

__all__ = [
    "SHARED",
    "Decision",
    "Delivery",
    "Reason",
    "Route",
    "Sharing",
    "Snapshot",
    "by_labels",
    "decide",
    "deliver",
    "plan_route",
    "receivers_of",
]


class Reason(enum.StrEnum):
    """Why a tensor travels inside its message. The value is the label in metrics; all but the first three are
    fallbacks."""

    EMPTY = "empty"
    """It has no bytes."""
    MODE = "mode"
    """The settings say inline."""
    SMALL = "small"
    """It is below the threshold."""
    RECEIVERS_DISAGREE = "receivers_disagree"
    """The receivers of this kind of tensor differ in mode or threshold."""
    SEVERAL_READERS = "several_readers"
    """Several workers read it, and a segment has one reader, which unlinks it."""
    NO_WORKER = "no_worker"
    """The mode is auto, and no receiver was named."""
    NAMESPACE_UNKNOWN = "namespace_unknown"
    """The mode is auto, and the sender's or the worker's shared-memory id is unknown."""
    NAMESPACE_DIFFERS = "namespace_differs"
    """The mode is auto, and the worker has another shared memory."""
    UID_DIFFERS = "uid_differs"
    """The mode is auto, and the worker runs as a user that may not read the sender's files."""
    NOT_PROBED = "not_proved"
    """The mode is auto, and the worker was not probed yet, or has not answered yet."""
    PROBE_FAILED = "proof_failed"
    """The mode is auto, and the worker could not read what the sender wrote."""
    WORKER_DOWN = "worker_gone"
    """The worker has ended, or was marked down."""
    NO_SPACE = "no_space"
    """The segment could not be written: no room. The ones below are failed writes, too."""
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    EXISTS = "exists"
    OS_ERROR = "os_error"

    @property
    def is_fallback(self) -> bool:
        """Whether shared memory was wanted."""
        return self not in (Reason.EMPTY, Reason.MODE, Reason.SMALL)


class Sharing(NamedTuple):
    """Whether a worker can read the sender's segments: no ``reason``, or why not, as a label and in words."""

    reason: Reason | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it can."""
        return self.reason is None


SHARED = Sharing()


class Snapshot(NamedTuple):
    """What is known of a request's receivers at one moment.

    ``sharing`` has one entry per receiver, or none where the mode does not depend on it. ``slots`` are the receivers'
    numbers as consumers of the sender's arena, each once, empty unless every receiver has the arena. ``down`` is the
    url of the first receiver that is down, "" when none is.
    """

    sharing: tuple[Sharing, ...] = ()
    slots: tuple[int, ...] = ()
    down: str = ""


class Decision(NamedTuple):
    """The path of one tensor: ``"lease"``, ``"segment"`` or ``"inline"``. ``reason`` and ``detail`` say why it is
    inline, as a label and in words."""

    path: str
    reason: Reason | None = None
    detail: str = ""


@dataclass(frozen=True)
class Delivery:
    """Settings for one kind of tensor and its receivers; :meth:`mmcopy.Sender.send` takes it for its ``worker``.

    ``mode`` and ``shm_min_bytes`` are those that all receivers have; where they disagree inline, and the smallest.
    ``several_readers``: every tensor goes to all receivers, not to one of them. ``reason`` is None where shared memory
    can be used for tensors of ``shm_min_bytes`` and more; otherwise ``detail`` says in words why not.
    """

    receivers: tuple[WorkerSpec, ...]
    mode: TransportMode
    mode_source: str
    shm_min_bytes: int
    shm_min_bytes_source: str
    several_readers: bool = False
    reason: Reason | None = None
    detail: str = ""

    @property
    def runtime(self) -> str:
        """The receivers' engine, as metrics name it; "unknown" when it is not known."""
        return (self.receivers[0].engine if self.receivers else None) or "unknown"

    def to(self, worker: WorkerSpec) -> Delivery:
        """The same settings for one of the receivers, which gets the tensor.

        Raises:
            ConfigError: ``worker`` is not one of the receivers.
        """
        if worker not in self.receivers:
            urls = ", ".join(receiver.url for receiver in self.receivers) or "no worker"
            raise ConfigError(f"worker {worker.url} is not a receiver of this delivery, which goes to {urls}")
        return replace(self, receivers=(worker,), several_readers=False)


@dataclass(frozen=True)
class Route:
    """The two deliveries of one request.

    ``pixels``: each tensor goes to one of the receivers (``route.pixels.to(worker)``). ``side_tensors``: each goes to
    all of them. What an encode worker gets beside its pixels goes as they do.
    """

    pixels: Delivery
    side_tensors: Delivery


_OVERCOME_BY_AN_ARENA = frozenset(
    {
        Reason.SEVERAL_READERS,
        Reason.NAMESPACE_UNKNOWN,
        Reason.NAMESPACE_DIFFERS,
        Reason.UID_DIFFERS,
        Reason.NOT_PROBED,
        Reason.PROBE_FAILED,
    }
)
"""What speaks against a file in /dev/shm does not speak against memory that was handed to the worker."""


_LEASE, _SEGMENT = Decision("lease"), Decision("segment")


def decide(delivery: Delivery, snapshot: Snapshot, nbytes: int, consumers: int = 1) -> Decision:
    """The path of a tensor of ``nbytes`` bytes, after its cast, that ``consumers`` receivers read on their own.

    A lease where every receiver has the arena: they hold its memory, so nothing is left to probe. Its readers must not
    outnumber its release flags: it would be reused before the last has come. A receiver that is down gets nothing by
    shared memory, whatever the mode.
    """
    if nbytes == 0:
        return Decision("inline", Reason.EMPTY, "it has no bytes")
    reason, detail = delivery.reason, delivery.detail
    if reason is Reason.MODE:
        return Decision("inline", reason, detail)
    if nbytes < delivery.shm_min_bytes:
        below = f"{nbytes} bytes are fewer than shm_min_bytes, {delivery.shm_min_bytes}"
        return Decision("inline", Reason.SMALL, f"{below} ({delivery.shm_min_bytes_source})")
    # A segment can have a name for each of several readers.
    has_names = reason is Reason.SEVERAL_READERS and delivery.several_readers and consumers == len(delivery.receivers)
    if reason is None or has_names:
        reason, detail = next((each for each in snapshot.sharing if each.reason is not None), SHARED)
    # Where one of several receivers gets the tensor, the sender does not know which.
    has_slots = snapshot.slots and (delivery.several_readers or len(delivery.receivers) == 1)
    if has_slots and consumers <= len(snapshot.slots) and (reason is None or reason in _OVERCOME_BY_AN_ARENA):
        return _LEASE
    if snapshot.down and (reason is None or has_names):
        return Decision("inline", Reason.WORKER_DOWN, f"worker {snapshot.down} is down")
    if reason is None:
        return _SEGMENT
    return Decision("inline", reason, detail)


def deliver(
    receivers: Sequence[WorkerSpec],
    resolve: Callable[[WorkerSpec | None], ResolvedTransport],
    sharing: Callable[[WorkerSpec], Sharing] = lambda _: SHARED,
    *,
    several_readers: bool = False,
    also_sharing: Sequence[WorkerSpec] = (),
) -> Delivery:
    """The settings that ``receivers`` agree on.

    ``resolve`` gives a receiver's settings (None: those of no worker in particular). ``sharing`` is asked under
    ``auto`` only, about the receivers and those of ``also_sharing``.
    """
    settings = [resolve(worker) for worker in receivers] or [resolve(None)]
    first, least = settings[0], min(settings, key=lambda each: each.shm_min_bytes)
    delivery = Delivery(
        receivers=tuple(receivers),
        mode=first.mode,
        mode_source=first.mode_source,
        shm_min_bytes=least.shm_min_bytes,
        shm_min_bytes_source=least.shm_min_bytes_source,
        several_readers=several_readers and len(receivers) > 1,
    )
    if len({each.mode for each in settings}) > 1:
        return _disagreement(delivery, "mode", settings)
    if first.mode is TransportMode.INLINE:
        return replace(delivery, reason=Reason.MODE, detail=f"the mode is inline ({first.mode_source})")
    if len({each.shm_min_bytes for each in settings}) > 1:
        return _disagreement(delivery, "shm_min_bytes", settings)
    if delivery.several_readers:
        urls = " and ".join(worker.url for worker in receivers)
        return replace(
            delivery,
            reason=Reason.SEVERAL_READERS,
            detail=f"{urls} read the same tensor, and a segment has one reader, which unlinks it",
        )
    if first.mode is TransportMode.AUTO:
        if not receivers:
            return replace(delivery, reason=Reason.NO_WORKER, detail="the mode is auto, and no receiver was named")
        for worker in (*receivers, *also_sharing):
            found = sharing(worker)
            if found.reason is not None:
                return replace(delivery, reason=found.reason, detail=found.detail)
    return delivery


def _disagreement(delivery: Delivery, name: str, settings: Sequence[ResolvedTransport]) -> Delivery:
    values = ", ".join(
        f"{worker.url} {getattr(each, name)} ({getattr(each, name + '_source')})"
        for worker, each in zip(delivery.receivers, settings, strict=True)
    )
    return replace(
        delivery,
        mode=TransportMode.INLINE,
        mode_source=Reason.RECEIVERS_DISAGREE.value,
        reason=Reason.RECEIVERS_DISAGREE,
        detail=f"the receivers disagree about {name}: {values}",
    )


def by_labels(worker: WorkerSpec, *, namespace_id: str, uid: int) -> Sharing:
    """What a worker's labels say, for ``auto``: the same shared memory, and a user that may read files of mode 0600.

    ``namespace_id`` and ``uid`` are the sender's. A worker that advertises no ``shm_uid`` is trusted in that.
    """
    theirs = worker.labels.get(NAMESPACE_LABEL, "")
    if not theirs or not namespace_id:
        whose = f"worker {worker.url} advertises none" if namespace_id else "the sender's is unknown"
        return Sharing(Reason.NAMESPACE_UNKNOWN, f"{NAMESPACE_LABEL}: {whose}")
    if theirs != namespace_id:
        return Sharing(
            Reason.NAMESPACE_DIFFERS,
            f"{NAMESPACE_LABEL} of worker {worker.url} is {theirs}, the sender's is {namespace_id}",
        )
    reader = worker.labels.get(UID_LABEL, "")
    if reader and reader not in (str(uid), "0"):
        return Sharing(
            Reason.UID_DIFFERS,
            f"worker {worker.url} runs as uid {reader}: it cannot read files of uid {uid}, mode 0600",
        )
    return SHARED


def receivers_of(workers: Sequence[WorkerSpec]) -> tuple[tuple[WorkerSpec, ...], tuple[WorkerSpec, ...]]:
    """Which workers of a request get pixels, and which get side tensors.

    Pixels go to the encode workers; without any, to the prefill or the aggregated worker. Side tensors go to prefill
    and decode, or to the aggregated worker.

    Raises:
        ConfigError: a set of roles that serves no request: no prefill or aggregated worker, two workers of a role
            other than encode, or prefill or decode beside aggregated.
    """
    by_role = {role: tuple(worker for worker in workers if worker.role == role) for role in Role}
    named = ", ".join(f"{worker.url} ({worker.role})" for worker in workers) or "none"
    for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE):
        if len(by_role[role]) > 1:
            raise ConfigError(f"workers of a request: {len(by_role[role])} of role {role}, want 1 at most: {named}")
    aggregated, prefill, decode = by_role[Role.AGGREGATED], by_role[Role.PREFILL], by_role[Role.DECODE]
    if aggregated and (prefill or decode):
        raise ConfigError(f"workers of a request: want either an aggregated worker or prefill and decode: {named}")
    if not (aggregated or prefill):
        raise ConfigError(f"workers of a request: want a prefill or an aggregated worker: {named}")
    side = (*aggregated, *prefill, *decode)
    return by_role[Role.ENCODE] or side[:1], side


def plan_route(
    workers: Sequence[WorkerSpec],
    resolve: Callable[[WorkerSpec | None], ResolvedTransport],
    sharing: Callable[[WorkerSpec], Sharing],
) -> Route:
    """The deliveries of one request that ``workers`` serve; the callables are those of :func:`deliver`.

    As in SMG, ``auto`` requires of decode too that it shares memory before prefill gets pixels by it. Unlike SMG, each
    delivery depends on its own receivers alone, and on all of them; and side tensors of several readers go inline,
    where SMG names one segment to both and the slower one finds nothing.
    """
    pixels, side = receivers_of(workers)
    encoded = pixels[0].role == Role.ENCODE
    return Route(
        pixels=deliver(pixels, resolve, sharing, also_sharing=() if encoded else side[1:]),
        side_tensors=deliver(side, resolve, sharing, several_readers=True),
    )
