"""Which rank can open what: asked before anything is removed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mmcopy.errors import SegmentNotFoundError
from mmcopy.receive.group import ParallelOptions
from mmcopy.receive.group.agreement import agree, gather_reachability
from mmcopy.receive.group.digest import Digest, Status, hash_items, hash_options, pack_bits, raise_failure, text_of
from mmcopy.receive.group.group import RankGroup
from mmcopy.receive.group.plan import first_unreached

from .handle import ShmTensorHandle

__all__ = ["discover", "prepare_shm_features"]


def prepare_shm_features(reqs: Sequence[Any], group: Any, *, timeout_s: float = 60.0) -> None:
    """Attach every ``feature_shm`` of ``reqs`` where it can be, and note on it which ranks of ``group`` could.

    ``reqs`` have ``multimodal_inputs.mm_items``, or None there. ``group``: a CPU process group, whose ranks all call
    this with the same requests; blocks until they have, ``timeout_s`` at most. Afterwards any rank may remove names.

    Raises, on every rank alike and with all released, :class:`SegmentNotFoundError` for a segment that no rank
    can open, :class:`ParallelMismatchError`, and the error of a bad segment.
    """
    handles = [
        item.feature_shm
        for inputs in (getattr(req, "multimodal_inputs", None) for req in reqs)
        if inputs is not None
        for item in inputs.mm_items
        if item.feature_shm is not None
    ]
    if handles:
        try:
            discover(handles, RankGroup(group, None, device_type="cpu"), timeout_s=timeout_s)
        except BaseException:
            for handle in handles:
                handle.release()
            raise


def discover(handles: Sequence[ShmTensorHandle], group: RankGroup, *, timeout_s: float) -> None:
    """:func:`prepare_shm_features` for handles. Nothing is removed here, not on an error either."""
    deadline = time.monotonic() + timeout_s
    items = [handle.data for handle in handles]
    bits: list[bool] = []
    own: Exception | None = None
    with group.turn(deadline):
        mine = Digest(
            group.line.sequence,
            0,
            Status.OK,
            len(items),
            sum(item.nbytes for item in items),
            hash_items(items, "prepare"),
            hash_options(ParallelOptions()),
        )
        try:
            bits = [handle.try_attach() for handle in handles]
        except Exception as error:
            own = error.with_traceback(None)  # which refers to this frame
            mine = mine.having(Status.FAILED, text_of(error))
        else:
            if not all(bits):
                mine = mine.having(Status.PARTIAL, pack_bits(bits, 0))
        digests = agree(group, mine, deadline)
        raise_failure(digests, own)
        reachable = gather_reachability(group, digests, bits, deadline)
    if reachable is not None and (n := first_unreached(reachable)) is not None:
        raise SegmentNotFoundError(
            f"segment {handles[n].shm_name!r} is not reachable from any of the {group.size} ranks of the group"
        )
    for n, handle in enumerate(handles):
        ranks = [rank for row, rank in zip(reachable or (), group.global_ranks, strict=False) if row[n]]
        handle.set_reachability(tuple(ranks) or group.global_ranks, group.size)
