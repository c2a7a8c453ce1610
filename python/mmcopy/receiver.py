"""The receiving side: described tensors become tensors on the worker's device."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, overload

from .config import default_num_threads
from .errors import ClosedError, ConfigError, DeviceError, MmcopyError
from .host import NumpyDestination, TorchDestination
from .metrics import Counter, Metrics
from .sources import Source, SourceOpener
from .tensors import ShmHandle, TensorData

__all__ = ["ACCEPT_PREFIXES", "Receiver"]

ACCEPT_PREFIXES = ("smg-tokenspeed-", "mmcopy-")
"""How the names of segments begin that SMG's gateway and mmcopy's own sender make."""

Key = TypeVar("Key")


class _Destination(Protocol):
    def move(self, sources: Sequence[Source]) -> list[Any]: ...

    def close(self) -> None: ...


class Receiver:
    """Puts tensors on ``device`` and leaves nothing in shared memory.

    ``device``: ``"cpu"``, ``"cuda:N"`` (the index is required) or a ``torch.device``. On the CPU ``framework`` picks
    what comes back: ``"torch"`` or ``"numpy"`` (bfloat16 and float8 as ml_dtypes' types, or as unsigned integers of
    the same width without that package). On CUDA always torch; cupy is needed too.

    ``accept_prefixes``: only segments whose names begin so are opened and removed. ``num_threads`` copy threads are
    used for large tensors (None: one a core, 8 at most). ``staging_bytes`` of pinned memory are allocated here, in
    slots of ``slot_bytes``, on CUDA only; no receive allocates any. ``timeout_s`` bounds each wait for the GPU.

    Methods may be called from several threads. After ``fork`` the child's copy refuses to work.
    """

    def __init__(
        self,
        device: object,
        *,
        framework: Literal["torch", "numpy"] = "torch",
        shm_dir: str | os.PathLike[str] = "/dev/shm",
        num_threads: int | None = None,
        accept_prefixes: Sequence[str] = ACCEPT_PREFIXES,
        staging_bytes: int = 64 << 20,
        slot_bytes: int = 4 << 20,
        timeout_s: float = 60.0,
        metrics: Metrics | None = None,
    ) -> None:
        self.device = str(device)
        self.shm_dir = os.fspath(shm_dir)
        self.metrics = metrics or Metrics()
        self._pid = os.getpid()
        self._closed = False
        self._opener = SourceOpener(self.shm_dir, accept_prefixes, self.metrics)
        threads = num_threads or default_num_threads()
        index = _cuda_index(self.device)
        if framework not in ("torch", "numpy"):
            raise ConfigError(f"framework is {framework!r}, want 'torch' or 'numpy'")
        if index is not None:
            from .cuda import CudaDestination

            if framework != "torch":
                raise ConfigError(f"{self.device} gives torch tensors, framework {framework!r} is for the CPU")
            self._destination: _Destination = CudaDestination(
                index,
                staging_bytes=staging_bytes,
                slot_bytes=slot_bytes,
                num_threads=threads,
                timeout_s=timeout_s,
            )
        elif framework == "torch":
            self._destination = TorchDestination(num_threads=threads)
        else:
            self._destination = NumpyDestination(num_threads=threads)

    @overload
    def receive(self, items: TensorData) -> Any: ...
    @overload
    def receive(self, items: Mapping[Key, TensorData]) -> dict[Key, Any]: ...
    @overload
    def receive(self, items: Sequence[TensorData]) -> list[Any]: ...
    def receive(self, items: TensorData | Mapping[Key, TensorData] | Sequence[TensorData]) -> Any:
        """The tensors of one request, in the form of ``items``: one tensor, a dict with its keys, or a list.

        New C-contiguous tensors of each item's dtype and shape. Blocks the calling thread until every byte has left
        shared memory and the message (call it off an event loop); on CUDA it does not wait for the GPU, and the
        tensors are safe on the caller's current stream. Inline payloads may be reused at once.

        All segments of the request are opened before the first is read, and all are removed, on success and on
        error alike. Raises the error of the first bad item, with nothing delivered: :class:`SegmentNotFoundError`,
        :class:`SegmentPermissionError`, :class:`SegmentSizeError`, :class:`SegmentKindError`,
        :class:`SegmentNameError`, :class:`RepeatedHandleError`, :class:`DeviceMemoryError`,
        :class:`ReceiveTimeoutError`, :class:`ClosedError`; MemoryError when the host has no room.
        """
        if isinstance(items, TensorData):
            return self._receive([items])[0]
        if isinstance(items, Mapping):
            return dict(zip(items, self._receive(list(items.values())), strict=True))
        return self._receive(list(items))

    def release(
        self,
        items: TensorData | ShmHandle | Mapping[Any, TensorData | ShmHandle] | Sequence[TensorData | ShmHandle],
    ) -> int:
        """Remove what ``items`` hold in shared memory without reading it; how many segments were removed.

        For a request that is refused or cancelled before it is received. Never raises for a segment that is gone,
        or for a handle that is not acceptable: that one is left alone. Works on a closed receiver too.
        """
        if isinstance(items, (TensorData, ShmHandle)):
            return self._opener.release([items])
        return self._opener.release(list(items.values() if isinstance(items, Mapping) else items))

    def close(self) -> None:
        """Wait (``timeout_s`` at most) until no copy reads pinned memory, and free it. Idempotent.

        Tensors that were received stay valid.
        """
        if not self._closed:
            self._closed = True
            if self._pid == os.getpid():
                self._destination.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, items: list[TensorData]) -> list[Any]:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the receiver belongs to process {self._pid}, this is {os.getpid()} forked from it: make a new one"
            )
        sources: list[Source] = []
        try:
            if self._closed:
                self._opener.release(items)
                raise ClosedError("the receiver is closed")
            sources = self._opener.open_all(items)
            tensors = self._destination.move(sources)
        except BaseException as error:
            for source in sources:
                source.close("released")
            if isinstance(error, (MmcopyError, MemoryError)):
                self.metrics.count(Counter.RECEIVE_FAILURES, type(error).__name__)
            raise
        for item in items:
            self.metrics.count(Counter.TENSORS_RECEIVED, item.path)
            self.metrics.count(Counter.BYTES_RECEIVED, item.path, item.nbytes)
        return tensors


def _cuda_index(device: str) -> int | None:
    """The GPU's index, None for the CPU. Raises :class:`DeviceError` for anything else."""
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match is None:
        hint = "; give the index, for example 'cuda:0'" if device == "cuda" else ""
        raise DeviceError(f"device is {device!r}, want 'cpu' or 'cuda:N'{hint}")
    return int(match[1])
