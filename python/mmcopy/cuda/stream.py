"""The stream that a receiver's copies run on, and the events behind them."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from mmcopy.ring import Slot

from .runtime import find_driver

__all__ = ["CopyStream", "Event"]

_log = logging.getLogger(__name__)

_EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming


class Event:
    """A CUDA event without timing. Destroyed with this object; CUDA defers that until it has happened."""

    __slots__ = ("_destroy", "_query", "pointer")

    def __init__(self, runtime: Any) -> None:
        self.pointer: int = runtime.eventCreateWithFlags(_EVENT_DISABLE_TIMING)
        self._query = runtime.eventQuery
        self._destroy = runtime.eventDestroy

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end the context may be gone
            self._destroy(self.pointer)

    def query(self) -> bool:
        return bool(self._query(self.pointer) == 0)  # 600 is cudaErrorNotReady


class CopyStream:
    """The stream that all host-to-device copies of one receiver run on."""

    def __init__(self, torch: Any, runtime: Any, device_index: int) -> None:
        self.stream = torch.cuda.Stream(device_index)
        self._device_index = device_index
        self._pointer: int = self.stream.cuda_stream
        self._runtime = runtime
        self._host_to_device = runtime.memcpyHostToDevice
        self._order = threading.Lock()
        self._event = Event(runtime)
        self._driver = find_driver()
        self._driver_stream = None if self._driver is None else self._driver.CUstream(self._pointer)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(dst, src, nbytes, self._host_to_device, self._pointer)

    def mark(self, slot: Slot) -> None:
        self._runtime.eventRecord(slot.event.pointer, self._pointer)  # type: ignore[attr-defined]
        slot.copying = True

    def write_word(self, address: int, value: int) -> bool:
        """Write 32 bits to registered host memory behind what is queued; False where the driver cannot."""
        if self._driver is None:
            return False
        driver = self._driver
        (result,) = driver.cuStreamWriteValue32(self._driver_stream, driver.CUdeviceptr(address), value, 0)
        if int(result) != 0:
            self._driver = None
            _log.warning("the driver refuses to write marks from a stream (%s): the host writes them", result)
            return False
        return True

    def bind_thread(self) -> None:
        """Make the device the calling thread's: without it a call could make a context on another."""
        self._runtime.setDevice(self._device_index)

    def new_event(self) -> Event:
        """A new event behind what is queued."""
        event = Event(self._runtime)
        self._runtime.eventRecord(event.pointer, self._pointer)
        return event

    def wait_for(self, stream: int) -> None:
        """What is queued here from now on runs after what is on ``stream``."""
        self._edge(stream, self._pointer)

    def release(self, stream: int) -> None:
        """What is queued on ``stream`` from now on runs after the copies that are queued here."""
        self._edge(self._pointer, stream)

    def _edge(self, first: int, second: int) -> None:
        with self._order:  # record and wait belong together: one event serves all receives
            self._runtime.eventRecord(self._event.pointer, first)
            self._runtime.streamWaitEvent(second, self._event.pointer)
