"""The staging ring with events that the test controls: no slot is refilled under a copy, no wait is endless."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mmcopy import ClosedError, ReceiveTimeoutError
from mmcopy.ring import Slot, StagingRing

from .conftest import settle


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def make(n: int) -> tuple[StagingRing, list[Slot]]:
    slots = [Slot(np.zeros(16, np.uint8)) for _ in range(n)]
    return StagingRing(slots), slots


def test_slots_come_in_the_order_they_fall_free() -> None:
    ring, slots = make(3)
    assert ring.slot_bytes == 16
    assert [ring.acquire(soon()) for _ in range(3)] == slots
    for slot in (slots[1], slots[0], slots[2]):
        ring.release(slot)
    assert [ring.acquire(soon()) for _ in range(3)] == [slots[1], slots[0], slots[2]]


def test_a_slot_waits_for_its_last_copy() -> None:
    ring, (slot,) = make(1)
    event = Event()
    assert ring.acquire(soon()) is slot
    slot.last_copy = event
    ring.release(slot)
    with pytest.raises(ReceiveTimeoutError, match="16-byte staging slot did not end in time"):
        ring.acquire(soon(0.05))
    got: list[Slot] = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(soon())))
    waiter.start()
    assert not settle(lambda: bool(got), limit_s=0.05)
    event.done.set()
    waiter.join(5)
    assert got == [slot]
    assert slot.last_copy is None


def test_all_slots_in_use_is_a_timeout_with_the_number() -> None:
    ring, _ = make(2)
    ring.acquire(soon())
    ring.acquire(soon())
    with pytest.raises(ReceiveTimeoutError, match="all 2 staging slots stayed in use"):
        ring.acquire(soon(0.02))


def test_close_wakes_waiters_and_waits_for_copies() -> None:
    ring, (slot,) = make(1)
    ring.acquire(soon())
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            ring.acquire(soon())
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    with pytest.raises(ReceiveTimeoutError, match="1 of 1 staging slots are still in use"):
        ring.close(soon(0.05))
    waiter.join(5)
    assert len(errors) == 1
    event = Event()
    slot.last_copy = event
    ring.release(slot)
    with pytest.raises(ReceiveTimeoutError, match="did not end in time"):
        ring.close(soon(0.02))
    event.done.set()
    ring.close(soon())
    with pytest.raises(ClosedError):
        ring.acquire(soon())
