"""Counters of what was sent, received, removed and refused, and histograms of where the time went."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Counter", "Histogram", "Metrics", "Stage"]


class Counter(enum.StrEnum):
    """What is counted; each counter has one label, named here, and those of a sender are also counted by runtime."""

    TENSORS_SENT = "tensors_sent"
    """By path: inline, segment, lease."""
    BYTES_SENT = "bytes_sent"
    """By path."""
    SHM_WRITE_FAILURES = "shm_write_failures"
    """By reason; each one is a tensor that went inline instead: no_space, permission, exists, not_found, os_error."""
    INLINE_FALLBACKS = "inline_fallbacks"
    """By reason (:class:`mmcopy.send.routing.Reason`): tensors that went inline though shared memory was wanted, failed
    writes among them. What is too small, or inline by its settings, is not counted."""
    TENSORS_RECEIVED = "tensors_received"
    """By path."""
    BYTES_RECEIVED = "bytes_received"
    """By path."""
    RECEIVE_FAILURES = "receive_failures"
    """By exception class; one per failed call of ``receive``."""
    SEGMENTS_REMOVED = "segments_removed"
    """By why: received, released (removed without being delivered), cancelled (taken back by the sender), worker_gone
    (taken back because its worker has gone), swept."""
    PROBES = "proofs"
    """By outcome: how often a worker was probed, whether it can read our segments: ok, failed, gone."""
    REMOVE_FAILURES = "remove_failures"
    """By exception class: segments that were ours to remove and could not be; swept: what other senders left."""
    ARENA_HAND_OVERS = "arena_hand_overs"
    """By outcome: how often a worker was offered the arena: ok, or the error's class."""
    LEASE_FALLBACKS = "lease_fallbacks"
    """By reason: tensors (or requests of several) that went another way than by a lease: full, worker_gone,
    no_arena."""
    LEASES_RELEASED = "leases_released"
    """By why: received (by the mark that the copy stream writes, or behind the copy), released (unread)."""
    SLOT_WAITS = "slot_waits"
    """By device: how often the copy threads had to wait because every staging slot still had a copy to do."""
    GROUP_RECEIVES = "group_receives"
    """By strategy: receives on a group of ranks; mixed where some tensors had to come from another host, owned."""


class Stage(enum.StrEnum):
    """A part of a receive whose seconds are measured when asked for."""

    RECEIVE = "receive"
    """The whole call."""
    OPEN = "open"
    """Opening and checking the segments."""
    MOVE = "move"
    """From the open sources to the last queued copy, allocation included."""
    SLOT_WAIT = "slot_wait"
    """Each wait that SLOT_WAITS counts."""
    CLOSE = "close"
    """Letting go of the segments, as far as the call does it."""


_NUM_BUCKETS = 26  # up to 2**25 us, 33 s


@dataclass
class Histogram:
    """Seconds in buckets that double: ``buckets[n]`` counts those above 2**(n-1) and up to 2**n microseconds.

    The first bucket also has all below, the last all above.
    """

    count: int = 0
    sum_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.buckets[min(max(0, round(seconds * 1e6) - 1).bit_length(), _NUM_BUCKETS - 1)] += 1


class Metrics:
    """Thread-safe counters. One object may serve several senders and receivers; it never blocks for long.

    With ``timings`` the stages of receives are measured, too; without, that costs nothing.
    """

    def __init__(self, *, timings: bool = False) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[Counter, str, str], int] = defaultdict(int)
        self._timings: defaultdict[Stage, Histogram] | None = defaultdict(Histogram) if timings else None

    def count(self, counter: Counter, label: str, amount: int = 1, *, runtime: str = "") -> None:
        """Add ``amount`` to ``counter`` under ``label``; ``runtime`` is the engine that the tensor is for."""
        with self._lock:
            self._values[counter, label, runtime] += amount

    def get(self, counter: Counter, label: str | None = None, *, runtime: str | None = None) -> int:
        """The value under ``label`` and ``runtime``, or the sum over all of them."""
        with self._lock:
            return sum(
                n
                for (c, name, where), n in self._values.items()
                if c is counter and label in (None, name) and runtime in (None, where)
            )

    def snapshot(self) -> dict[str, dict[str, int]]:
        """All non-zero counters: ``{"tensors_sent": {"inline": 3, "segment": 1}, ...}``, the runtimes' sum."""
        result: dict[str, dict[str, int]] = {}
        for counter, label, _, value in self.rows():
            labels = result.setdefault(counter.value, {})
            labels[label] = labels.get(label, 0) + value
        return result

    def rows(self) -> list[tuple[Counter, str, str, int]]:
        """All non-zero counters as (counter, label, runtime, value), sorted; runtime is "" where none is kept."""
        with self._lock:
            return sorted((counter, label, runtime, value) for (counter, label, runtime), value in self._values.items())

    def timer(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """A block whose seconds count for ``stage``, also when it raises."""
        return _NOTHING if self._timings is None else self._measured(stage)

    def timings(self) -> dict[str, Histogram]:
        """A copy of the histograms by stage; empty without ``timings``."""
        with self._lock:
            return {
                stage.value: Histogram(histogram.count, histogram.sum_s, list(histogram.buckets))
                for stage, histogram in sorted((self._timings or {}).items())
            }

    @contextlib.contextmanager
    def _measured(self, stage: Stage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            assert self._timings is not None
            with self._lock:
                self._timings[stage].add(seconds)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
