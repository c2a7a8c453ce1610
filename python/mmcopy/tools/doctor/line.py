"""One line of the report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Line", "Status"]


class Status(enum.StrEnum):
    """What a line means to the operator."""

    GOOD = "good"
    """As it should be, or just information."""
    WARNING = "warning"
    """It works, but slower, later or in part; ``advice`` says what to do."""
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
            raise ValueError(f"the line {self.name!r} is a {self.status} and has no advice")
