"""Whether an encoder is compiled, and how many graphs torch.compile made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmcopy.encoders import Tower

if TYPE_CHECKING:
    from torch import nn

__all__ = ["count_graphs", "is_compiled", "limit_was_hit"]


def count_graphs() -> int:
    """Graphs that torch.compile made in this process so far; each is a compilation."""
    import torch._dynamo.utils as dynamo

    return int(dynamo.counters["stats"]["unique_graphs"])


def limit_was_hit() -> int:
    """How often a function was given up after ``recompile_limit`` compilations: it then runs eagerly."""
    import torch._dynamo.utils as dynamo

    return sum(
        count
        for reasons in list(dynamo.counters.values())
        for reason, count in list(reasons.items())
        if "recompile limit" in str(reason).lower()
    )


def is_compiled(model: nn.Module, tower: Tower) -> bool:
    """Whether torch.compile wraps the tower, or any part of it, in place or by ``torch.compile(module)``."""
    inside = {id(module) for module in tower.module.modules()}
    for module in model.modules():
        original: Any = getattr(module, "_orig_mod", None)
        if original is not None and id(original) in inside:
            return True
        if id(module) in inside and getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False
