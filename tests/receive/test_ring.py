"""The staging ring with events that the test controls: no slot is refilled under a copy, no wait is endless."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mmcopy.errors import ClosedError, MmcopyTimeoutError
from mmcopy.receive.staging import Slot, StagingRing
from tests.rigs.waiting import settle


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def make(n: int) -> tuple[StagingRing, list[Slot]]:
    slots = [Slot(np.zeros(16, np.uint8), Event()) for _ in range(n)]
    return StagingRing(slots), slots


def test_a_receive_gets_half_of_what_is_free_and_at_least_one() -> None:
    ring, slots = make(6)
    assert (ring.slot_bytes, ring.num_slots, ring.num_free) == (16, 6, 6)
    assert ring.take(9, soon()) == slots[:3]
    assert ring.take(9, soon()) == slots[3:5]
    assert ring.take(9, soon()) == slots[5:]
    assert ring.num_free == 0


def test_slots_come_in_the_order_they_fell_free() -> None:
    ring, slots = make(3)
    for _ in range(3):
        ring.take(1, soon())
    for n in (1, 0, 2):
        ring.give_back([slots[n]])
    assert [ring.take(1, soon())[0] for _ in range(3)] == [slots[1], slots[0], slots[2]]


def test_a_slot_waits_for_its_last_copy() -> None:
    _, (slot,) = make(1)
    assert slot.is_idle()
    slot.copying = True
    assert not slot.is_idle()
    with pytest.raises(MmcopyTimeoutError, match="16-byte staging slot did not end in time"):
        slot.wait_idle(soon(0.02))
    timer = threading.Timer(0.05, slot.event.done.set)  # type: ignore[attr-defined]
    timer.start()
    slot.wait_idle(soon())
    timer.join()
    assert slot.is_idle()
    assert not slot.copying


def test_a_second_receive_waits_for_the_first() -> None:
    ring, (slot,) = make(1)
    assert ring.take(5, soon()) == [slot]
    with pytest.raises(MmcopyTimeoutError, match="all 1 staging slots stayed in use"):
        ring.take(1, soon(0.02))
    got: list[Slot] = []
    waiter = threading.Thread(target=lambda: got.extend(ring.take(1, soon())))
    waiter.start()
    assert not settle(lambda: bool(got), limit_s=0.05)
    ring.give_back([slot])
    waiter.join(5)
    assert got == [slot]


def test_close_wakes_waiters_and_waits_for_copies() -> None:
    ring, (slot,) = make(1)
    ring.take(1, soon())
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            ring.take(1, soon())
        except ClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    with pytest.raises(MmcopyTimeoutError, match="1 of 1 staging slots are still in use"):
        ring.close(soon(0.05))
    waiter.join(5)
    assert len(errors) == 1
    slot.copying = True
    ring.give_back([slot])
    with pytest.raises(MmcopyTimeoutError, match="did not end in time"):
        ring.close(soon(0.02))
    slot.event.done.set()  # type: ignore[attr-defined]
    ring.close(soon())
    with pytest.raises(ClosedError):
        ring.take(1, soon())
