"""Host memory as the destination: one copy into a new torch CPU tensor or numpy array, no pinning."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcopy.errors import DeviceError, DeviceMemoryError, MissingDependencyError
from mmcopy.tensors import TensorData

from .plan import parts_in
from .request import ByteArray, Described, Source

if TYPE_CHECKING:
    import torch

__all__ = ["NumpyDestination", "TorchDestination"]


class _HostDestination:
    """What the two frameworks share: allocate, fill, check what the caller brings."""

    array_type: type

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads

    def move(
        self, sources: Sequence[Source], *, out: Sequence[Any] | None, while_copying: Callable[[], None]
    ) -> list[Any]:
        """The sources' bytes in new arrays, or in ``out``, checked by :meth:`check_out`. Blocks until all is there."""
        arrays = [self.allocate(source.data) for source in sources] if out is None else list(out)
        while_copying()
        for source, array in zip(sources, arrays, strict=True):
            source.read_into(self.flat(array), num_threads=self._num_threads)
        return arrays

    def check_out(self, sources: Sequence[Described], out: Sequence[object]) -> None:
        """Raise :class:`DeviceError` unless each of ``out`` can take its source's bytes as it is."""
        for n, (source, array) in enumerate(zip(sources, out, strict=True)):
            problem = self.problem(source.data, array)
            if problem:
                raise DeviceError(
                    f"out {n} is {problem}; want {source.data.dtype} {list(source.data.shape)}, contiguous"
                )

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass

    def allocate(self, data: TensorData) -> Any:
        raise NotImplementedError

    def flat(self, array: Any) -> ByteArray:
        raise NotImplementedError

    def problem(self, data: TensorData, array: Any) -> str:
        raise NotImplementedError


class NumpyDestination(_HostDestination):
    """numpy arrays. bfloat16 and float8 come as ml_dtypes' types where that package is installed, otherwise as unsigned
    integers of the same width that hold the same bits."""

    def __init__(self, *, num_threads: int) -> None:
        super().__init__(num_threads=num_threads)
        self._ml_dtypes = importlib.import_module("ml_dtypes") if importlib.util.find_spec("ml_dtypes") else None

    def allocate(self, data: TensorData) -> np.ndarray[Any, Any]:
        try:
            return np.empty(data.shape, self._dtype(data.dtype))
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than can be addressed
            raise _no_room(f"{data.dtype} {list(data.shape)}", data.nbytes) from error

    def flat(self, array: np.ndarray[Any, Any]) -> ByteArray:
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

    def allocate(self, data: TensorData) -> torch.Tensor:
        try:
            return self._torch.empty(data.shape, dtype=getattr(self._torch, data.dtype))
        except RuntimeError as error:  # torch's word for a failed host allocation
            raise _no_room(f"{data.dtype} {list(data.shape)}", data.nbytes) from error

    def flat(self, array: torch.Tensor) -> ByteArray:
        # Shares the tensor's memory: it is contiguous.
        flat: ByteArray = array.detach().reshape(-1).view(self._torch.uint8).numpy()
        return flat

    def allocate_packed(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor, for :meth:`read_windows`. Raises :class:`DeviceMemoryError`."""
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8)
        except (RuntimeError, TypeError) as error:  # TypeError: more bytes than can be addressed
            raise _no_room("a packed buffer", nbytes) from error

    def read_windows(
        self,
        sources: Sequence[Source],
        starts: Sequence[int],
        base: torch.Tensor,
        windows: Sequence[tuple[int, int]],
        *,
        while_copying: Callable[[], None],
    ) -> None:
        """Fill the windows of ``base``, each a start and a stop in bytes, with what the sources, which begin at
        ``starts`` in it, have there. Blocks until all is there; what lies between the sources stays as it is."""
        flat = self.flat(base)
        while_copying()
        sizes = tuple(source.data.nbytes for source in sources)
        for part in parts_in(sizes, tuple(starts), windows=tuple(windows)):
            dst = flat[part.dest_start : part.dest_start + part.nbytes]
            sources[part.source].read_into(dst, start=part.source_start, num_threads=self._num_threads)

    def problem(self, data: TensorData, array: object) -> str:
        torch = self._torch
        if not isinstance(array, torch.Tensor):
            return f"{type(array).__name__}, not a torch tensor"
        if array.device.type != "cpu" or (array.dtype, tuple(array.shape)) != (getattr(torch, data.dtype), data.shape):
            return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)} on {array.device}"
        return "" if array.is_contiguous() else "not contiguous"


def _no_room(what: str, nbytes: int) -> DeviceMemoryError:
    return DeviceMemoryError(f"the host has no room for {what}: wanted {nbytes} bytes")
