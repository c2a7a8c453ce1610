"""Ctrl-C as a flag that is checked where stopping is safe, not as an exception that may come anywhere."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupted", "Signals"]

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop. ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """While it is entered, SIGINT, SIGTERM and SIGHUP are remembered; :meth:`check` raises :class:`Interrupted`.

    A KeyboardInterrupt in the middle of starting a process would lose the process. Enter it on the main thread.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raises :class:`Interrupted` when a signal came since this was entered; may be called repeatedly."""
        if self._number is not None:
            raise Interrupted(self._number)

    def __enter__(self) -> Self:
        for number in HANDLED:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._number = self._number or number
