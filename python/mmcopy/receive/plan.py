"""Where a request's bytes go and in which chunks: pure functions of sizes.

An *extent* is a byte range of one tensor and where it goes. Extents that the device cannot read in place are staged:
they go source -> staging slot -> destination, in *chunks*. A chunk is one filling of one slot.

Layouts and plans are kept for the sizes that were seen last: a model's requests repeat them, and planning 16 MiB takes
50 us. A layout is compared by identity, so that looking up its plan does not compare sizes again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmcopy._native import ChunkTable, Extents
from mmcopy.tensors import TensorData

if TYPE_CHECKING:
    import torch

__all__ = [
    "ALIGN_BYTES",
    "CopyPlan",
    "Extent",
    "Layout",
    "SlotCopy",
    "SlotFill",
    "Windows",
    "chunk_bytes_for",
    "extents",
    "native_extents",
    "pack",
    "place",
    "plan_chunks",
    "plan_copies",
    "scatter",
    "strides_of",
    "views_into",
]

ALIGN_BYTES = 256
"""Alignment of tensors in a packed buffer: CUDA aligns its own allocations so, and kernels rely on it."""

MIN_CHUNK_BYTES = 256 << 10
"""Below this a chunk's fixed costs (a hand-over, a copy call, an event) outweigh what the overlap gains."""

CHUNKS_PER_THREAD = 4
"""So that the first H2D starts early and a slow thread holds up a quarter of its part at most."""

Windows: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a packed buffer, each a start and a stop in bytes, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each tensor goes: ``sizes[n]`` bytes, from ``starts[n]`` of a packed buffer of ``nbytes`` on.

    With ``is_packed`` False each tensor has a base of its own instead, and all start at 0.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int
    is_packed: bool


class Extent(NamedTuple):
    """``nbytes`` of tensor ``source`` from ``source_start`` go to ``dest_start`` of ``base``, in ``window``."""

    source: int
    base: int
    window: int
    source_start: int
    dest_start: int
    nbytes: int


class SlotFill(NamedTuple):
    """``nbytes`` of source ``source`` from ``source_start`` go to ``slot_start`` of chunk ``chunk``'s slot."""

    chunk: int
    source: int
    source_start: int
    slot_start: int
    nbytes: int


class SlotCopy(NamedTuple):
    """``nbytes`` from ``slot_start`` of a chunk's slot go to ``dest_start`` of base ``base``."""

    base: int
    dest_start: int
    slot_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How the extents of one request get to the device.

    ``in_place`` are copied from where they are. The others are staged: ``staged`` are their tensors, which ``fills``
    refer to by their index in it, and ``copies[i]`` are the device copies that chunk ``i`` makes possible. ``direct``
    and ``table`` are ``in_place`` and ``fills`` for native calls.
    """

    in_place: tuple[Extent, ...]
    staged: tuple[int, ...]
    fills: tuple[SlotFill, ...]
    copies: tuple[tuple[SlotCopy, ...], ...]
    direct: Extents = field(init=False, compare=False, repr=False)
    table: ChunkTable = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "direct", Extents(self.in_place))
        object.__setattr__(self, "table", ChunkTable(self.staged, self.fills))

    @property
    def num_chunks(self) -> int:
        return len(self.copies)


def chunk_bytes_for(total_nbytes: int, *, num_threads: int, slot_bytes: int) -> int:
    """The chunk size for ``total_nbytes``: four chunks per thread, a power of two, from 256 KiB to one slot.

    The best sizes measured on an H200 with 8 threads: 256-512 KiB up to 16 MiB, 1-2 MiB at 64 MiB, 2-4 MiB above.
    """
    per_chunk = max(1, total_nbytes // (num_threads * CHUNKS_PER_THREAD))
    power = 1 << (per_chunk - 1).bit_length()
    return min(slot_bytes, max(MIN_CHUNK_BYTES, power))


@functools.lru_cache(maxsize=32)
def pack(sizes: tuple[int, ...], first: tuple[int, ...] = ()) -> Layout:
    """All tensors side by side in one buffer, those with the indices ``first`` before the others.

    A sender lays the leases of one request side by side in the same way, so they stay one copy.
    """
    starts = [0] * len(sizes)
    end = 0
    before = frozenset(first)
    for n in itertools.chain(first, (n for n in range(len(sizes)) if n not in before)):
        starts[n] = end
        end += -(-sizes[n] // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(sizes, tuple(starts), end, True)


@functools.lru_cache(maxsize=32)
def scatter(sizes: tuple[int, ...]) -> Layout:
    """Each tensor at the start of a base of its own."""
    return Layout(sizes, (0,) * len(sizes), 0, False)


@functools.lru_cache(maxsize=32)
def place(sizes: tuple[int, ...], starts: tuple[int, ...]) -> Layout:
    """Tensors at given starts, whole :data:`ALIGN_BYTES`, of one buffer."""
    end = max((start + nbytes for start, nbytes in zip(starts, sizes, strict=True)), default=0)
    return Layout(sizes, starts, end, True)


@functools.lru_cache(maxsize=32)
def extents(layout: Layout, windows: Windows | None = None) -> tuple[Extent, ...]:
    """What of each tensor lies in the windows of a packed buffer, in their order; None: everything.

    A window can cut a tensor, and a tensor can have an extent in several windows.
    """
    sizes, starts = layout.sizes, layout.starts
    order = sorted(range(len(sizes)), key=starts.__getitem__)  # of equal starts, as scattered ones, the lowest first
    if windows is None:
        bases = itertools.repeat(0) if layout.is_packed else iter(order)
        return tuple(
            Extent(n, base, 0, 0, starts[n], sizes[n]) for n, base in zip(order, bases, strict=False) if sizes[n]
        )
    return tuple(
        Extent(n, 0, window, at - starts[n], at, stop - at)
        for window, (first, last) in enumerate(windows)
        for n in order
        if (at := max(starts[n], first)) < (stop := min(starts[n] + sizes[n], last))
    )


@functools.lru_cache(maxsize=32)
def native_extents(layout: Layout, windows: Windows | None = None) -> Extents:
    """:func:`extents` for native calls."""
    return Extents(extents(layout, windows))


@functools.lru_cache(maxsize=64)
def plan_copies(
    layout: Layout, windows: Windows | None, in_place: tuple[int, ...], *, num_threads: int, slot_bytes: int
) -> CopyPlan:
    """The copies that fill ``windows`` (None: everything), with the tensors ``in_place`` read where they are."""
    directly = frozenset(in_place)
    found = extents(layout, windows)
    staged = [extent for extent in found if extent.source not in directly]
    total = sum(extent.nbytes for extent in staged)
    chunk_bytes = chunk_bytes_for(total, num_threads=num_threads, slot_bytes=slot_bytes)
    direct = tuple(extent for extent in found if extent.source in directly)
    return CopyPlan(direct, *plan_chunks(staged, chunk_bytes=chunk_bytes))


def plan_chunks(
    staged: Sequence[Extent], *, chunk_bytes: int
) -> tuple[tuple[int, ...], tuple[SlotFill, ...], tuple[tuple[SlotCopy, ...], ...]]:
    """Extents in chunks: the tensors, what fills slots, and what empties them; see :class:`CopyPlan`.

    Neighbours of one window keep their distance in the slot and are one copy, which may write anything to the less than
    :data:`ALIGN_BYTES` between them. Where the distance is greater something else may lie there, and a copy ends.
    """
    sources: dict[int, int] = {}
    fills: list[SlotFill] = []
    copies: list[list[SlotCopy]] = []
    used = chunk_bytes  # the slot before the first is full
    before: Extent | None = None
    for extent in staged:
        source = sources.setdefault(extent.source, len(sources))
        gap = ALIGN_BYTES
        if before is not None and (before.base, before.window) == (extent.base, extent.window):
            gap = extent.dest_start - before.dest_start - before.nbytes
        used = used + gap if gap < ALIGN_BYTES else -(-used // ALIGN_BYTES) * ALIGN_BYTES
        done = 0
        while done < extent.nbytes:
            if used >= chunk_bytes:
                copies.append([])
                used = 0
            nbytes = min(extent.nbytes - done, chunk_bytes - used)
            fills.append(SlotFill(len(copies) - 1, source, extent.source_start + done, used, nbytes))
            last = copies[-1][-1] if copies[-1] else None
            if last is not None and done == 0 and gap < ALIGN_BYTES:
                copies[-1][-1] = last._replace(nbytes=used + nbytes - last.slot_start)
            else:
                copies[-1].append(SlotCopy(extent.base, extent.dest_start + done, used, nbytes))
            done += nbytes
            used += nbytes
        before = extent
    return tuple(sources), tuple(fills), tuple(map(tuple, copies))


def views_into(base: torch.Tensor, starts: Sequence[int], items: Sequence[TensorData]) -> list[torch.Tensor]:
    """One tensor each, of its dtype and shape, that begins at ``starts[n]`` of the flat uint8 ``base``.

    ``base`` is a whole number of every dtype's elements, and ``starts`` are aligned to them. Equal tensors that follow
    each other are cut off by one call: of 256 a third of the time that one call each takes.
    """
    import torch

    typed: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    while (n := len(tensors)) < len(items):
        data = items[n]
        flat = typed.get(data.dtype)
        if flat is None:
            flat = typed[data.dtype] = base.view(getattr(torch, data.dtype))
        start = starts[n] // flat.element_size()
        count = _count_alike(starts, items, n)
        if count > 1:
            rows, *rest = data.shape
            whole = flat.as_strided((count * rows, *rest), strides_of(data.shape), start)
            tensors += torch.unsafe_split(whole, rows)  # the caller's own: torch need not know them as views
        else:
            tensors.append(flat.as_strided(data.shape, strides_of(data.shape), start))
    return tensors


def _count_alike(starts: Sequence[int], items: Sequence[TensorData], first: int) -> int:
    """How many tensors from ``first`` on are of one dtype and shape and have nothing between them; 1 where a tensor
    has no rows to be cut by."""
    data = items[first]
    nbytes = data.payload.nbytes
    if not nbytes or not data.shape:
        return 1
    for n in range(first + 1, len(items)):
        other = items[n]
        if starts[n] - starts[n - 1] != nbytes or other.shape != data.shape or other.dtype != data.dtype:
            return n - first
    return len(items) - first


@functools.lru_cache(maxsize=256)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor, in elements; torch's own rule for empty dimensions."""
    return tuple(itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), lambda a, b: a * b, initial=1))[::-1][
        : len(shape)
    ]
