"""The stream that a receiver's copies run on, and the events behind them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mmcopy.errors import DeviceError, MissingDependencyError
from mmcopy.receive.in_place import Run
from mmcopy.receive.staging import Slot

from .registration import split_runs

__all__ = [
    "CopyStream",
    "Event",
    "find_current_stream",
    "find_driver",
    "find_runtime",
]


def find_runtime(device_index: int) -> tuple[Any, Any]:
    """torch and cupy's CUDA runtime, once both are importable and the device exists."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "CUDA devices need torch and cupy: pip install 'mmcopy[cuda13]' (or cuda12)"
        ) from error
    if not torch.cuda.is_available():
        raise DeviceError(f"cuda:{device_index} was asked for, but torch {torch.__version__} finds no CUDA device")
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise DeviceError(f"cuda:{device_index} does not exist: torch finds {count} CUDA devices")
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise MissingDependencyError(
            f"CUDA devices need cupy for CUDA {torch.version.cuda}: pip install 'mmcopy[cuda13]' (or cuda12)"
        ) from error
    return torch, runtime


def find_driver() -> Any:
    """CUDA's driver interface, which comes with torch; None without it."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def find_current_stream(torch: Any) -> Callable[[int], int]:
    """What tells the stream that is current on a device, as CUDA's number.

    torch's own compiled code asks so; the public way makes an object first (3.0 us against 0.15 on an H200's host).
    """
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw
    return lambda device_index: int(torch.cuda.current_stream(device_index).cuda_stream)


_log = logging.getLogger(__name__)

_EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming

_FEWEST_BATCHED = 4
"""So many copies are queued faster by one call than by one each (H200, copies of 64 KiB, queued and done: 4 in 23 us
against 26, 16 in 48 against 71, 256 in 620 against 1016; 2 and 3 alike)."""


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
        self._attributes = None if self._driver is None else _batch_attributes(self._driver)
        self._driver_stream = None if self._driver is None else self._driver.CUstream(self._pointer)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(dst, src, nbytes, self._host_to_device, self._pointer)

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Queue copies out of registered memory, in any order among themselves."""
        runs = split_runs(runs)
        if len(runs) < _FEWEST_BATCHED or not self._copy_batch(runs):
            for run in runs:
                self.copy(*run)

    def _copy_batch(self, runs: Sequence[Run]) -> bool:
        """Queue all by one call; False where there is none. A driver that refuses is not asked again: the copies one
        by one will tell if they were the reason."""
        if self._driver is None or self._attributes is None:
            return False
        driver = self._driver
        result, *_ = driver.cuMemcpyBatchAsync(
            [driver.CUdeviceptr(run.dest) for run in runs],
            [driver.CUdeviceptr(run.source) for run in runs],
            [run.nbytes for run in runs],
            len(runs),
            [self._attributes],
            [0],
            1,
            self._driver_stream,
        )
        if int(result) != 0:
            self._attributes = None
            _log.warning("the driver refuses %d copies in one call (%s): they are queued one by one", len(runs), result)
            return False
        return True

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


def _batch_attributes(driver: Any) -> Any:
    """For copies whose sources are read in the stream's order; None where the driver interface is older than CUDA
    12.8, which has no batches."""
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return attributes
