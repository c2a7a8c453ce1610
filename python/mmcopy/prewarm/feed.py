"""Input descriptions as tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .inputs import Input, Noise

if TYPE_CHECKING:
    import torch

__all__ = ["SEED", "make_tensors"]

SEED = 20260101
"""The same pixels on every rank and in every run."""


def make_tensors(inputs: Mapping[str, Input], *, dtype: str, device: torch.device) -> dict[str, torch.Tensor]:
    """New tensors for ``inputs``: noise in ``dtype``, values as they are. On the caller's current stream; no wait."""
    import torch

    generator = torch.Generator(device).manual_seed(SEED)
    tensors = {}
    for name, each in inputs.items():
        if isinstance(each, Noise):
            draw = torch.rand if each.unit else torch.randn
            noise = draw(each.shape, generator=generator, device=device, dtype=getattr(torch, dtype))
            tensors[name] = noise
        else:
            tensors[name] = torch.from_numpy(each.array).to(device)
    return tensors
