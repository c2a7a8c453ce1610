"""What is in /dev/shm."""

from __future__ import annotations

import pathlib
import re

SHM_DIR = pathlib.Path("/dev/shm")
_OURS = re.compile(r"(smg-tokenspeed-\d+-|mmcopy-[0-9a-f]{16}[-.])")


def shared_files() -> set[str]:
    """Names in /dev/shm that SMG's gateway or mmcopy makes: segments and lock files."""
    return {path.name for path in SHM_DIR.iterdir() if _OURS.match(path.name)}
