"""Counters of what was sent, received, removed and refused."""

from __future__ import annotations

import enum
import threading
from collections import defaultdict

__all__ = ["Counter", "Metrics"]


class Counter(enum.StrEnum):
    """What is counted; each counter has one label, named here."""

    TENSORS_SENT = "tensors_sent"
    """By path: inline, segment."""
    BYTES_SENT = "bytes_sent"
    """By path."""
    SHM_WRITE_FAILURES = "shm_write_failures"
    """By reason; each one is a tensor that went inline instead: no_space, permission, exists, not_found, os_error."""
    TENSORS_RECEIVED = "tensors_received"
    """By path."""
    BYTES_RECEIVED = "bytes_received"
    """By path."""
    RECEIVE_FAILURES = "receive_failures"
    """By exception class; one a failed call of ``receive``."""
    SEGMENTS_REMOVED = "segments_removed"
    """By why: received, released (removed without being delivered), cancelled (taken back by the sender), swept."""
    REMOVE_FAILURES = "remove_failures"
    """By exception class: segments that were ours to remove and could not be."""


class Metrics:
    """Thread-safe counters. One object may serve several senders and receivers; it never blocks for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[Counter, str], int] = defaultdict(int)

    def count(self, counter: Counter, label: str, amount: int = 1) -> None:
        """Add ``amount`` to ``counter`` under ``label``."""
        with self._lock:
            self._values[counter, label] += amount

    def get(self, counter: Counter, label: str | None = None) -> int:
        """The value under ``label``, or the sum over all labels."""
        with self._lock:
            return sum(n for (c, name), n in self._values.items() if c is counter and label in (None, name))

    def snapshot(self) -> dict[str, dict[str, int]]:
        """All non-zero counters: ``{"tensors_sent": {"inline": 3, "segment": 1}, ...}``."""
        result: dict[str, dict[str, int]] = {}
        with self._lock:
            for (counter, label), value in sorted(self._values.items()):
                result.setdefault(counter.value, {})[label] = value
        return result
