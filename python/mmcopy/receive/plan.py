"""What a receive copies, in which chunks: pure functions of sizes.

Bytes go source -> staging slot -> destination. A *piece* is a run of one source's bytes in one slot; a *transfer* is
one host-to-device copy out of a slot. Chunk ``i`` is one filling of a slot.

Plans are kept for the sizes that were seen last: a model's requests repeat them, and planning 16 MiB takes 50 us.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .request import Described

__all__ = [
    "ALIGN_BYTES",
    "Part",
    "Piece",
    "ReceivePlan",
    "Transfer",
    "chunk_bytes_for",
    "layout",
    "parts_in",
    "plan_packed",
    "plan_scattered",
    "plan_windows",
    "views_into",
]

ALIGN_BYTES = 256
"""Where tensors begin in a destination they share: CUDA's own allocations are aligned so, and kernels rely on it."""

MIN_CHUNK_BYTES = 256 << 10
"""Below this a chunk's fixed costs (a hand-over, a copy call, an event) outweigh what the overlap gains."""

CHUNKS_PER_THREAD = 4
"""So that the first H2D starts early and a slow thread holds up a quarter of its share at most."""


class Piece(NamedTuple):
    """``nbytes`` of source ``source`` from ``source_start`` go to ``slot_start`` of chunk ``chunk``'s slot."""

    chunk: int
    source: int
    source_start: int
    slot_start: int
    nbytes: int


class Transfer(NamedTuple):
    """``nbytes`` from ``slot_start`` of a chunk's slot go to ``dest_start`` of destination ``dest``."""

    dest: int
    dest_start: int
    slot_start: int
    nbytes: int


class Part(NamedTuple):
    """``nbytes`` of source ``source`` from ``source_start`` belong at ``dest_start``, which is in window ``window``."""

    source: int
    window: int
    source_start: int
    dest_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """The whole of one receive. ``transfers[i]`` are the copies that chunk ``i`` makes possible.

    ``starts[n]`` is where tensor ``n`` begins in the shared destination of ``dest_nbytes``; with destinations of their
    own all begin at 0 and ``dest_nbytes`` is 0.
    """

    starts: tuple[int, ...]
    dest_nbytes: int
    pieces: tuple[Piece, ...]
    transfers: tuple[tuple[Transfer, ...], ...]

    @property
    def num_chunks(self) -> int:
        return len(self.transfers)


def chunk_bytes_for(total_nbytes: int, *, num_threads: int, slot_bytes: int) -> int:
    """Bytes a chunk for a receive of ``total_nbytes``: four chunks a thread, a power of two, 256 KiB to one slot.

    The best sizes measured on an H200 with 8 threads: 256-512 KiB up to 16 MiB, 1-2 MiB at 64 MiB, 2-4 MiB above.
    """
    share = max(1, total_nbytes // (num_threads * CHUNKS_PER_THREAD))
    power = 1 << (share - 1).bit_length()
    return min(slot_bytes, max(MIN_CHUNK_BYTES, power))


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors side by side begin, and the bytes of all, whole :data:`ALIGN_BYTES`. A sender lays the leases
    of one request so, too."""
    starts, end = [], 0
    for nbytes in sizes:
        starts.append(end)
        end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return starts, end


@functools.lru_cache(maxsize=32)
def plan_packed(sizes: tuple[int, ...], *, chunk_bytes: int) -> ReceivePlan:
    """All tensors side by side in one destination; each chunk is one transfer, however many tensors it holds."""
    starts: list[int] = []
    pieces: list[Piece] = []
    end = 0
    for source, nbytes in enumerate(sizes):
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        starts.append(start)
        done = 0
        while done < nbytes:
            chunk, slot_start = divmod(start + done, chunk_bytes)
            run = min(nbytes - done, chunk_bytes - slot_start)
            pieces.append(Piece(chunk, source, done, slot_start, run))
            done += run
        end = start + nbytes if nbytes else end
    transfers = tuple((Transfer(0, first, 0, min(chunk_bytes, end - first)),) for first in range(0, end, chunk_bytes))
    return ReceivePlan(tuple(starts), end, tuple(pieces), transfers)


@functools.lru_cache(maxsize=32)
def plan_scattered(sizes: tuple[int, ...], *, chunk_bytes: int) -> ReceivePlan:
    """Each tensor into a destination of its own; small ones share a slot, with one transfer each."""
    pieces: list[Piece] = []
    transfers: list[list[Transfer]] = []
    used = chunk_bytes  # the slot before the first is full
    for source, nbytes in enumerate(sizes):
        done = 0
        while done < nbytes:
            used = -(-used // ALIGN_BYTES) * ALIGN_BYTES
            if used >= chunk_bytes:
                transfers.append([])
                used = 0
            run = min(nbytes - done, chunk_bytes - used)
            pieces.append(Piece(len(transfers) - 1, source, done, used, run))
            transfers[-1].append(Transfer(source, done, used, run))
            done += run
            used += run
    return ReceivePlan((0,) * len(sizes), 0, tuple(pieces), tuple(map(tuple, transfers)))


@functools.lru_cache(maxsize=32)
def parts_in(
    sizes: tuple[int, ...], starts: tuple[int, ...], *, windows: tuple[tuple[int, int], ...]
) -> tuple[Part, ...]:
    """What of each tensor lies in the windows of a packed destination, in which tensor ``n`` begins at ``starts[n]``.

    A window is a start and a stop; they are in order, and so are the parts. A window can cut a tensor, and a tensor can
    have a part in several windows.
    """
    order = sorted(range(len(sizes)), key=starts.__getitem__)
    return tuple(
        Part(n, window, at - starts[n], at, stop - at)
        for window, (first, last) in enumerate(windows)
        for n in order
        if (at := max(starts[n], first)) < (stop := min(starts[n] + sizes[n], last))
    )


@functools.lru_cache(maxsize=32)
def plan_windows(
    sizes: tuple[int, ...], starts: tuple[int, ...], *, windows: tuple[tuple[int, int], ...], chunk_bytes: int
) -> ReceivePlan:
    """:func:`parts_in`, staged: chunks of at most ``chunk_bytes`` of one window each.

    ``starts`` are whole :data:`ALIGN_BYTES`. Less than that between two tensors is nobody's, and a transfer may put
    anything there; where there is more, something else may lie, and a transfer ends before it.
    """
    pieces: list[Piece] = []
    transfers: list[list[Transfer]] = []
    current = (-1, -1)  # window and, in chunks from its start, the place that the last chunk is for
    for source, window, start, dest_start, nbytes in parts_in(sizes, starts, windows=windows):
        done = 0
        while done < nbytes:
            at = dest_start + done
            place, slot_start = divmod(at - windows[window][0], chunk_bytes)
            if (window, place) != current:
                current = window, place
                transfers.append([])
            run = min(nbytes - done, chunk_bytes - slot_start)
            pieces.append(Piece(len(transfers) - 1, source, start + done, slot_start, run))
            last = transfers[-1][-1] if transfers[-1] else None
            if last is not None and slot_start - last.slot_start - last.nbytes < ALIGN_BYTES:
                transfers[-1][-1] = last._replace(nbytes=slot_start + run - last.slot_start)
            else:
                transfers[-1].append(Transfer(0, at, slot_start, run))
            done += run
    end = windows[-1][1] if windows else 0
    return ReceivePlan(starts, end, tuple(pieces), tuple(map(tuple, transfers)))


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
