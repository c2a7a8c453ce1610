"""Host memory as the destination: one copy into a new torch CPU tensor or numpy array, no pinning."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DeviceMemoryError, MissingDependencyError
from .sources import Source
from .tensors import TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["NumpyDestination", "TorchDestination"]


class NumpyDestination:
    """New numpy arrays. bfloat16 and float8 come as ml_dtypes' types where that package is installed, otherwise as
    unsigned integers of the same width that hold the same bits."""

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._ml_dtypes = importlib.import_module("ml_dtypes") if importlib.util.find_spec("ml_dtypes") else None

    def move(self, sources: Sequence[Source]) -> list[np.ndarray[Any, Any]]:
        arrays = []
        for source in sources:
            data = source.data
            try:
                flat = np.empty(data.nbytes, np.uint8)
            except MemoryError as error:
                raise _no_room(data) from error
            source.read_into(flat, 0, num_threads=self._num_threads)
            source.close()
            arrays.append(flat.view(self._dtype(data.dtype)).reshape(data.shape))
        return arrays

    def close(self) -> None:
        pass

    def _dtype(self, name: str) -> np.dtype[Any]:
        if not name.startswith(("bfloat16", "float8")):
            return np.dtype(name)
        if self._ml_dtypes is None:
            return np.dtype(np.uint16 if name == "bfloat16" else np.uint8)
        dtype: np.dtype[Any] = np.dtype(getattr(self._ml_dtypes, name))
        return dtype


class TorchDestination:
    """New torch CPU tensors."""

    def __init__(self, *, num_threads: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                "framework='torch' needs torch: pip install 'mmcopy[torch]', or use framework='numpy'"
            ) from error
        self._torch = torch
        self._num_threads = num_threads

    def move(self, sources: Sequence[Source]) -> list[torch.Tensor]:
        torch = self._torch
        tensors = []
        for source in sources:
            data = source.data
            try:
                tensor = torch.empty(data.shape, dtype=getattr(torch, data.dtype))
            except RuntimeError as error:  # torch's word for a failed host allocation
                raise _no_room(data) from error
            flat = tensor.reshape(-1).view(torch.uint8).numpy()  # shares the tensor's memory: it is contiguous
            source.read_into(flat, 0, num_threads=self._num_threads)
            source.close()
            tensors.append(tensor)
        return tensors

    def close(self) -> None:
        pass


def _no_room(data: TensorData) -> DeviceMemoryError:
    return DeviceMemoryError(f"the host has no room for {data.dtype} {list(data.shape)}: wanted {data.nbytes} bytes")
