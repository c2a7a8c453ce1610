"""Transport settings: which way a tensor's bytes go, and who said so.

Each key resolves by itself: worker override, then router config, then default.
"""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .errors import ConfigError

__all__ = ["ResolvedTransport", "TransportConfig", "TransportMode", "WorkerSpec"]

DEFAULT_SHM_MIN_BYTES = 65536

T = TypeVar("T")


def default_num_threads() -> int:
    """Copy threads for one large tensor: the cores this process may use, 8 at most."""
    return min(8, len(os.sched_getaffinity(0)))


class TransportMode(enum.StrEnum):
    """How tensors travel."""

    INLINE = "inline"
    """Inside the message."""
    SHM = "shm"
    """Through shared memory whenever it can be written, whoever the receiver is."""
    AUTO = "auto"
    """Through shared memory where the receiver is known to share it, inside the message elsewhere."""


def parse_mode(value: TransportMode | str, *, setting: str) -> TransportMode:
    """The mode that ``value`` names. Raises :class:`ConfigError` that names ``setting`` and the nearest match."""
    try:
        return TransportMode(value)
    except ValueError:
        allowed = [mode.value for mode in TransportMode]
        near = difflib.get_close_matches(str(value).strip().lower(), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{setting} is {value!r}, want one of {', '.join(allowed)}{hint}") from None


def parse_count(value: int, *, setting: str, least: int = 1) -> int:
    """A whole number, ``least`` or more. Raises :class:`ConfigError` that names ``setting``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{setting} is {value!r}, want a whole number, {least} or more")
    return value


def parse_seconds(value: float, *, setting: str) -> float:
    """Seconds, more than 0. Raises :class:`ConfigError` that names ``setting``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{setting} is {value!r}, want seconds, more than 0")
    return value


def parse_min_bytes(value: int, *, setting: str) -> int:
    """A threshold in bytes, 0 or more. Raises :class:`ConfigError` that names ``setting``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{setting} is {value!r}, want a number of bytes, 0 or more")
    return value


@dataclass(frozen=True)
class WorkerSpec:
    """A receiver as the router knows it: its address, role, advertised labels, and its overrides."""

    url: str
    role: str = "aggregated"
    labels: Mapping[str, str] = field(default_factory=dict)
    multimodal_tensor_transport: TransportMode | str | None = None
    multimodal_shm_min_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.multimodal_tensor_transport is not None:
            where = f"worker {self.url}: multimodal_tensor_transport"
            mode = parse_mode(self.multimodal_tensor_transport, setting=where)
            object.__setattr__(self, "multimodal_tensor_transport", mode)
        if self.multimodal_shm_min_bytes is not None:
            where = f"worker {self.url}: multimodal_shm_min_bytes"
            parse_min_bytes(self.multimodal_shm_min_bytes, setting=where)


@dataclass(frozen=True)
class ResolvedTransport:
    """The settings in force for one receiver, and where each came from: ``worker``, ``config`` or ``default``."""

    mode: TransportMode
    mode_source: str
    shm_min_bytes: int
    shm_min_bytes_source: str


@dataclass(frozen=True)
class TransportConfig:
    """What the router was given; ``None`` means not set."""

    mode: TransportMode | str | None = None
    shm_min_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            object.__setattr__(self, "mode", parse_mode(self.mode, setting="TransportConfig.mode"))
        if self.shm_min_bytes is not None:
            parse_min_bytes(self.shm_min_bytes, setting="TransportConfig.shm_min_bytes")

    def resolve(self, worker: WorkerSpec | None = None) -> ResolvedTransport:
        """The mode and the threshold for ``worker``: its override, else this config, else inline and 65536."""
        mode: TransportMode | str
        mode, mode_source = _first(
            ("worker", worker.multimodal_tensor_transport if worker else None),
            ("config", self.mode),
            ("default", TransportMode.INLINE),
        )
        min_bytes, min_bytes_source = _first(
            ("worker", worker.multimodal_shm_min_bytes if worker else None),
            ("config", self.shm_min_bytes),
            ("default", DEFAULT_SHM_MIN_BYTES),
        )
        return ResolvedTransport(TransportMode(mode), mode_source, min_bytes, min_bytes_source)


def _first(*layers: tuple[str, T | None]) -> tuple[T, str]:
    for source, value in layers:
        if value is not None:
            return value, source
    raise AssertionError("the last layer is the default")
