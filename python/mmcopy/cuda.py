"""CUDA through torch and cupy: the copy stream, pinned memory, one asynchronous copy.

Everything is given its device index; no other device is touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DeviceError, DeviceMemoryError, MissingDependencyError
from .ring import Slot, StagingRing
from .sources import Source

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDestination"]


class CudaDestination:
    """Puts sources into new tensors on one GPU, by way of a ring of pinned slots and a copy stream of its own.

    The pinned memory (``staging_bytes``, in slots of ``slot_bytes``) is allocated here, once.
    """

    def __init__(
        self, device_index: int, *, staging_bytes: int, slot_bytes: int, num_threads: int, timeout_s: float
    ) -> None:
        torch, runtime = _require(device_index)
        self._torch = torch
        self._runtime = runtime
        self._index = device_index
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        num_slots = max(2, math.ceil(staging_bytes / slot_bytes))
        with torch.cuda.device(device_index):
            self._copy_stream = torch.cuda.Stream(device_index)
            slots = [Slot(_pinned(slot_bytes)) for _ in range(num_slots)]
        self._ring = StagingRing(slots)

    def move(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        """New tensors on the device with the sources' bytes, safe on the caller's current stream.

        Blocks the host while bytes are copied into pinned slots, not for the GPU: the last copies may still run when
        this returns. Each source is closed as soon as its last byte is read, under the copies that still run.
        """
        torch = self._torch
        with torch.cuda.device(self._index):
            caller = torch.cuda.current_stream(self._index)
            tensors = [self._empty(source) for source in sources]
            # The allocator may hand out memory that earlier work on the caller's stream still uses.
            self._copy_stream.wait_stream(caller)
            try:
                for source, tensor in zip(sources, tensors, strict=True):
                    self._fill(tensor, source)
                    source.close()
            except self._runtime.CUDARuntimeError as error:
                raise DeviceError(f"cuda:{self._index} refused a copy: {error}") from error
            finally:
                # On success this orders the caller's work after the copies; on failure it keeps the tensors' memory
                # from being handed out while a copy still writes to it.
                caller.wait_stream(self._copy_stream)
        return tensors

    def close(self) -> None:
        """Wait until no copy reads pinned memory, then let it go. Raises :class:`ReceiveTimeoutError`."""
        self._ring.close(time.monotonic() + self._timeout_s)

    def _empty(self, source: Source) -> torch.Tensor:
        data = source.data
        try:
            dtype = getattr(self._torch, data.dtype)
            tensor: torch.Tensor = self._torch.empty(data.shape, dtype=dtype, device=f"cuda:{self._index}")
        except self._torch.cuda.OutOfMemoryError as error:
            free, total = self._torch.cuda.mem_get_info(self._index)
            raise DeviceMemoryError(
                f"cuda:{self._index} has no room for {data.dtype} {list(data.shape)}: "
                f"wanted {data.nbytes} bytes, {free} of {total} free"
            ) from error
        return tensor

    def _fill(self, tensor: torch.Tensor, source: Source) -> None:
        deadline = time.monotonic() + self._timeout_s
        address, stream, step = tensor.data_ptr(), self._copy_stream.cuda_stream, self._ring.slot_bytes
        for start in range(0, source.data.nbytes, step):
            slot = self._ring.acquire(deadline)
            try:
                chunk = slot.buffer[: min(step, source.data.nbytes - start)]
                source.read_into(chunk, start, num_threads=self._num_threads)
                self._runtime.memcpyAsync(
                    address + start,
                    chunk.ctypes.data,
                    len(chunk),
                    self._runtime.memcpyHostToDevice,
                    stream,
                )
                event = self._torch.cuda.Event()
                event.record(self._copy_stream)
                slot.last_copy = event
            finally:
                self._ring.release(slot)


def _require(device_index: int) -> tuple[Any, Any]:
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


def _pinned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``nbytes`` of page-locked memory from cudaHostAlloc, freed with the last array that refers to it."""
    from cupy.cuda import PinnedMemory, PinnedMemoryPointer

    memory = PinnedMemoryPointer(PinnedMemory(nbytes), 0)
    return np.frombuffer(memory, np.uint8, nbytes)
