"""Pinned staging slots: where bytes wait for their host-to-device copy.

All memory is allocated once. A slot is handed out again only when the event of its last copy has happened.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from .errors import ClosedError, ReceiveTimeoutError
from .sources import ByteArray

__all__ = ["Slot", "StagingRing"]

_POLL_S = 50e-6


class CopyEvent(Protocol):
    """Marks a point on a stream; ``query`` is true once the stream has passed it."""

    def query(self) -> bool: ...


class Slot:
    """One pinned buffer. ``last_copy`` is the event after which its bytes may be overwritten."""

    def __init__(self, buffer: ByteArray) -> None:
        self.buffer = buffer
        self.last_copy: CopyEvent | None = None

    def wait_idle(self, deadline: float) -> None:
        """Block until the last copy out of this slot is done. Raises :class:`ReceiveTimeoutError`."""
        while self.last_copy is not None and not self.last_copy.query():
            if time.monotonic() >= deadline:
                raise ReceiveTimeoutError(
                    f"the host-to-device copy of a {len(self.buffer)}-byte staging slot did not end in time"
                )
            time.sleep(_POLL_S)
        self.last_copy = None


class StagingRing:
    """A fixed set of equal slots, shared by all receives of one receiver; used in the order they fall free."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not slots:
            raise ValueError("a staging ring needs at least one slot")
        self.slot_bytes = len(slots[0].buffer)
        self._free = deque(slots)
        self._num_slots = len(slots)
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, deadline: float) -> Slot:
        """The slot that fell free first, its last copy done. Blocks until ``deadline`` (``time.monotonic()``).

        Raises :class:`ReceiveTimeoutError`, and :class:`ClosedError` after :meth:`close`.
        """
        with self._changed:
            ready = self._changed.wait_for(lambda: self._free or self._closed, max(0.0, deadline - time.monotonic()))
            if self._closed:
                raise ClosedError("the receiver is closed")
            if not ready:
                raise ReceiveTimeoutError(f"all {self._num_slots} staging slots stayed in use")
            slot = self._free.popleft()
        try:
            slot.wait_idle(deadline)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back. A copy out of it may still run: ``slot.last_copy`` says."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Refuse further use and wait until no copy reads a slot any more. Raises :class:`ReceiveTimeoutError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: len(self._free) == self._num_slots, max(0.0, deadline - time.monotonic())
            ):
                raise ReceiveTimeoutError(
                    f"{self._num_slots - len(self._free)} of {self._num_slots} staging slots are still in use"
                )
            for slot in self._free:
                slot.wait_idle(deadline)
