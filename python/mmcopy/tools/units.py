"""Bytes and seconds as people read them."""

from __future__ import annotations

__all__ = ["GIB", "MIB", "bytes_text", "time_text"]

MIB = 1 << 20
GIB = 1 << 30


def bytes_text(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that it reaches: ``"0 B"``, ``"64 KiB"``, ``"23.5 GiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        amount = nbytes / 1024**power
        if amount >= 1:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """``"12.3 us"``, ``"4.56 ms"``, ``"1.20 s"``: about three digits, always with the unit."""
    amount, unit = seconds, "s"
    if seconds < 1:
        amount, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    digits = 2 if amount < 10 else 1 if amount < 100 else 0
    return f"{amount:.{digits}f} {unit}"
