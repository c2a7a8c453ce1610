"""mmcopy's own environment variables: strict, and none that is not in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmcopy.errors import ConfigError

from .nearest import wanted
from .numbers import parse_count, parse_seconds

__all__ = ["OWN_NAMES", "OwnVariables", "read_own_variables"]

PREFIX = "MMCOPY_"
CONFIG = "MMCOPY_CONFIG"
NUM_THREADS = "MMCOPY_NUM_THREADS"
PROBE_MAX_AGE_S = "MMCOPY_PROBE_MAX_AGE_S"
OWN_NAMES = (CONFIG, NUM_THREADS, PROBE_MAX_AGE_S)


@dataclass(frozen=True, slots=True)
class OwnVariables:
    """What the variables say; None: not set."""

    config: str | None = None
    """The file that the command line reads when none is named."""
    num_threads: int | None = None
    """Copy threads of senders and receivers that were not given a number."""
    probe_max_age_s: float | None = None
    """How long a proof of sharing counts; the router's config goes first."""


def read_own_variables(environ: Mapping[str, str]) -> OwnVariables:
    """Read all of them. Raises :class:`ConfigError` for a bad value, and for an unknown name with the nearest match."""
    for name in environ:
        if name.startswith(PREFIX) and name not in OWN_NAMES:
            raise ConfigError(f"environment: {name} is no variable of mmcopy, {wanted(name, OWN_NAMES)}")
    config = environ.get(CONFIG)
    if config is not None and not config.strip():
        raise ConfigError(f"environment: {CONFIG} is {config!r}, want a file's name")
    threads, age = environ.get(NUM_THREADS), environ.get(PROBE_MAX_AGE_S)
    return OwnVariables(
        config=config,
        num_threads=None if threads is None else parse_count(threads, setting=f"environment: {NUM_THREADS}"),
        probe_max_age_s=None if age is None else parse_seconds(age, setting=f"environment: {PROBE_MAX_AGE_S}"),
    )
