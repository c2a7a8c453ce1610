"""An array as it is going to be sent: flat bytes, and the dtype that they are cast to on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mmcopy._native import CASTS
from mmcopy.arrays import FlatArray, flatten
from mmcopy.errors import CastError, ConfigError
from mmcopy.tensors import itemsize_of

__all__ = ["Parcel", "dtype_of", "parcel_of"]


class Parcel(NamedTuple):
    """An array that was looked at."""

    flat: FlatArray
    dtype: str
    """What it is cast to."""
    nbytes: int
    """After the cast."""


def parcel_of(array: object, dtype: str | None) -> Parcel:
    """Looks at ``array``; ``dtype`` None keeps its own. Raises what :meth:`mmcopy.Sender.send` raises for an array or a
    cast that is not possible."""
    flat = flatten(array)
    target = flat.dtype if dtype is None else dtype
    nbytes = len(flat.data) // itemsize_of(flat.dtype) * itemsize_of(target)
    if target != flat.dtype and (flat.dtype, target) not in CASTS:
        pairs = ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))
        raise CastError(f"no cast from {flat.dtype} to {target}; there is {pairs}")
    return Parcel(flat, target, nbytes)


def dtype_of(dtype: Any, key: Any) -> str | None:
    """What a request's ``dtype``, one for all or one a key, says for ``key``. Raises :class:`ConfigError`."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        found: str | None = dtype.get(key) if isinstance(dtype, Mapping) else dtype[key]
    except (IndexError, KeyError, TypeError):
        raise ConfigError(
            f"dtype is {dtype!r}, which has none for tensor {key!r}: want one for all, or the form of arrays"
        ) from None
    return found
