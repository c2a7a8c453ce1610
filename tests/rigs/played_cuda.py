"""A GPU that a test plays: host memory as its memory, and a thread that does what is queued, later and in order."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmcopy.receive.cuda.stream import CudaInterfaces

from .played_stream import PlayedStream

COPY_STREAM, CALLERS_STREAM = 7, 9


class RefusedError(RuntimeError):
    """The played runtime's CUDARuntimeError."""


class PlayedRuntime(PlayedStream):
    """The part of cupy's runtime that a receiver calls."""

    memcpyHostToDevice = 1
    CUDARuntimeError = RefusedError

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[int] = []
        self.refuse_at = -1
        self.refuses_words = False
        self.before_copy: Callable[[], object] = lambda: None
        self.edges: list[tuple[int, int, int]] = []
        """(stream that is waited for, stream that waits, copies queued before)."""
        self.registered: dict[int, int] = {}
        self._recorded: dict[int, tuple[int, threading.Event]] = {}
        self._next_event = 1

    def queue_copy(self, dst: int, src: int, nbytes: int) -> None:
        self.before_copy()
        if len(self.copies) == self.refuse_at:
            raise RefusedError("the device refuses")
        self.copies.append(nbytes)
        self.queue(lambda: ctypes.memmove(dst, src, nbytes))

    def getDevice(self) -> int:
        return 0

    def setDevice(self, index: int) -> None:
        assert index == 0

    def memcpyAsync(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (1, COPY_STREAM)
        self.queue_copy(dst, src, nbytes)

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == 2
        self._next_event += 1
        return self._next_event

    def eventDestroy(self, event: int) -> None:
        self._recorded.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        reached = threading.Event()
        self._recorded[event] = (stream, reached)
        self.queue(reached.set)

    def eventQuery(self, event: int) -> int:
        recorded = self._recorded.get(event)
        return 0 if recorded is None or recorded[1].is_set() else 600

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.edges.append((self._recorded[event][0], stream, len(self.copies)))

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]


class PlayedDriver:
    """The part of the driver interface that a receiver calls."""

    CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    CUmemcpyAttributes = SimpleNamespace

    def __init__(self, runtime: PlayedRuntime) -> None:
        self._runtime = runtime

    def CUstream(self, pointer: int) -> int:
        assert pointer == COPY_STREAM
        return pointer

    def CUdeviceptr(self, address: int) -> int:
        return address

    def cuMemcpyBatchAsync(self, dsts: list[int], srcs: list[int], sizes: list[int], *_: object) -> tuple[int]:
        for copy in zip(dsts, srcs, sizes, strict=True):
            self._runtime.queue_copy(*copy)
        return (0,)

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[int]:
        assert (stream, flags) == (COPY_STREAM, 0)
        if self._runtime.refuses_words:
            return (801,)
        self._runtime.queue(lambda: ctypes.memmove(address, value.to_bytes(4, "little"), 4))
        return (0,)


class PlayedTorch:
    """torch, whose device "cuda" is the host. What it allocates stays: where CUDA's allocator would wait for the stream
    before it hands memory out again, a copy that is still queued would write to freed host memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kept: list[Any] = []
        stream = SimpleNamespace(cuda_stream=COPY_STREAM)
        self.cuda = SimpleNamespace(
            device=lambda _: contextlib.nullcontext(),
            stream=lambda _: contextlib.nullcontext(),
            Stream=lambda _: stream,
            OutOfMemoryError=torch.OutOfMemoryError,
        )

    def device(self, *_: object) -> Any:
        return self._torch.device("cpu")

    def empty(self, *args: Any, **options: Any) -> Any:
        self._kept.append(self._torch.empty(*args, **options))
        return self._kept[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def played_cuda(torch: Any, *, has_driver: bool) -> CudaInterfaces:
    """Interfaces to a new played GPU; ``close`` its runtime in the end."""
    runtime = PlayedRuntime()
    return CudaInterfaces(
        torch=PlayedTorch(torch),
        runtime=runtime,
        driver=PlayedDriver(runtime) if has_driver else None,
        current_stream=lambda _: CALLERS_STREAM,
        pin=lambda nbytes: np.zeros(nbytes, np.uint8),
    )
