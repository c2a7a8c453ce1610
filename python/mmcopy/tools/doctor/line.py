"""One line of the report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["GIB", "MIB", "Line", "Status", "bytes_text"]

MIB = 1 << 20
GIB = 1 << 30


class Status(enum.StrEnum):
    """What a line means for whoever runs the machine."""

    GOOD = "good"
    """As it should be, or merely told."""
    WARNING = "warning"
    """It works, but slower, later or only in part; ``advice`` says what to do."""
    PROBLEM = "problem"
    """Tensors cannot move as they should; ``advice`` says what to do. The command's exit code becomes 1."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was looked at, how it is, what was found, and what to do (empty only when the status is good)."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.status is not Status.GOOD and not self.advice:
            raise ValueError(f"the line {self.name!r} is a {self.status} and says nothing about what to do")


def bytes_text(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that it reaches: ``"0 B"``, ``"64 KiB"``, ``"23.5 GiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        amount = nbytes / 1024**power
        if amount >= 1:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{nbytes} B"
