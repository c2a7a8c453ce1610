"""Bytes of items that their owner cannot open, from a rank that can: one message per pair of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmcopy.errors import SegmentNotFoundError
from mmcopy.receive.group import ParallelOptions
from mmcopy.receive.group.agreement import agree
from mmcopy.receive.group.digest import READY_STEP, Digest, Status, hash_items, hash_options, raise_failure, text_of
from mmcopy.receive.group.group import RankGroup
from mmcopy.receive.group.owned import Transfer, plan_transfers

from .handle import ShmTensorHandle

if TYPE_CHECKING:
    import torch

__all__ = ["route"]


def route(group: RankGroup, handles: Sequence[ShmTensorHandle], owners: Sequence[int], *, timeout_s: float) -> None:
    """Give each handle's bytes to its owner, a rank of the group, where that rank cannot open the segment.

    Every rank calls this with the same arguments. Blocks until all is there. One rank's error is that of all.
    """
    deadline = time.monotonic() + timeout_s
    reachable = [[handle.is_reachable_from(rank) for handle in handles] for rank in group.global_ranks]
    for n, handle in enumerate(handles):
        if not any(row[n] for row in reachable):
            raise SegmentNotFoundError(
                f"segment {handle.shm_name!r} is on rank {handle.source_rank}, "
                f"which is none of the group's {list(group.global_ranks)}"
            )
    transfers = plan_transfers([handle.nbytes() for handle in handles], owners, reachable)
    if not transfers:
        return
    buffers: dict[int, torch.Tensor] = {}
    own: Exception | None = None
    with group.turn(deadline):
        items = [handle.data for handle in handles]
        ready = Digest(
            group.line.sequence,
            READY_STEP,
            Status.OK,
            len(items),
            sum(item.nbytes for item in items),
            hash_items(items, "route", tuple(owners)),
            hash_options(ParallelOptions()),
        )
        try:
            _fill(group.rank, transfers, handles, buffers)
        except Exception as error:
            own = error.with_traceback(None)  # which refers to this frame
            ready = ready.having(Status.FAILED, text_of(error))
        raise_failure(agree(group, ready, deadline), own)
        group.transfer(
            [(buffers[n], each.owner) for n, each in enumerate(transfers) if each.source == group.rank],
            [(buffers[n], each.source) for n, each in enumerate(transfers) if each.owner == group.rank],
            deadline,
        )
    for n, transfer in enumerate(transfers):
        if transfer.owner == group.rank:
            for item, start in zip(transfer.items, transfer.starts, strict=True):
                handles[item].set_remote(buffers[n][start : start + handles[item].nbytes()])


def _fill(
    rank: int, transfers: Sequence[Transfer], handles: Sequence[ShmTensorHandle], buffers: dict[int, torch.Tensor]
) -> None:
    """A buffer for each of this rank's messages: filled for one that it sends, pinned for one that it gets."""
    import torch

    for n, transfer in enumerate(transfers):
        if rank in (transfer.source, transfer.owner):
            is_pinned = rank == transfer.owner and torch.cuda.is_available()
            buffers[n] = torch.empty(transfer.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        if rank == transfer.source:
            for item, start in zip(transfer.items, transfer.starts, strict=True):
                handles[item].copy_bytes_into(buffers[n][start : start + handles[item].nbytes()])
