"""The nearest match of an unknown name, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "wanted"]


def nearest(value: object, allowed: Iterable[str]) -> str:
    """``"; did you mean 'shm'?"``, or "" when nothing in ``allowed`` is close to ``value``."""
    by_folded = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(str(value).strip().lower(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


def wanted(value: object, allowed: Iterable[str]) -> str:
    """What an error about ``value`` ends with: the allowed names, and the nearest of them."""
    names = list(allowed)
    return f"want one of {', '.join(names)}{nearest(value, names)}"
