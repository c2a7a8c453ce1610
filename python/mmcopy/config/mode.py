"""Transport modes, which are SMG's but for rdma."""

from __future__ import annotations

import enum

from mmcopy.errors import ConfigError

from .nearest import wanted

__all__ = ["TransportMode", "parse_mode"]


class TransportMode(enum.StrEnum):
    """How tensors travel."""

    INLINE = "inline"
    """Inside the message."""
    SHM = "shm"
    """Through shared memory whenever it can be written, for every receiver."""
    AUTO = "auto"
    """Through shared memory where the receiver is known to share it, inside the message elsewhere."""


def parse_mode(value: TransportMode | str, *, setting: str) -> TransportMode:
    """The mode that ``value`` names. Raises :class:`ConfigError` that names ``setting`` and the nearest match."""
    try:
        return TransportMode(value)
    except ValueError:
        raise ConfigError(f"{setting} is {value!r}, {wanted(value, [mode.value for mode in TransportMode])}") from None
