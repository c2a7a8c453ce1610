"""The bytes of one case in the sender's memory, and the check that they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmcopy.errors import MmcopyError

from .place import ByteArray, Place
from .plan import Case

__all__ = ["BytesDifferError", "Load"]

BLOCK_BYTES = 16 << 20


class BytesDifferError(MmcopyError):
    """A path delivered other bytes than were sent, so its times mean nothing."""


class Load:
    """Random bytes of a whole case in one block of host memory (page-locked for a GPU), and its tensors in it."""

    def __init__(self, case: Case, place: Place, *, seed: int = 0) -> None:
        self.case = case
        self.place = place
        self.host: Any = place.host(case.total_bytes)
        self._bytes: ByteArray = place.to_numpy(self.host)
        random = np.random.default_rng(seed)
        for start in range(0, case.total_bytes, BLOCK_BYTES):
            block = self._bytes[start : start + BLOCK_BYTES]
            block[:] = random.integers(0, 256, len(block), np.uint8)

    @property
    def parts(self) -> list[ByteArray]:
        """One array per tensor, which shares the load's memory."""
        step = self.case.nbytes
        return [self._bytes[start : start + step] for start in range(0, self.case.total_bytes, step)]

    def change(self) -> None:
        """Change every byte, so that memory with an earlier delivery does not pass the check."""
        np.add(self._bytes, 1, out=self._bytes)

    def check(self, arrays: Sequence[Any], *, path: str) -> None:
        """Raise :class:`BytesDifferError` unless ``arrays``, one after the other, are the bytes of this load."""
        start = 0
        for number, array in enumerate(arrays):
            found = self.place.to_numpy(array).reshape(-1)
            wanted = self._bytes[start : start + len(found)]
            if len(wanted) != len(found):
                break
            if not _equal(found, wanted):
                different = found != wanted
                first = int(different.argmax())
                raise BytesDifferError(
                    f"{path}, {self.case.label}: {int(different.sum())} of {len(found)} bytes of tensor {number} "
                    f"differ; the first is byte {first}, found {found[first]}, want {wanted[first]}"
                )
            start += len(found)
        if start != self.case.total_bytes or sum(len(array) for array in arrays) != start:
            total = sum(len(array) for array in arrays)
            raise BytesDifferError(
                f"{path}, {self.case.label}: {total} bytes arrived, {self.case.total_bytes} were sent"
            )


def _equal(a: ByteArray, b: ByteArray) -> bool:
    """Whether two arrays of one length are equal, block by block to keep the comparison's memory small."""
    starts = range(0, len(a), BLOCK_BYTES)
    return all(np.array_equal(a[start : start + BLOCK_BYTES], b[start : start + BLOCK_BYTES]) for start in starts)
