"""The descriptors that this process has open."""

from __future__ import annotations

import os


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
