"""Which attention a tower runs, and whether torch would take cuDNN's for it.

cuDNN's attention runs by a plan, which torch 2.11 makes for each new shape and keeps for each thread, since plans are
not promised to be safe across threads. Making one took 45 to 75 ms on an H200, most of what a size costs that was not
warmed (benches/RESULTS.md). So whether torch takes it decides what a prewarm can cover. Torch is asked, since the
answer hangs on the GPU, cuDNN's version, the dtype, the head size and switches of the process.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mmcopy.encoders import Tower

if TYPE_CHECKING:
    import torch

__all__ = ["ask_torch", "attention_of", "head_size", "takes_cudnn"]

_WIDTHS = ("embed_dim", "d_model", "hidden_size")
"""embed_dim before hidden_size: of Qwen2-VL's tower the latter is the language model's width."""

_HEADS = ("num_heads", "num_attention_heads", "encoder_attention_heads")

_LENGTH = 128
"""Tokens of the question: older versions of cuDNN refuse few of them, and numbers that 64 does not divide."""


def attention_of(tower: Tower) -> str:
    """The attention that a transformers tower was set to, such as "sdpa"; "" for a module of another kind."""
    config = getattr(tower.module, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "")


def takes_cudnn(tower: Tower, *, dtype: str, device: torch.device) -> bool | None:
    """Whether ``tower`` would run cuDNN's attention in ``dtype`` on ``device`` now; None where that is not known.

    Does not wait for the device; takes some KiB of it for a moment.
    """
    if device.type != "cuda":
        return False
    attention = attention_of(tower)
    if "sdpa" not in attention:
        own = attention == "eager" or "flash" in attention or "flex" in attention
        return False if own else None
    size = head_size(getattr(tower.module, "config", None))
    return None if size is None else ask_torch(size, dtype=dtype, device=device)


def head_size(config: Any) -> int | None:
    """Of a tower's own config: what each head of its attention is wide; None where the config does not tell."""
    size = getattr(config, "head_dim", None)
    if isinstance(size, int):
        return size
    width = next((each for each in (getattr(config, name, None) for name in _WIDTHS) if isinstance(each, int)), 0)
    heads = next((each for each in (getattr(config, name, None) for name in _HEADS) if isinstance(each, int)), 0)
    return width // heads if heads and width >= heads else None


def ask_torch(head_size: int, *, dtype: str, device: torch.device) -> bool | None:
    """Whether torch's ``scaled_dot_product_attention`` would take cuDNN's, asked without a mask.

    The function that it asks itself is private: there is no public one that takes the order of preference into account
    (``torch.backends.cuda.can_use_cudnn_attention`` says what is possible, not what is taken). None where a version of
    torch has it no more, or it refuses.
    """
    import torch
    from torch.nn.attention import SDPBackend

    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    # torch looks at the properties of the current device, not of the tensors'.
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with torch.inference_mode(), current:
            query = torch.empty((1, 2, _LENGTH, head_size), dtype=getattr(torch, dtype), device=device)
            return int(choose(query, query, query)) == int(SDPBackend.CUDNN_ATTENTION.value)
    except (RuntimeError, TypeError):  # no room on the device, no backend at all, other arguments
        return None
