"""The stream that a receiver's copies run on, and the events behind them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmcopy.errors import DeviceError, MissingDependencyError
from mmcopy.receive.in_place import Run
from mmcopy.receive.staging import Slot

__all__ = ["CopyStream", "CudaInterfaces", "Event", "find_cuda"]

_log = logging.getLogger(__name__)

_EVENT_DISABLE_TIMING = 2  # cudaEventDisableTiming

_FEWEST_BATCHED = 4
"""So many copies are queued faster by one call than by one each (H200, copies of 64 KiB, queued and done: 4 in 23 us
against 26, 16 in 48 against 71, 256 in 620 against 1016; 2 and 3 alike)."""


@dataclass(frozen=True, slots=True)
class CudaInterfaces:
    """The programs that CUDA is used through. A test can bring its own."""

    torch: Any
    runtime: Any
    """cupy's ``cupy.cuda.runtime``."""
    driver: Any
    """``cuda.bindings.driver``, which comes with torch; None without it."""
    current_stream: Callable[[int], int]
    """The stream that is current on a device, as CUDA's number."""
    pin: Callable[[int], Any]
    """That many bytes of new page-locked memory, as a buffer that frees it; raises ``runtime.CUDARuntimeError``."""


def find_cuda(device_index: int) -> CudaInterfaces:
    """The interfaces to a device that exists.

    Raises :class:`MissingDependencyError` without torch or cupy, and :class:`DeviceError`.
    """
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
    try:
        from cuda.bindings import driver
    except ImportError:
        driver = None
    # torch's own compiled code asks so; the public way makes an object first (3.0 us against 0.15 on an H200's host).
    current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if current_stream is None:

        def current_stream(index: int) -> int:
            return int(torch.cuda.current_stream(index).cuda_stream)

    return CudaInterfaces(torch, runtime, driver, current_stream, _pin)


def _pin(nbytes: int) -> Any:
    from cupy.cuda import PinnedMemory, PinnedMemoryPointer

    return PinnedMemoryPointer(PinnedMemory(nbytes), 0)


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
    """The stream that all host-to-device copies of one receiver run on.

    ``runtime`` and ``driver`` are those of :class:`CudaInterfaces`; a test can replace them.
    """

    def __init__(self, cuda: CudaInterfaces, device_index: int) -> None:
        self.stream = cuda.torch.cuda.Stream(device_index)
        self.runtime = cuda.runtime
        self.driver = cuda.driver
        self.writes_words = cuda.driver is not None
        """Whether the stream can write release flags; a test can say that it cannot."""
        self._device_index = device_index
        self._pointer: int = self.stream.cuda_stream
        self._host_to_device = self.runtime.memcpyHostToDevice
        self._order = threading.Lock()
        self._event = Event(self.runtime)
        self._attributes = None if self.driver is None else _batch_attributes(self.driver)
        self._driver_stream = None if self.driver is None else self.driver.CUstream(self._pointer)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        self.runtime.memcpyAsync(dst, src, nbytes, self._host_to_device, self._pointer)

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Queue copies out of registered memory, none of them out of two registrations, in any order."""
        if len(runs) < _FEWEST_BATCHED or not self.copy_batch(runs):
            for run in runs:
                self.copy(*run)

    def copy_batch(self, runs: Sequence[Run]) -> bool:
        """Queue all by one call; False where there is none. A driver that refuses is not asked again: the copies one
        by one will tell if they were the reason."""
        if self.driver is None or self._attributes is None:
            return False
        driver = self.driver
        result, *_ = driver.cuMemcpyBatchAsync(
            [driver.CUdeviceptr(dest) for dest, _, _ in runs],
            [driver.CUdeviceptr(source) for _, source, _ in runs],
            [nbytes for _, _, nbytes in runs],
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

    def record(self, slot: Slot) -> None:
        self.runtime.eventRecord(slot.event.pointer, self._pointer)  # type: ignore[attr-defined]
        slot.copying = True

    def write_word(self, address: int, value: int) -> bool:
        """Write 32 bits to registered host memory behind what is queued; False where the driver cannot."""
        if not self.writes_words:
            return False
        driver = self.driver
        # Called through ctypes instead it takes as long (H200: 3.6 us against 3.3).
        (result,) = driver.cuStreamWriteValue32(self._driver_stream, driver.CUdeviceptr(address), value, 0)
        if int(result) != 0:
            self.writes_words = False
            _log.warning("the driver refuses to write release flags from a stream (%s): the host writes them", result)
            return False
        return True

    def bind_thread(self) -> None:
        """Make the device the calling thread's: without it a call could make a context on another."""
        self.runtime.setDevice(self._device_index)

    def new_event(self) -> Event:
        """A new event behind what is queued."""
        event = Event(self.runtime)
        self.runtime.eventRecord(event.pointer, self._pointer)
        return event

    def wait_for(self, stream: int) -> None:
        """What is queued here from now on runs after what is on ``stream``."""
        self._edge(stream, self._pointer)

    def release(self, stream: int) -> None:
        """What is queued on ``stream`` from now on runs after the copies that are queued here."""
        self._edge(self._pointer, stream)

    def _edge(self, first: int, second: int) -> None:
        with self._order:  # record and wait belong together: one event serves all receives
            self.runtime.eventRecord(self._event.pointer, first)
            self.runtime.streamWaitEvent(second, self._event.pointer)


def _batch_attributes(driver: Any) -> Any:
    """For copies whose sources are read in the stream's order; None where the driver interface is older than CUDA
    12.8, which has no batches."""
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return attributes
