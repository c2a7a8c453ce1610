"""What travels: a tensor's description and where its bytes are.

Nothing here copies a byte or imports torch. The objects are frozen, compare by value and are cheap to pass between
threads; they own no resource: a :class:`ShmHandle` names a segment, it does not hold it open.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ._native import CASTS, DTYPES
from .errors import DtypeError, PayloadError

__all__ = ["CASTS", "DTYPES", "Inline", "ShmHandle", "TensorData", "itemsize_of"]

LEASE_PREFIX = "mmcopyarena-"
"""How the names of leases begin; those of segments never do."""

_U64_MAX = 2**64 - 1


def itemsize_of(dtype: str) -> int:
    """Bytes an element of ``dtype`` takes. Raises :class:`DtypeError` for a name outside ``DTYPES``."""
    try:
        return DTYPES[dtype]
    except (KeyError, TypeError):
        raise DtypeError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}") from None


@dataclass(frozen=True, slots=True)
class Inline:
    """Bytes that travel inside the message: little-endian, C-contiguous."""

    data: bytes | bytearray | memoryview

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

    def __repr__(self) -> str:
        return f"Inline({self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class ShmHandle:
    """Names ``nbytes`` bytes at ``offset`` of a file in shared memory; SMG's four fields.

    The name is checked where the file is opened, not here, so that any handle a peer sends can be reported.
    """

    name: str
    offset: int
    nbytes: int
    owner_id: str = ""

    @property
    def is_lease(self) -> bool:
        """Whether it is meant to name a lease of an arena and not a file; whether it does is found out by claiming
        it."""
        return self.name.startswith(LEASE_PREFIX)

    def __post_init__(self) -> None:
        for field in ("offset", "nbytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or not 0 <= value <= _U64_MAX:
                raise PayloadError(f"ShmHandle {self.name!r}: {field} is {value!r}, want 0 to {_U64_MAX}")


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor under way: torch's dtype name without the prefix, the shape, and the payload.

    The bytes are little-endian and C-contiguous in ``shape``. 0-d (``()``) and empty shapes are tensors like any
    other. Raises :class:`DtypeError` for a dtype outside ``DTYPES`` and :class:`PayloadError` when the
    payload's bytes are not shape x dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    payload: Inline | ShmHandle

    def __post_init__(self) -> None:
        shape = shape_of(self.shape)
        object.__setattr__(self, "shape", shape)
        if not isinstance(self.payload, (Inline, ShmHandle)):
            raise PayloadError(f"payload is {type(self.payload).__name__}, want Inline or ShmHandle")
        wanted = nbytes_of(self.dtype, shape)
        if self.payload.nbytes != wanted:
            raise PayloadError(
                f"{self.dtype} {list(shape)} takes {wanted} bytes, the payload has {self.payload.nbytes}"
                + (f" (segment {self.payload.name!r})" if isinstance(self.payload, ShmHandle) else " (inline)")
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor: elements times item size."""
        return self.payload.nbytes

    @property
    def path(self) -> str:
        """``"inline"``, ``"segment"`` or ``"lease"``: the word for this payload in metrics and tables."""
        payload = self.payload
        if isinstance(payload, Inline):
            return "inline"
        return "lease" if payload.name.startswith(LEASE_PREFIX) else "segment"


def shape_of(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of ints. Raises :class:`PayloadError` for an invalid shape."""
    try:
        found = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise PayloadError(f"shape {shape!r} is not a sequence of integers") from None
    if any(n < 0 for n in found):
        raise PayloadError(f"shape {list(found)} has a negative dimension")
    return found


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a C-contiguous tensor. Raises :class:`DtypeError`."""
    return math.prod(shape) * itemsize_of(dtype)
