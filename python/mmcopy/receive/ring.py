"""Pinned staging slots: where bytes wait for their host-to-device copy.

All memory is allocated once, by whoever makes the ring. A slot is refilled only when the event of its last copy has
happened; that event belongs to the slot and is recorded again for each copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from mmcopy.errors import ClosedError, ReceiveTimeoutError

from .sources import ByteArray

__all__ = ["CopyEvent", "Slot", "StagingRing", "wait_for_event"]

_POLL_S = 20e-6


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
        """Block until the last copy out of this slot is done. Raises :class:`ReceiveTimeoutError`."""
        if not self.is_idle():
            what = f"the host-to-device copy of a {len(self.buffer)}-byte staging slot"
            wait_for_event(self.event, deadline, what=what)
            self.copying = False


def wait_for_event(event: CopyEvent, deadline: float, *, what: str) -> None:
    """Block until ``event`` has happened or ``deadline`` has come. Raises :class:`ReceiveTimeoutError`."""
    while not event.query():
        if time.monotonic() >= deadline:
            raise ReceiveTimeoutError(f"{what} did not end in time")
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
        Raises :class:`ReceiveTimeoutError`, and :class:`ClosedError` after :meth:`close`.
        """
        with self._changed:
            wait_s = max(0.0, deadline - time.monotonic())
            ready = self._changed.wait_for(lambda: self._free or self._closed, wait_s)
            if self._closed:
                raise ClosedError("the receiver is closed")
            if not ready:
                raise ReceiveTimeoutError(f"all {self.num_slots} staging slots stayed in use")
            return [self._free.popleft() for _ in range(min(wanted, -(-len(self._free) // 2)))]

    def give_back(self, slots: Sequence[Slot]) -> None:
        """The end of a receive; copies out of ``slots`` may still run."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Refuse further use and wait until no copy reads a slot any more. Raises :class:`ReceiveTimeoutError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            wait_s = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._free) == self.num_slots, wait_s):
                busy = self.num_slots - len(self._free)
                raise ReceiveTimeoutError(f"{busy} of {self.num_slots} staging slots are still in use")
            for slot in self._free:
                slot.wait_idle(deadline)
