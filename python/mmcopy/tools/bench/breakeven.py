"""From which size on which strategy of a group is fastest: pure functions of medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmcopy.receive.group import ParallelOptions
from mmcopy.tools.units import bytes_text

__all__ = ["NEVER", "BreakEven", "find_break_even"]

NEVER = 1 << 62
"""A threshold that no receive reaches."""

WORTH = 0.97
"""A strategy has to take 3 % less time than those before it, which need less communication."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Bytes of one receive from which a strategy is the fastest, there and at every larger size; None: at no size."""

    ranks: int
    broadcast_bytes: int | None
    scatter_bytes: int | None

    @property
    def options(self) -> ParallelOptions:
        """The thresholds, which are for the whole group."""
        return ParallelOptions(
            broadcast_min_bytes=self._threshold(self.broadcast_bytes),
            scatter_min_bytes=self._threshold(self.scatter_bytes),
        )

    @property
    def advice(self) -> str:
        """Two lines: what was measured, and the setting to use."""
        seen = ", ".join(
            f"{name} from {bytes_text(nbytes)} on" if nbytes is not None else f"{name} at no size"
            for name, nbytes in (("broadcast", self.broadcast_bytes), ("scatter", self.scatter_bytes))
        )
        options = self.options
        return (
            f"fastest with {self.ranks} ranks: each, {seen}.\n"
            f"use ParallelOptions(broadcast_min_bytes={options.broadcast_min_bytes}, "
            f"scatter_min_bytes={options.scatter_min_bytes})  # for the whole group: divided by its size"
        )

    def _threshold(self, nbytes: int | None) -> int:
        return NEVER if nbytes is None else nbytes * self.ranks


def find_break_even(ranks: int, seconds: Mapping[str, Mapping[int, float]]) -> BreakEven:
    """``seconds[strategy][nbytes]`` for each, broadcast and scatter, all of the same sizes.

    Scatter where it beats both others, broadcast where it beats each: at that size and at every larger one.
    """
    sizes = sorted(seconds["each"])
    scatter = _from(
        sizes, [seconds["scatter"][n] < WORTH * min(seconds["each"][n], seconds["broadcast"][n]) for n in sizes]
    )
    below = [n for n in sizes if scatter is None or n < scatter]
    broadcast = _from(below, [seconds["broadcast"][n] < WORTH * seconds["each"][n] for n in below])
    return BreakEven(ranks, broadcast, scatter)


def _from(sizes: Sequence[int], is_better: Sequence[bool]) -> int | None:
    """The first size from which on all are better."""
    first = None
    for nbytes, better in reversed(list(zip(sizes, is_better, strict=True))):
        if not better:
            break
        first = nbytes
    return first
