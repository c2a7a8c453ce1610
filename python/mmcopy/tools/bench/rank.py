"""What the ranks of ``mmcopy bench tp`` need to find one another, and to tell what they found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .breakeven import BreakEven
from .plan import Effort
from .tp import TpResult, TpRow, TpSpec

__all__ = ["default_group", "result_from", "spec_from"]


@contextmanager
def default_group(device: str, *, local_rank: int, **options: Any) -> Iterator[None]:
    """torch.distributed's default group, with gloo for host memory and, for ``cuda``, NCCL for that rank's GPU."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spec_from(text: str) -> TpSpec:
    """A spec that was written as JSON."""
    given = json.loads(text)
    return TpSpec(**{**given, "sizes": tuple(given["sizes"]), "effort": Effort(**given["effort"])})


def result_from(text: str) -> TpResult:
    """A result that was written as JSON."""
    given = json.loads(text)
    rows = tuple(TpRow(**row) for row in given["rows"])
    return TpResult(given["header"], given["ranks"], rows, BreakEven(**given["break_even"]), given["payload"])
