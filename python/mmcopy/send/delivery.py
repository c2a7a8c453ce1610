"""One kind of tensor of a request: who gets it, and by which way. Pure functions on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmcopy.config.mode import TransportMode
from mmcopy.config.transport import ResolvedTransport
from mmcopy.config.worker import WorkerSpec
from mmcopy.errors import ConfigError

from .reason import Reason

__all__ = ["SHARED", "Choice", "Delivery", "Sharing", "by_labels", "choose", "deliver"]

NAMESPACE_LABEL = "shm_namespace_id"
UID_LABEL = "shm_uid"


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether a worker can read our segments: no ``reason``, or why not, in a word and in words."""

    reason: Reason | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it can."""
        return self.reason is None


SHARED = Sharing()


def by_labels(worker: WorkerSpec, *, namespace_id: str, uid: int) -> Sharing:
    """What the labels say, for ``auto``: the same shared memory, and a user who may read files of mode 0600.

    ``namespace_id`` and ``uid`` are the sender's. A worker that advertises no ``shm_uid`` is trusted in that.
    """
    theirs = worker.labels.get(NAMESPACE_LABEL, "")
    if not theirs or not namespace_id:
        whose = f"worker {worker.url} advertises none" if namespace_id else "ours is not known"
        return Sharing(Reason.NAMESPACE_UNKNOWN, f"{NAMESPACE_LABEL}: {whose}")
    if theirs != namespace_id:
        return Sharing(
            Reason.NAMESPACE_DIFFERS, f"{NAMESPACE_LABEL} of worker {worker.url} is {theirs}, ours {namespace_id}"
        )
    reader = worker.labels.get(UID_LABEL, "")
    if reader and reader not in (str(uid), "0"):
        return Sharing(
            Reason.UID_DIFFERS,
            f"worker {worker.url} runs as uid {reader}: it cannot read files of uid {uid}, mode 0600",
        )
    return SHARED


@dataclass(frozen=True)
class Delivery:
    """How one kind of tensor goes to ``receivers``; :meth:`mmcopy.Sender.send` takes it for its ``worker``.

    ``mode`` and ``shm_min_bytes`` are those that all receivers have; where they disagree inline, and the smallest.
    ``several_readers``: each tensor goes to all of the receivers, not to one of them. ``reason`` is None where shared
    memory can be used for what reaches ``shm_min_bytes``; otherwise all goes inline, and ``detail`` says why in words.
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
        """The receivers' engine, as metrics name it; "unknown" when it was not said."""
        return (self.receivers[0].engine if self.receivers else None) or "unknown"

    def to(self, worker: WorkerSpec) -> Delivery:
        """The same for one receiver: what was decided for all of them holds, and this one gets the tensor.

        Raises :class:`ConfigError` for a worker that is none of the receivers.
        """
        if worker not in self.receivers:
            urls = ", ".join(receiver.url for receiver in self.receivers) or "nobody"
            raise ConfigError(f"worker {worker.url} is no receiver of this delivery, which goes to {urls}")
        return replace(self, receivers=(worker,), several_readers=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which way one tensor goes: ``"lease"`` or ``"segment"`` (no reason), or ``"inline"`` with the reason, in a
    word and in words."""

    path: str
    reason: Reason | None = None
    detail: str = ""


def deliver(
    receivers: Sequence[WorkerSpec],
    resolve: Callable[[WorkerSpec | None], ResolvedTransport],
    sharing: Callable[[WorkerSpec], Sharing],
    *,
    several_readers: bool = False,
    also_sharing: Sequence[WorkerSpec] = (),
) -> Delivery:
    """Decide for ``receivers``, all of whom must agree.

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
            detail=f"{urls} read the same tensor, and a segment has one reader, who removes it",
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
    told = ", ".join(
        f"{worker.url} {getattr(each, name)} ({getattr(each, name + '_source')})"
        for worker, each in zip(delivery.receivers, settings, strict=True)
    )
    return replace(
        delivery,
        mode=TransportMode.INLINE,
        mode_source=Reason.RECEIVERS_DISAGREE.value,
        reason=Reason.RECEIVERS_DISAGREE,
        detail=f"the receivers disagree about {name}: {told}",
    )


def choose(delivery: Delivery, nbytes: int) -> Choice:
    """The way of a tensor of ``nbytes`` bytes, after the cast."""
    if nbytes == 0:
        return Choice("inline", Reason.EMPTY, "it has no bytes")
    if delivery.reason is Reason.MODE:
        return Choice("inline", Reason.MODE, delivery.detail)
    if nbytes < delivery.shm_min_bytes:
        below = f"{nbytes} bytes are fewer than shm_min_bytes, {delivery.shm_min_bytes}"
        return Choice("inline", Reason.SMALL, f"{below} ({delivery.shm_min_bytes_source})")
    if delivery.reason is not None:
        return Choice("inline", delivery.reason, delivery.detail)
    return Choice("segment")
