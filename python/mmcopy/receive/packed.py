"""Tensors as views into one buffer of bytes that they share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sources import Described

if TYPE_CHECKING:
    import torch

__all__ = ["views_into"]


def views_into(base: torch.Tensor, starts: Sequence[int], described: Sequence[Described]) -> list[torch.Tensor]:
    """One tensor each, of its dtype and shape, that begins at ``starts[n]`` of the flat uint8 ``base``.

    ``base`` is a whole number of every dtype's elements, and ``starts`` are aligned to them. Equal tensors that follow
    each other are cut off by one call: of 256 a third of the time that one call each takes.
    """
    import torch

    typed: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    while (n := len(tensors)) < len(described):
        data = described[n].data
        flat = typed.get(data.dtype)
        if flat is None:
            flat = typed[data.dtype] = base.view(getattr(torch, data.dtype))
        start = starts[n] // flat.element_size()
        count = _count_alike(starts, described, n)
        if count > 1:
            rows, *rest = data.shape
            whole = flat.as_strided((count * rows, *rest), strides_of(data.shape), start)
            tensors += torch.unsafe_split(whole, rows)  # the caller's own: torch need not know them as views
        else:
            tensors.append(flat.as_strided(data.shape, strides_of(data.shape), start))
    return tensors


def _count_alike(starts: Sequence[int], described: Sequence[Described], first: int) -> int:
    """How many tensors from ``first`` on are of one dtype and shape and have nothing between them; 1 where a tensor
    has no rows to be cut by."""
    data = described[first].data
    if not data.nbytes or not data.shape:
        return 1
    for n in range(first + 1, len(described)):
        other = described[n].data
        if starts[n] - starts[n - 1] != data.nbytes or other.shape != data.shape or other.dtype != data.dtype:
            return n - first
    return len(described) - first


@functools.lru_cache(maxsize=256)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor, in elements; torch's own rule for empty dimensions."""
    return tuple(itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), lambda a, b: a * b, initial=1))[::-1][
        : len(shape)
    ]
