"""Waiting, within a limit, for what another thread or process does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable


def settle(condition: Callable[[], bool], *, limit_s: float = 5.0) -> bool:
    """Whether ``condition`` holds within ``limit_s``: for what another thread or process does in its own time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
