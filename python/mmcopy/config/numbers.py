"""Numbers in settings: sizes in bytes, counts, seconds. Each parser names the setting in its error."""

from __future__ import annotations

import math
import re

from mmcopy.errors import ConfigError

__all__ = ["LONGEST_S", "parse_count", "parse_min_bytes", "parse_seconds", "parse_size"]

MAX_BYTES = 2**64 - 1
"""SMG's messages and settings hold sizes in 64 bits."""

LONGEST_S = 10 * 365 * 86400.0
"""Python's waits take no infinity, and not every number of seconds."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,20}) ?([A-Za-z]*)")


def parse_size(value: int | str, *, setting: str, least: int = 0) -> int:
    """Bytes: a whole number, or text such as ``65536``, ``7B``, ``64KiB``, ``64k``, ``1MiB`` (k, m and g are binary).

    Raises :class:`ConfigError` that names ``setting``: for less than ``least``, a sign, a fraction, ``_``, other bases,
    other units (``KB`` means 1000 to some), and for more than 64 bits.
    """
    want = f"want a number of bytes, {least} or more (65536, 64KiB, 64k, 1MiB)"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None or match[2].lower() not in _UNITS or not value.isascii():
            raise ConfigError(f"{setting} is {value!r}, {want}")
        nbytes = int(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{setting} is {value!r}, {want}")
    else:
        nbytes = value
    if not least <= nbytes <= MAX_BYTES:
        raise ConfigError(f"{setting} is {value!r}, {want} and less than 2**64")
    return nbytes


def parse_min_bytes(value: int | str, *, setting: str) -> int:
    """A threshold in bytes; see :func:`parse_size`."""
    return parse_size(value, setting=setting)


def parse_count(value: int | str, *, setting: str, least: int = 1) -> int:
    """A whole number, ``least`` or more, or its text. Raises :class:`ConfigError` that names ``setting``."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip(), re.ASCII):
        number = int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ConfigError(f"{setting} is {value!r}, want a whole number, {least} or more")
    return number


def parse_seconds(value: float | str, *, setting: str) -> float:
    """Seconds, more than 0, or their text; from ten years on, infinity included, ten years, which every wait can take.

    Raises :class:`ConfigError` that names ``setting``.
    """
    number: object = value
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip(), re.ASCII):
        number = float(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or math.isnan(number) or not number > 0:
        raise ConfigError(f"{setting} is {value!r}, want seconds, more than 0")
    return min(number, LONGEST_S)
