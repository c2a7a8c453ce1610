"""Host memory as the destination: one copy into a new torch CPU tensor or numpy array, no pinning."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcopy._native import start_copy_threads
from mmcopy.errors import DeviceError, DeviceMemoryError, MissingDependencyError
from mmcopy.tensors import TensorData

from .plan import Layout, Windows, native_extents, scatter
from .request import ByteArray, Request

if TYPE_CHECKING:
    import torch

__all__ = ["NumpyDestination", "TorchDestination"]


class _HostDestination:
    """What the two frameworks share. Each new tensor is an allocation of its own."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        start_copy_threads(num_threads)  # here, so that no receive starts one

    def receive(self, request: Request, out: Sequence[Any] | None = None) -> list[Any]:
        """The request's tensors: new arrays, or ``out``, checked by :meth:`check_out`. Blocks until all is there."""
        arrays = [self.new(item) for item in request.items] if out is None else list(out)
        self.fill(request, scatter(request.sizes), arrays)
        return arrays

    def fill(self, request: Request, layout: Layout, bases: Sequence[Any], windows: Windows | None = None) -> None:
        """Put the bytes of the open items where ``layout`` says: all, or those in the windows of one packed base.

        Blocks until they are there. Bytes between tensors stay as they are. The segments are unlinked.
        """
        spans = [self.span(base) for base in bases]
        request.unlink()
        request.native.read(native_extents(layout, windows), spans, num_threads=self._num_threads)

    def check_out(self, items: Sequence[TensorData], out: Sequence[object]) -> None:
        """Raise :class:`DeviceError` unless each of ``out`` can take its item's bytes as it is."""
        for n, (item, array) in enumerate(zip(items, out, strict=True)):
            problem = self.problem(item, array)
            if problem:
                raise DeviceError(f"out {n} is {problem}; want {item.dtype} {list(item.shape)}, contiguous")

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass

    def new(self, data: TensorData) -> Any:
        raise NotImplementedError

    def span(self, array: Any) -> ByteArray | tuple[int, int]:
        """The array's memory: flat bytes, or address and bytes."""
        raise NotImplementedError

    def problem(self, data: TensorData, array: Any) -> str:
        raise NotImplementedError


class NumpyDestination(_HostDestination):
    """numpy arrays. bfloat16 and float8 are ml_dtypes' types where that package is installed, otherwise unsigned
    integers of the same width that hold the same bits."""

    def __init__(self, *, num_threads: int) -> None:
        super().__init__(num_threads=num_threads)
        self._ml_dtypes = importlib.import_module("ml_dtypes") if importlib.util.find_spec("ml_dtypes") else None

    def new(self, data: TensorData) -> np.ndarray[Any, Any]:
        try:
            return np.empty(data.shape, self._dtype(data.dtype))
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than can be addressed
            raise _no_room(f"{data.dtype} {list(data.shape)}", data.nbytes) from error

    def span(self, array: np.ndarray[Any, Any]) -> ByteArray:
        return array.reshape(-1).view(np.uint8)

    def problem(self, data: TensorData, array: object) -> str:
        if not isinstance(array, np.ndarray):
            return f"{type(array).__name__}, not a numpy array"
        if (array.dtype, array.shape) != (self._dtype(data.dtype), data.shape):
            return f"{array.dtype} {list(array.shape)}"
        return "" if array.flags.c_contiguous and array.flags.writeable else "not contiguous, or read-only"

    def _dtype(self, name: str) -> np.dtype[Any]:
        if not name.startswith(("bfloat16", "float8")):
            return np.dtype(name)
        if self._ml_dtypes is None:
            return np.dtype(np.uint16 if name == "bfloat16" else np.uint8)
        dtype: np.dtype[Any] = np.dtype(getattr(self._ml_dtypes, name))
        return dtype


class TorchDestination(_HostDestination):
    """torch CPU tensors."""

    def __init__(self, *, num_threads: int) -> None:
        super().__init__(num_threads=num_threads)
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                "framework='torch' needs torch: pip install 'mmcopy[torch]', or use framework='numpy'"
            ) from error
        self._torch = torch

    def new(self, data: TensorData) -> torch.Tensor:
        try:
            return self._torch.empty(data.shape, dtype=getattr(self._torch, data.dtype))
        except RuntimeError as error:  # torch's word for a failed host allocation
            raise _no_room(f"{data.dtype} {list(data.shape)}", data.nbytes) from error

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor: the base of a packed layout. Raises :class:`DeviceMemoryError`."""
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8)
        except (RuntimeError, TypeError) as error:  # TypeError: more bytes than can be addressed
            raise _no_room("a packed buffer", nbytes) from error

    def span(self, array: torch.Tensor) -> tuple[int, int]:
        return array.data_ptr(), array.nbytes  # it is contiguous

    def problem(self, data: TensorData, array: object) -> str:
        torch = self._torch
        if not isinstance(array, torch.Tensor):
            return f"{type(array).__name__}, not a torch tensor"
        if array.device.type != "cpu" or (array.dtype, tuple(array.shape)) != (getattr(torch, data.dtype), data.shape):
            return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)} on {array.device}"
        return "" if array.is_contiguous() else "not contiguous"


def _no_room(what: str, nbytes: int) -> DeviceMemoryError:
    return DeviceMemoryError(f"the host has no room for {what}: wanted {nbytes} bytes")
