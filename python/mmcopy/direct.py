"""Copies to the device straight out of registered arenas, with the mark behind them that gives the lease back.

Nothing is staged: the H2D reads what the sender wrote. Leases that lie side by side in the arena as their tensors do in
the destination are one copy; scattered ones are queued together. A lease that is still being written is followed: as
the watermark passes a step, that step is copied. Behind the last copy the copy stream itself writes each lease's mark,
which its sender reads, so that nobody waits for the GPU. A write takes the caller 2 us, so of many leases, and where
the driver refuses such writes, an event stands behind the copies, and a thread writes the marks when it has happened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .leases import LeaseSource
from .metrics import Counter, Metrics
from .plan import ALIGN_BYTES
from .ring import CopyEvent

__all__ = ["DirectCopies", "Run", "merge_runs"]

_log = logging.getLogger(__name__)

_MOST_STREAM_MARKS = 16
_POLL_S = 50e-6
_LEAST_STEP_BYTES, _MOST_STEP_BYTES, _STEPS = 256 << 10, 4 << 20, 16


class Run(NamedTuple):
    """``nbytes`` from ``source`` to ``dest``, both addresses."""

    dest: int
    source: int
    nbytes: int


class DirectLink(Protocol):
    """A device's copy stream, as far as it is needed here."""

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Queue copies, in any order among themselves."""

    def write_word(self, address: int, value: int) -> bool:
        """Let the stream write 32 bits to registered memory, behind what is queued; False where it cannot."""

    def new_event(self) -> CopyEvent:
        """An event behind what is queued."""

    def bind_thread(self) -> None:
        """Called once on a thread that asks for events."""


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

    def __init__(self, link: DirectLink, *, metrics: Metrics) -> None:
        self._link = link
        self._metrics = metrics
        self._changed = threading.Condition()
        self._behind: deque[tuple[CopyEvent, Sequence[LeaseSource]]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

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
            self._link.copy_all(merge_runs(whole, max_gap_bytes=ALIGN_BYTES - 1 if is_packed else 0))
            when_queued()
            for source, dest in growing:
                begun.append(source)
                self._follow(source, dest)
        finally:
            self._mark(begun)

    def close(self, deadline: float) -> None:
        """End the thread, if there is one. All copies that were queued must have happened."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self, source: LeaseSource, dest: int) -> None:
        nbytes, done = source.data.nbytes, 0
        step = min(_MOST_STEP_BYTES, max(_LEAST_STEP_BYTES, nbytes // _STEPS))
        while done < nbytes:
            there = source.wait(min(nbytes, done + step))
            self._link.copy_all([Run(dest + done, source.address + done, there - done)])
            done = there

    def _mark(self, sources: Sequence[LeaseSource]) -> None:
        written = 0
        if len(sources) <= _MOST_STREAM_MARKS:
            for source in sources:
                if not self._link.write_word(*source.lease.mark):
                    break
                source.lease.hand_on()
                written += 1
        if written:
            self._metrics.count(Counter.LEASES_RELEASED, "received", written)
        if written < len(sources):
            self._mark_behind(self._link.new_event(), sources[written:])

    def _mark_behind(self, event: CopyEvent, sources: Sequence[LeaseSource]) -> None:
        for source in sources:
            source.is_kept = True
        with self._changed:
            self._behind.append((event, sources))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="mmcopy-marks", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _watch(self) -> None:
        self._link.bind_thread()
        while True:
            with self._changed:
                while not self._behind and not self._closed:
                    self._changed.wait()
                if not self._behind:
                    return
                event, sources = self._behind[0]
            try:
                while not event.query():
                    time.sleep(_POLL_S)
            except Exception:  # the device is broken: no copy reads the leases any more
                _log.exception("asking for the end of copies out of an arena")
            self._metrics.count(Counter.LEASES_RELEASED, "received", sum(source.release() for source in sources))
            with self._changed:
                self._behind.popleft()
