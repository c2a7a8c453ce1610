"""Pinned staging slots, and the pipeline that fills and empties them.

All memory is allocated once, when the ring is made. A slot is refilled only when the event of its last copy has
happened; that event belongs to the slot and is recorded again for each copy.

Source -> slot -> destination, the two halves overlapped.

Copy threads fill slots (rust/pool.rs) while the device empties others. This thread stands between: it lets a chunk be
filled once its slot's last H2D has happened, queues the H2D of each chunk as it is filled, and records the slot's event
behind it. Chunks are queued in order, so slots fall free in order, and one number, ``permitted``, says which chunks may
be filled. The host never waits for the last copies.

    chunk        0    1    2    3    4    5
    slot         s0   s1   s2   s0   s1   s2         three slots
    threads      fill fill fill wait  .    .         chunk 3 waits for chunk 0's event
    copy stream       H2D0 H2D1 H2D2 H2D3 ...

Filling begins before the destination is known (it can be allocated meanwhile). With one chunk nothing is handed over:
the calling thread fills it by itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from mmcopy._native import CopyJob, CopyPool
from mmcopy.config import parse_count
from mmcopy.errors import ClosedError, MmcopyTimeoutError
from mmcopy.metrics import Counter, Metrics, Stage

from .plan import CopyPlan
from .request import ByteArray, Request

__all__ = [
    "CopyEvent",
    "Filling",
    "Pipeline",
    "Slot",
    "StagingOptions",
    "StagingRing",
    "wait_for_event",
]

_POLL_S = 20e-6


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """The pinned memory of a receiver on a GPU: ``staging_bytes`` in slots of ``slot_bytes``, two slots at least.

    Raises:
        ConfigError: a size is not a whole number of bytes, or a slot is smaller than 4096.
    """

    staging_bytes: int = 64 << 20
    slot_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, least in (("staging_bytes", 1), ("slot_bytes", 4096)):
            nbytes = parse_count(getattr(self, name), setting=f"StagingOptions.{name}", least=least)
            object.__setattr__(self, name, nbytes)


class CopyEvent(Protocol):
    """Marks a point on a stream; ``query`` is true once the stream has passed it."""

    def query(self) -> bool: ...


class Slot:
    """One pinned buffer and the event of its last copy.

    ``copying`` is set when a copy out of the slot is queued and cleared when it is known to have ended.
    """

    __slots__ = ("address", "buffer", "copying", "event")

    def __init__(self, buffer: ByteArray, event: CopyEvent) -> None:
        self.buffer = buffer
        self.address = buffer.ctypes.data
        self.event = event
        self.copying = False

    def is_idle(self) -> bool:
        """Whether the slot may be written to. Does not block."""
        if self.copying and self.event.query():
            self.copying = False
        return not self.copying

    def wait_idle(self, deadline: float) -> None:
        """Block until the last copy out of this slot is done. Raises :class:`MmcopyTimeoutError`."""
        if not self.is_idle():
            what = f"the host-to-device copy of a {len(self.buffer)}-byte staging slot"
            wait_for_event(self.event, deadline, what=what)
            self.copying = False


def wait_for_event(event: CopyEvent, deadline: float, *, what: str) -> None:
    """Block until ``event`` has happened or ``deadline`` has come. Raises :class:`MmcopyTimeoutError`."""
    began = time.monotonic()
    while not event.query():
        if time.monotonic() >= deadline:
            waited = time.monotonic() - began
            raise MmcopyTimeoutError("receive", f"{what} did not end in time: waited for {waited:.3g} s")
        time.sleep(_POLL_S)


class StagingRing:
    """A fixed set of equal slots, shared by all receives of one receiver; used in the order they fall free."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not slots:
            raise ValueError("a staging ring needs at least one slot")
        self.slot_bytes = len(slots[0].buffer)
        self.num_slots = len(slots)
        self._free = deque(slots)
        self._changed = threading.Condition()
        self._closed = False

    @property
    def num_free(self) -> int:
        """Slots that no receive holds; copies out of them may still run."""
        return len(self._free)

    def take(self, wanted: int, deadline: float) -> list[Slot]:
        """At most ``wanted`` slots, at least one, and half of the free ones, so that a second receive finds some, too.

        Copies out of them may still run. Blocks until one is free or ``deadline`` (``time.monotonic()``) has come.
        Raises :class:`MmcopyTimeoutError`, and :class:`ClosedError` after :meth:`close`.
        """
        with self._changed:
            wait_s = max(0.0, deadline - time.monotonic())
            ready = self._changed.wait_for(lambda: self._free or self._closed, wait_s)
            if self._closed:
                raise ClosedError("the receiver is closed")
            if not ready:
                raise MmcopyTimeoutError(
                    "receive", f"all {self.num_slots} staging slots stayed in use for {wait_s:.3g} s"
                )
            return [self._free.popleft() for _ in range(min(wanted, -(-len(self._free) // 2)))]

    def give_back(self, slots: Sequence[Slot]) -> None:
        """The end of a receive; copies out of ``slots`` may still run."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Refuse further use and wait until no copy reads a slot any more. Raises :class:`MmcopyTimeoutError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            wait_s = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._free) == self.num_slots, wait_s):
                busy = self.num_slots - len(self._free)
                raise MmcopyTimeoutError(
                    "receive", f"{busy} of {self.num_slots} staging slots are still in use after {wait_s:.3g} s"
                )
            for slot in self._free:
                slot.wait_idle(deadline)


class Link(Protocol):
    """A device's copy stream."""

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Queue one host-to-device copy."""

    def record(self, slot: Slot) -> None:
        """Record the slot's event behind what is queued."""


class Pipeline:
    """Runs plans over one ring, one pool of copy threads and one link. Several threads may run plans at once."""

    def __init__(self, link: Link, ring: StagingRing, pool: CopyPool, *, device: str, metrics: Metrics) -> None:
        self.link = link
        self.ring = ring
        self.pool = pool
        self.device = device
        self.metrics = metrics

    def begin(self, plan: CopyPlan, request: Request, *, deadline: float) -> Filling:
        """Start filling slots, as far as they are free. Enter the result, then :meth:`Filling.send` to the device."""
        return Filling(self, plan, request, deadline)


class Filling:
    """One run of a plan: a context manager, inside which copy threads fill slots. :meth:`send` empties them.

    After the block no thread reads a source, whatever happened in it; copies that were queued may still run.
    """

    def __init__(self, pipeline: Pipeline, plan: CopyPlan, request: Request, deadline: float) -> None:
        self._link = pipeline.link
        self._ring = pipeline.ring
        self._pool = pipeline.pool
        self._device = pipeline.device
        self._metrics = pipeline.metrics
        self._plan = plan
        self._request = request
        self._deadline = deadline
        self._permitted = 0
        self._slots: list[Slot] = []
        self._job: CopyJob | None = None

    def __enter__(self) -> Self:
        self._slots = self._ring.take(self._plan.num_chunks, self._deadline)
        if self._plan.num_chunks > 1:
            try:
                self._job = self._pool.start(
                    self._request.native, [slot.buffer for slot in self._slots], self._plan.table
                )
                self._permit_idle(0)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._job is not None:
                self._job.cancel()  # one that is over stays so, and releases its buffers
        finally:
            self._ring.give_back(self._slots)

    def send(self, addresses: Sequence[int]) -> None:
        """Queue every copy to the bases at these device addresses, each as soon as its chunk is in its slot.

        Unlinks the request's segments behind the first copy. Returns when every byte has left the sources and every
        copy is queued.
        """
        copies, slots = self._plan.copies, self._slots
        num_chunks = len(copies)
        chunk = there = 0
        while chunk < num_chunks:
            if chunk == there:
                there += self._fill_one() if self._job is None else self._wait(self._job, chunk)
            slot = slots[chunk % len(slots)]
            for base, dest_start, slot_start, nbytes in copies[chunk]:
                self._link.copy(addresses[base] + dest_start, slot.address + slot_start, nbytes)
            self._link.record(slot)
            if chunk == 0:
                self._request.unlink()
            chunk += 1

    def _fill_one(self) -> int:
        slot = self._slots[0]
        if not slot.is_idle():
            self._wait_idle(slot)
        self._pool.copy_now(self._request.native, slot.buffer, self._plan.table)
        return 1

    def _wait(self, job: CopyJob, chunk: int) -> int:
        """Let chunks be filled whose slots are free, and wait for this one; how many from here on are there."""
        self._permit_idle(chunk)
        if self._permitted == chunk:
            self._wait_idle(self._slots[chunk % len(self._slots)])
            self._permit_idle(chunk)
        return job.wait(chunk, max(0.0, self._deadline - time.monotonic()))

    def _permit_idle(self, chunk: int) -> None:
        """Permit every further chunk whose slot is free; ``chunk`` is the first whose copy is not queued."""
        slots, before = self._slots, self._permitted
        limit = min(self._plan.num_chunks, chunk + len(slots))
        while self._permitted < limit and slots[self._permitted % len(slots)].is_idle():
            self._permitted += 1
        if self._permitted > before and self._job is not None:
            self._job.permit(self._permitted)

    def _wait_idle(self, slot: Slot) -> None:
        self._metrics.count(Counter.SLOT_WAITS, self._device)
        with self._metrics.timer(Stage.SLOT_WAIT):
            slot.wait_idle(self._deadline)
