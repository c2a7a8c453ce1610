"""The environment, read once into a value. Nothing else in the library looks at ``os.environ``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mmcopy._native import available_cores

from .own_variables import OwnVariables, read_own_variables
from .smg_variables import SmgVariables, read_smg_variables

__all__ = ["Environment", "default_num_threads", "read_environment", "warn_once"]

_log = logging.getLogger("mmcopy.config")

_MAX_REMEMBERED = 256
_warned: set[str] = set()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Environment:
    """SMG's variables and mmcopy's own, as they were when this was read."""

    smg: SmgVariables = field(default_factory=SmgVariables)
    own: OwnVariables = field(default_factory=OwnVariables)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read ``environ``, by default that of the process. What SMG would warn about is logged once a process.

    Raises :class:`ConfigError` for an ``MMCOPY_*`` variable that is bad or unknown.
    """
    variables = os.environ if environ is None else environ
    found = Environment(read_smg_variables(variables), read_own_variables(variables))
    warn_once(found.smg.warnings)
    return found


def warn_once(warnings: Iterable[str]) -> None:
    """Log each of these texts, unless this process has logged it before."""
    for text in warnings:
        with _lock:
            if text in _warned:
                continue
            if len(_warned) >= _MAX_REMEMBERED:
                _warned.clear()
            _warned.add(text)
        _log.warning("%s", text)


def default_num_threads(environment: Environment | None = None) -> int:
    """Copy threads for one large tensor: ``MMCOPY_NUM_THREADS``, else three quarters of the cores that this process may
    use (by affinity and CPU quota), but 4 where there are so many, and 16 at most.

    On 16 cores of an H200's host 12 to 14 write 8 x 16 MiB fastest, also beside torch's spinning threads; with all 16 a
    thread that the system takes a core from holds the others up.

    Without an environment that of the process is read. Raises :class:`ConfigError` as :func:`read_environment`.
    """
    chosen = (read_own_variables(os.environ) if environment is None else environment.own).num_threads
    if chosen is not None:
        return chosen
    cores = available_cores()
    return min(cores, max(4, cores * 3 // 4), 16)
