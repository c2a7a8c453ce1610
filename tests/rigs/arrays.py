"""Data to send: reproducible random bytes, and the sizes that tests count in."""

from __future__ import annotations

from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20


def random_bytes(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``n`` random bytes, the same for the same ``n`` and ``seed``."""
    return np.random.default_rng([n, seed]).integers(0, 256, n, dtype=np.uint8)


def resize(buffer: bytearray) -> None:
    """Grow ``buffer`` and shrink it again, which raises BufferError while its memory is exported."""
    buffer.append(0)
    del buffer[-1]
