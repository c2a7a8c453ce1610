"""Any array a sender may be given, seen as flat bytes: numpy, torch CPU tensors, DLPack, the buffer protocol.

torch is never imported: a tensor can only exist where its own library has been.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any, NamedTuple

import numpy as np

from ._native import DTYPES
from .errors import ArrayTypeError, DtypeError

__all__ = ["FlatArray", "flatten", "numpy_dtype"]

_EXPORTED: dict[np.dtype[Any], str] = {
    np.dtype(name).newbyteorder("<"): name for name in DTYPES if not name.startswith(("bfloat16", "float8"))
}
"""numpy's own dtypes, whose arrays export buffers. Those of ml_dtypes do not."""

_DLPACK_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost in dlpack.h


class FlatArray(NamedTuple):
    """An array's dtype name and shape, and its ``nbytes`` bytes in C order.

    They are the source's own memory where that is C-contiguous and little-endian already, and a copy otherwise: do not
    write to them.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: Any
    """A numpy array that exports the bytes as a buffer, or a torch tensor that has them at ``address``."""
    address: int = 0

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The bytes as a C-contiguous numpy array of any dtype and shape."""
        if isinstance(self.source, np.ndarray):
            return self.source
        flat: np.ndarray[Any, Any] = self.source.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        return flat


def flatten(array: object) -> FlatArray:
    """The bytes of ``array`` in C order; strides of any kind, 0-d, empty and read-only arrays included.

    Raises :class:`ArrayTypeError` for an object that is not an array or not in host memory, and for a torch tensor
    whose storage was freed or is too short; :class:`DtypeError` for elements outside ``DTYPES`` (objects, structures,
    complex numbers).
    """
    if type(array) is np.ndarray:
        return _flatten_numpy(array)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _flatten_torch(torch, array)
    if isinstance(array, (np.ndarray, np.generic)):
        return _flatten_numpy(np.asarray(array))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _flatten_dlpack(torch, array)
    try:
        view = memoryview(array)  # type: ignore[arg-type]
    except TypeError:
        raise ArrayTypeError(
            f"{type(array).__name__} is no array: want numpy, a torch CPU tensor, DLPack or the buffer protocol"
        ) from None
    return _flatten_numpy(np.asarray(view))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype for one of ``DTYPES``: bfloat16 and float8 are ml_dtypes' where that package is installed,
    otherwise unsigned integers of the same width."""
    if not name.startswith(("bfloat16", "float8")):
        return np.dtype(name)
    if importlib.util.find_spec("ml_dtypes") is None:
        return np.dtype(np.uint16 if name == "bfloat16" else np.uint8)
    dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    return dtype


def _flatten_numpy(array: np.ndarray[Any, Any]) -> FlatArray:
    name = _EXPORTED.get(array.dtype)
    if (
        name is not None and array.ndim and array.flags.c_contiguous
    ):  # the buffer of one without dimensions has no shape
        return FlatArray(name, array.shape, array.nbytes, array)
    name = _name_of(array.dtype)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return FlatArray(name, array.shape, array.nbytes, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@functools.lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Its name among ``DTYPES``; numpy composes it anew each time (2 us)."""
    if dtype.name not in DTYPES:  # ml_dtypes' bfloat16 and float8 types have torch's names
        raise DtypeError(f"numpy dtype {dtype} cannot be sent; known: {', '.join(DTYPES)}")
    return dtype.name


def _flatten_torch(torch: Any, tensor: Any) -> FlatArray:
    if not tensor.is_cpu:
        raise ArrayTypeError(f"the tensor is on {tensor.device}; the sending side takes tensors in host memory")
    if tensor.layout is not torch.strided or tensor.is_nested:
        found = "nested" if tensor.is_nested else str(tensor.layout)
        raise ArrayTypeError(f"the tensor has layout {found}, want torch.strided")
    name = _torch_name_of(tensor.dtype)
    is_contiguous = tensor.is_contiguous()
    _check_storage(torch, tensor, is_contiguous)
    # A lazy negation is a view whose storage holds the other sign.
    if not is_contiguous or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    return FlatArray(name, tuple(tensor.shape), tensor.nbytes, tensor, tensor.data_ptr())


@functools.lru_cache(maxsize=64)
def _torch_name_of(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise DtypeError(f"{dtype} cannot be sent; known: {', '.join(DTYPES)}")
    return name


def _check_storage(torch: Any, tensor: Any, is_contiguous: bool) -> None:
    """Raises :class:`ArrayTypeError` unless the storage has all elements: it can be freed or resized under a tensor,
    which keeps its shape."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return
    wanted = tensor.storage_offset() * tensor.itemsize + nbytes
    if not is_contiguous:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        wanted = (tensor.storage_offset() + steps + 1) * tensor.itemsize
    try:
        storage = tensor.untyped_storage()
        found = storage.nbytes()
        # A fake tensor says cpu and has a storage on meta.
        is_here = type(tensor) is torch.Tensor or storage.device.type == "cpu"
        has_memory = is_here and (found == 0 or storage.data_ptr() != 0)
    except RuntimeError as error:  # torch.func's tensors, and those that wrap others
        raise ArrayTypeError(f"the {type(tensor).__name__} has no memory of its own: {error}") from error
    if not has_memory:
        raise ArrayTypeError(f"the {type(tensor).__name__} has no memory of its own: {wanted} bytes are missing")
    if found < wanted:
        raise ArrayTypeError(
            f"the tensor's storage has {found} bytes, its elements are in the first {wanted} (shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}, offset {tensor.storage_offset()}): "
            "it was freed or resized"
        )


def _flatten_dlpack(torch: Any, array: Any) -> FlatArray:
    kind, index = array.__dlpack_device__()
    if kind not in _DLPACK_HOST:
        raise ArrayTypeError(f"{type(array).__name__} is on DLPack device ({kind}, {index}), want host memory")
    try:
        return _flatten_numpy(np.from_dlpack(array))
    except (BufferError, RuntimeError, TypeError) as error:
        # numpy knows no bfloat16 or float8; the array's own conversion (ml_dtypes) or torch does.
        if hasattr(array, "__array__"):
            return _flatten_numpy(np.asarray(array))
        if torch is not None:
            return _flatten_torch(torch, torch.from_dlpack(array))
        raise ArrayTypeError(f"{type(array).__name__} has elements that need torch: {error}") from error
