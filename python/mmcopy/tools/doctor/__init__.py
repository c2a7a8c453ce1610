"""The checks of ``mmcopy doctor``: whether this machine can move tensors well, and what to do where it cannot.

Each module looks at one part of the machine. It reads plain values, and pure functions judge them into :class:`Line`,
so that each judgement is tested on any machine. Nothing here starts CUDA in the calling process, and nothing raises: a
check that fails becomes a line that says so.
"""

from __future__ import annotations

from .line import Line, Status
from .report import as_json, as_text, examine, exit_code

__all__ = ["Line", "Status", "as_json", "as_text", "examine", "exit_code"]
