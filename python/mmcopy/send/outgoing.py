"""What a caller gives to a sender: an array and the dtype that it arrives in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mmcopy._native import CASTS, DTYPES
from mmcopy.arrays import FlatArray, flatten
from mmcopy.errors import ConfigError, DtypeError
from mmcopy.tensors import itemsize_of

__all__ = ["Outgoing", "dtype_of", "outgoing"]


class Outgoing(NamedTuple):
    """An array to send. The native arena takes it as it is."""

    flat: FlatArray
    dtype: str
    """What it is cast to on the way."""
    nbytes: int
    """After the cast."""


def outgoing(array: object, dtype: str | None) -> Outgoing:
    """Look at ``array``; ``dtype`` None keeps its own. Raises what :meth:`mmcopy.Sender.send` raises for it."""
    flat = flatten(array)
    own = flat.dtype
    if dtype is None or dtype == own:
        return Outgoing(flat, own, flat.nbytes)
    itemsize = itemsize_of(dtype)
    if (own, dtype) not in CASTS:
        pairs = ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))
        raise DtypeError(f"no cast from {own} to {dtype}; there is {pairs}")
    return Outgoing(flat, dtype, flat.nbytes // DTYPES[own] * itemsize)


def dtype_of(dtype: Any, key: Any) -> str | None:
    """What a request's ``dtype``, one for all or one per key, says for ``key``. Raises :class:`ConfigError`."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        found: str | None = dtype.get(key) if isinstance(dtype, Mapping) else dtype[key]
    except (IndexError, KeyError, TypeError):
        raise ConfigError(
            f"dtype is {dtype!r}, which has none for tensor {key!r}: want one for all, or the form of arrays"
        ) from None
    return found
