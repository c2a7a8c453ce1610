"""Source -> slot -> destination, the two halves overlapped.

Copy threads fill slots (rust/pool.rs) while the device empties others. This thread stands between: it lets a chunk be
filled once its slot's last H2D has happened, queues the H2D of each chunk as it is filled, and records the slot's event
behind it. Chunks are queued in order, so slots fall free in order, and one number, ``permitted``, says which chunks may
be filled. The host never waits for the last copies.

    chunk        0    1    2    3    4    5
    slot         s0   s1   s2   s0   s1   s2         three slots
    threads      fill fill fill wait  .    .         chunk 3 waits for chunk 0's event
    copy stream       H2D0 H2D1 H2D2 H2D3 ...

With one chunk nothing is handed over: the calling thread fills it by itself inside ``job.wait``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from . import _native
from .metrics import Counter, Metrics, Stage
from .plan import ReceivePlan
from .ring import Slot, StagingRing
from .sources import Source

__all__ = ["Pipeline"]


class Link(Protocol):
    """A device's copy stream."""

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Queue one host-to-device copy."""

    def mark(self, slot: Slot) -> None:
        """Record the slot's event behind what is queued."""


class Pipeline:
    """Runs plans over one ring, one pool of copy threads and one link. Several threads may run plans at once."""

    def __init__(self, link: Link, ring: StagingRing, pool: _native.CopyPool, *, device: str, metrics: Metrics) -> None:
        self._link = link
        self._ring = ring
        self._pool = pool
        self._device = device
        self._metrics = metrics

    def run(
        self,
        plan: ReceivePlan,
        sources: Sequence[Source],
        dest_addresses: Sequence[int],
        *,
        deadline: float,
        while_copying: Callable[[], None],
    ) -> None:
        """Copy all of ``sources`` to the device addresses.

        Returns when every byte has left the sources and every copy is queued. ``while_copying`` is called once, when
        the copy threads have begun. On an error no thread reads a source any more; copies that were queued still run.
        """
        slots = self._ring.take(plan.num_chunks, deadline)
        try:
            job = self._pool.start(
                [source.native for source in sources],
                [slot.buffer for slot in slots],
                [
                    (chunk, source, sources[source].offset + start, slot_start, nbytes)
                    for chunk, source, start, slot_start, nbytes in plan.pieces
                ],
            )
            try:
                self._run(plan, job, slots, dest_addresses, deadline, while_copying)
            except BaseException:
                job.cancel()
                raise
        finally:
            self._ring.give_back(slots)

    def _run(
        self,
        plan: ReceivePlan,
        job: _native.CopyJob,
        slots: Sequence[Slot],
        dest_addresses: Sequence[int],
        deadline: float,
        while_copying: Callable[[], None],
    ) -> None:
        copy, mark, num_slots = self._link.copy, self._link.mark, len(slots)
        permitted = 0
        for chunk, transfers in enumerate(plan.transfers):
            before, limit = permitted, min(plan.num_chunks, chunk + num_slots)
            while permitted < limit and slots[permitted % num_slots].is_idle():
                permitted += 1
            if permitted == chunk:
                self._metrics.count(Counter.SLOT_WAITS, self._device)
                with self._metrics.timer(Stage.SLOT_WAIT):
                    slots[chunk % num_slots].wait_idle(deadline)
                permitted += 1
            if permitted > before:
                job.permit(permitted)
            if chunk == 0:
                while_copying()
            job.wait(chunk, max(0.0, deadline - time.monotonic()))
            slot = slots[chunk % num_slots]
            for dest, dest_start, slot_start, nbytes in transfers:
                copy(dest_addresses[dest] + dest_start, slot.address + slot_start, nbytes)
            mark(slot)
