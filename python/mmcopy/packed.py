"""Tensors as views into one buffer of bytes that they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .sources import Described

if TYPE_CHECKING:
    import torch

__all__ = ["views_into"]


def views_into(base: torch.Tensor, starts: Sequence[int], described: Sequence[Described]) -> list[torch.Tensor]:
    """One tensor each, of its dtype and shape, that begins at ``starts[n]`` of the flat uint8 ``base``.

    ``base`` is a whole number of every dtype's elements, and ``starts`` are aligned to them.
    """
    import torch

    typed: dict[str, Any] = {}
    tensors = []
    for start, each in zip(starts, described, strict=True):
        data = each.data
        if data.dtype not in typed:
            typed[data.dtype] = base.view(getattr(torch, data.dtype))
        view = typed[data.dtype]
        tensors.append(view.as_strided(data.shape, _strides(data.shape), start // view.element_size()))
    return tensors


def _strides(shape: Sequence[int]) -> list[int]:
    """Strides of a C-contiguous tensor, in elements; torch's own rule for empty dimensions."""
    return [*itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), lambda a, b: a * b, initial=1)][::-1][
        : len(shape)
    ]
