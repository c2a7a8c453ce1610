"""Ranks tell one another where they are and what they have, before any of them acts.

A rank that gave a receive up, because another was late, goes on to the next one; the late rank still comes with the
old. Their exchanges meet all the same, since all have one size. Each exchange gives every rank the same blocks, so all
draw the same conclusion: who is behind the foremost has been given up, and the others exchange once more, until all
are in step. One slow request costs that request, not the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmcopy.errors import MmcopyTimeoutError

from .digest import BITS_A_BLOCK, Digest, Status, check_agreement, pack_bits, unpack_bits
from .group import RankGroup

__all__ = ["agree", "gather_reachability"]


def agree(group: RankGroup, mine: Digest, deadline: float) -> list[Digest]:
    """Every rank's digest of this exchange, in the order of ranks, which have all been given the same.

    Blocks until every rank is here. Raises :class:`ParallelMismatchError` on all alike, :class:`MmcopyTimeoutError`
    (``what`` is "peer") when a rank is not here in time or has given this receive up, and :class:`PeerLostError`.
    """
    if group.size == 1:
        return [mine]
    while True:
        digests = [Digest.decode(block) for block in group.exchange(mine.encode(), deadline)]
        foremost = max(digest.position for digest in digests)
        if mine.position < foremost:
            rank = next(n for n, digest in enumerate(digests) if digest.position == foremost)
            raise MmcopyTimeoutError(
                "peer",
                f"rank {group.rank} of {group.size} comes too late with receive {mine.sequence} of the group: "
                f"rank {rank} is at receive {foremost[0]} and has given it up",
            )
        if all(digest.position == foremost for digest in digests):
            check_agreement(digests)
            return digests


def gather_reachability(
    group: RankGroup, digests: Sequence[Digest], bits: Sequence[bool], deadline: float
) -> tuple[tuple[bool, ...], ...] | None:
    """``reachable[rank][tensor]`` from the digests of the first exchange; None: every rank reaches all.

    The bits of up to 7,600 tensors are in the first exchange already; more take further ones. ``bits`` are this rank's.
    """
    if all(digest.status is Status.OK for digest in digests):
        return None
    by_rank = [[digest] for digest in digests]
    for part in range(1, -(-len(bits) // BITS_A_BLOCK)):
        mine = replace(digests[group.rank], step=part, body=pack_bits(bits, part))
        for slices, digest in zip(by_rank, agree(group, mine, deadline), strict=True):
            slices.append(digest)
    return tuple(unpack_bits(slices, len(bits)) for slices in by_rank)
