"""Copies to the device straight out of registered arenas, with the mark behind them that gives the lease back.

Nothing is staged: the H2D reads what the sender wrote. Leases that lie side by side in the arena as their tensors do in
the destination are one copy. A lease that is still being written is followed: as the watermark passes a step, that
step is copied. Behind the last copy the copy stream itself writes each lease's mark, which its sender reads, so that
nobody waits for the GPU; where the driver refuses such writes, an event stands behind the copies, and whoever
comes by when it has happened writes the marks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .leases import LeaseSource
from .metrics import Counter, Metrics
from .plan import ALIGN_BYTES
from .ring import CopyEvent

__all__ = ["DirectCopies", "Run", "merge_runs"]

_LEAST_STEP_BYTES, _MOST_STEP_BYTES, _STEPS = 256 << 10, 4 << 20, 16


class Run(NamedTuple):
    """``nbytes`` from ``source`` to ``dest``, both addresses."""

    dest: int
    source: int
    nbytes: int


class DirectLink(Protocol):
    """A device's copy stream, as far as it is needed here."""

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...

    def write_word(self, address: int, value: int) -> bool:
        """Let the stream write 32 bits to registered memory, behind what is queued; False where it cannot."""

    def new_event(self) -> CopyEvent:
        """An event behind what is queued."""


def merge_runs(runs: Sequence[Run], *, max_gap_bytes: int) -> list[Run]:
    """Copies that follow each other on both sides, with the same gap of at most ``max_gap_bytes``, as one.

    The gap is copied, too: it must be nobody's on the destination's side.
    """
    merged: list[Run] = []
    for run in runs:
        if merged:
            last = merged[-1]
            gap = run.source - (last.source + last.nbytes)
            if 0 <= gap <= max_gap_bytes and run.dest - (last.dest + last.nbytes) == gap:
                merged[-1] = Run(last.dest, last.source, last.nbytes + gap + run.nbytes)
                continue
        merged.append(run)
    return merged


class DirectCopies:
    """Queues direct copies and marks on one link. Several threads may use it at once."""

    def __init__(self, link: DirectLink, *, device: str, metrics: Metrics) -> None:
        self._link = link
        self._device = device
        self._metrics = metrics
        self._lock = threading.Lock()
        self._behind: deque[tuple[CopyEvent, list[LeaseSource]]] = deque()

    def run(
        self,
        sources: Sequence[LeaseSource],
        dest_addresses: Sequence[int],
        *,
        is_packed: bool,
        when_queued: Callable[[], None],
    ) -> None:
        """Queue every copy and, behind them, the marks.

        ``is_packed``: the bytes between neighbouring tensors are nobody's. ``when_queued`` is called when all that was
        written already is queued. Blocks while senders write. On an error the leases of which copies were queued are
        marked behind those, and the others are the caller's to release. Raises as :meth:`LeaseSource.wait`.
        """
        self.poll()
        begun: list[LeaseSource] = []
        try:
            whole: list[Run] = []
            growing: list[tuple[LeaseSource, int]] = []
            for source, dest in zip(sources, dest_addresses, strict=True):
                if not source.data.nbytes:
                    continue
                if source.lease.written() == source.data.nbytes:
                    whole.append(Run(dest, source.address, source.data.nbytes))
                    begun.append(source)
                else:
                    growing.append((source, dest))
            for run in merge_runs(whole, max_gap_bytes=ALIGN_BYTES - 1 if is_packed else 0):
                self._link.copy(*run)
            when_queued()
            for source, dest in growing:
                begun.append(source)
                self._follow(source, dest)
        finally:
            self._mark(begun)

    def poll(self) -> None:
        """Write the marks whose event has happened. Never blocks."""
        if not self._behind:
            return
        with self._lock:
            while self._behind and self._behind[0][0].query():
                for source in self._behind.popleft()[1]:
                    source.release("received")

    @property
    def num_behind(self) -> int:
        """Receives whose marks wait for an event."""
        return len(self._behind)

    def _follow(self, source: LeaseSource, dest: int) -> None:
        nbytes, done = source.data.nbytes, 0
        step = min(_MOST_STEP_BYTES, max(_LEAST_STEP_BYTES, nbytes // _STEPS))
        while done < nbytes:
            there = source.wait(min(nbytes, done + step))
            self._link.copy(dest + done, source.address + done, there - done)
            done = there

    def _mark(self, sources: Sequence[LeaseSource]) -> None:
        unmarked = []
        for source in sources:
            address, value = source.lease.mark
            if self._link.write_word(address, value):
                source.lease.hand_on()
                self._metrics.count(Counter.LEASES_RELEASED, "received")
            else:
                unmarked.append(source)
        if unmarked:
            event = self._link.new_event()
            for source in unmarked:
                source.is_kept = True
            with self._lock:
                self._behind.append((event, unmarked))
