"""Who of a group reads which bytes: pure functions of sizes, dtypes, payload kinds, reachability and group size.

All tensors of a receive lie in one packed buffer of bytes, the same on every rank, so mixed dtypes go through one
collective. The buffer is cut into *sections*; each has one strategy:

    each        every rank reads all of it
    broadcast   one rank reads all of it and broadcasts it
    scatter     rank r reads the r-th of equal shares, and the shares are gathered in place

Tensors that some rank cannot open are in sections of their own, one for each rank that reads them for the others.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmcopy.config import parse_min_bytes
from mmcopy.errors import ConfigError
from mmcopy.receive.plan import ALIGN_BYTES

__all__ = [
    "GroupPlan",
    "ItemFacts",
    "ParallelOptions",
    "Section",
    "Strategy",
    "capacity_bytes",
    "choose_strategy",
    "first_unreached",
    "plan_group",
]


class Strategy(enum.StrEnum):
    """How a section of a receive gets to every rank of a group."""

    EACH = "each"
    """Every rank reads all bytes; no collective."""
    BROADCAST = "broadcast"
    """One rank reads all bytes straight into its destination; one broadcast."""
    SCATTER = "scatter"
    """Every rank reads one share over its own link; one gather of the shares, in place."""


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """What a group's receives are decided by. The same on every rank: a difference is a mismatch error.

    ``strategy`` forces one (a name or a :class:`Strategy`); None decides by size. The two thresholds are for the whole
    group and are divided by its size: with 256 MiB two ranks broadcast from 128 MiB on, four from 64 MiB.
    The first is TokenSpeed's (break-even points near those measured on B200s by its authors); the second is set from a
    model, not from a measurement (benches/RESULTS.md). ``mmcopy bench tp`` measures both on the present group.
    """

    strategy: Strategy | str | None = None
    broadcast_min_bytes: int = 256 << 20
    scatter_min_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.strategy is not None:
            try:
                object.__setattr__(self, "strategy", Strategy(self.strategy))
            except ValueError:
                allowed = ", ".join(Strategy)
                raise ConfigError(f"ParallelOptions.strategy is {self.strategy!r}, want one of {allowed}") from None
        for name in ("broadcast_min_bytes", "scatter_min_bytes"):
            nbytes = parse_min_bytes(getattr(self, name), setting=f"ParallelOptions.{name}")
            object.__setattr__(self, name, nbytes)


class ItemFacts(NamedTuple):
    """What a decision needs to know of one tensor."""

    nbytes: int
    dtype: str
    is_shared: bool
    """In shared memory, not in the message."""


class Section(NamedTuple):
    """Bytes ``start`` to ``stop`` of the packed buffer. ``source`` is the rank that reads a broadcast."""

    strategy: Strategy
    start: int
    stop: int
    source: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The whole of one receive on a group. ``starts[n]`` is where tensor ``n`` begins in the buffer of ``nbytes``."""

    size: int
    starts: tuple[int, ...]
    nbytes: int
    sections: tuple[Section, ...]

    @property
    def has_collectives(self) -> bool:
        """Whether any bytes go from rank to rank."""
        return any(section.strategy is not Strategy.EACH for section in self.sections)

    @property
    def label(self) -> str:
        """The strategy's name, ``"mixed"`` where several sections differ in it."""
        used = {section.strategy.value for section in self.sections}
        return Strategy.EACH.value if not used else used.pop() if len(used) == 1 else "mixed"

    def share(self, section: Section, rank: int) -> tuple[int, int]:
        """Start and stop of a rank's share of a scattered section; all shares are equally long."""
        nbytes = (section.stop - section.start) // self.size
        return section.start + rank * nbytes, section.start + (rank + 1) * nbytes

    def windows(self, rank: int) -> list[tuple[int, int]]:
        """Start and stop of the bytes that ``rank`` reads, in order; windows that touch are one."""
        found: list[tuple[int, int]] = []
        for section in self.sections:
            if section.strategy is Strategy.BROADCAST and section.source != rank:
                continue
            is_shared = section.strategy is Strategy.SCATTER
            start, stop = self.share(section, rank) if is_shared else (section.start, section.stop)
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return found


def choose_strategy(items: Sequence[ItemFacts], *, size: int, options: ParallelOptions) -> Strategy:
    """The strategy for tensors that every one of ``size`` ranks can read.

    Scatter from ``scatter_min_bytes / size`` bytes in shared memory on, of any dtypes. Broadcast from
    ``broadcast_min_bytes / size`` on, when every tensor is in shared memory and all are of one dtype (TokenSpeed's own
    conditions). Otherwise each.
    """
    if options.strategy is not None:
        return Strategy(options.strategy)
    if size < 2:
        return Strategy.EACH
    shared_bytes = sum(item.nbytes for item in items if item.is_shared)
    if shared_bytes and shared_bytes >= options.scatter_min_bytes // size:
        return Strategy.SCATTER
    is_uniform = all(item.is_shared for item in items) and len({item.dtype for item in items}) == 1
    if is_uniform and shared_bytes >= options.broadcast_min_bytes // size:
        return Strategy.BROADCAST
    return Strategy.EACH


def capacity_bytes(items: Sequence[ItemFacts], *, size: int) -> int:
    """Bytes that the packed buffer takes at most, whatever is reachable from where."""
    return sum(_aligned(item.nbytes) for item in items) + ALIGN_BYTES * size


def first_unreached(reachable: Sequence[Sequence[bool]]) -> int | None:
    """The first tensor that no rank can read, if there is one. ``reachable[rank][tensor]``."""
    return next((n for n, column in enumerate(zip(*reachable, strict=True)) if not any(column)), None)


@functools.lru_cache(maxsize=32)
def plan_group(
    items: tuple[ItemFacts, ...],
    *,
    size: int,
    options: ParallelOptions,
    reachable: tuple[tuple[bool, ...], ...] | None = None,
) -> GroupPlan:
    """Sections, and where each tensor lies, for ``size`` ranks.

    ``reachable[rank][tensor]`` says which rank can read which tensor; None: every rank all. What all can read goes by
    :func:`choose_strategy`. The rest is broadcast by the lowest rank that can read it, also when ``options`` force
    another strategy. Every tensor must be readable somewhere (:func:`first_unreached`).
    """
    everywhere = [n for n in range(len(items)) if reachable is None or all(row[n] for row in reachable)]
    here = set(everywhere)
    strategy = choose_strategy([items[n] for n in everywhere], size=size, options=options)
    by_source: dict[int, list[int]] = {}
    for n in range(len(items)):
        if n not in here:
            assert reachable is not None
            by_source.setdefault(next(rank for rank, row in enumerate(reachable) if row[n]), []).append(n)
    if strategy is Strategy.BROADCAST and everywhere:  # in one collective with what rank 0 sends anyway
        by_source[0] = sorted(everywhere + by_source.get(0, []))
        everywhere = []
    starts = [0] * len(items)
    sections: list[Section] = []
    end = 0

    def place(members: list[int], how: Strategy, source: int) -> None:
        nonlocal end
        first = end
        for n in members:
            starts[n] = end
            end += _aligned(items[n].nbytes)
        if how is Strategy.SCATTER:
            share = _aligned(-(-(end - first) // size))
            end = first + share * size
        if end > first:
            sections.append(Section(how, first, end, source))

    place(everywhere, strategy, 0)
    for source in sorted(by_source):
        place(by_source[source], Strategy.BROADCAST, source)
    return GroupPlan(size, tuple(starts), end, tuple(sections))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
