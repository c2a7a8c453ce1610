"""Which files of mmcopy one call runs through."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from types import FrameType

import mmcopy

PACKAGE = pathlib.Path(mmcopy.__file__).parent


def files_run_by(call: Callable[[], object]) -> set[str]:
    """The Python files below python/mmcopy whose code ``call`` runs, on this thread, as paths within the package."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    paths = (pathlib.Path(name) for name in seen)
    return {str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)}
