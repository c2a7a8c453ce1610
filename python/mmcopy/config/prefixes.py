"""Which names of segments are accepted: a handle is a peer's word, and other programs keep files in /dev/shm too."""

from __future__ import annotations

from collections.abc import Iterable

from mmcopy.errors import ConfigError, PayloadError

__all__ = ["ACCEPT_PREFIXES", "check_accepted", "parse_prefixes"]

ACCEPT_PREFIXES = ("smg-tokenspeed-", "mmcopy-")
"""How the names of segments begin that SMG's gateway and mmcopy's own sender make."""


def parse_prefixes(value: object, *, setting: str) -> tuple[str, ...]:
    """``value`` as a tuple of prefixes. Raises :class:`ConfigError`: an empty prefix would accept every name."""
    if not isinstance(value, str) and isinstance(value, Iterable):
        prefixes = tuple(value)
        if all(isinstance(prefix, str) and prefix for prefix in prefixes):
            return prefixes
    raise ConfigError(f"{setting} is {value!r}, want a sequence of prefixes, none empty")


def check_accepted(name: str, prefixes: tuple[str, ...]) -> None:
    """Raise :class:`PayloadError` unless ``name`` begins with one of ``prefixes``."""
    if not name.startswith(prefixes):
        raise PayloadError(f"segment {name!r} is refused: accepted names begin with {', '.join(prefixes)}")
