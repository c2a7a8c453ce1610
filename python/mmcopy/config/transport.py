"""Transport settings: which way a tensor's bytes go, how small is too small, and who said so.

Each key resolves by itself: worker override, router config, SMG's variable, SMG's legacy variable, default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .environment import Environment, read_environment
from .mode import TransportMode, parse_mode
from .numbers import parse_min_bytes, parse_seconds
from .worker import WorkerSpec, parse_labels

__all__ = ["DEFAULT_PROBE_MAX_AGE_S", "DEFAULT_SHM_MIN_BYTES", "ResolvedTransport", "TransportConfig"]

DEFAULT_SHM_MIN_BYTES = 65536
DEFAULT_PROBE_MAX_AGE_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedTransport:
    """The settings in force for one receiver, and where each came from.

    A source is ``worker``, ``config`` (with the place where the router's config got it, if that is known: ``config
    (router.yaml:3)``), the name of SMG's variable, or ``default``. ``warnings`` are SMG's about its variables.
    """

    mode: TransportMode
    mode_source: str
    shm_min_bytes: int
    shm_min_bytes_source: str
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", TransportMode(self.mode))
        object.__setattr__(self, "warnings", tuple(self.warnings))


@dataclass(frozen=True)
class TransportConfig:
    """What the router was given, in Python, in a file or on the command line; ``None`` means not set.

    ``mode`` and ``shm_min_bytes`` (bytes, or text such as ``"64KiB"``) are SMG's settings. ``probe_max_age_s``: how
    long a proof that a worker can read our segments counts. ``origins``: the places where the fields were set, for
    :class:`ResolvedTransport`; it takes no part in comparisons. Raises :class:`ConfigError` that names the
    field.
    """

    mode: TransportMode | str | None = None
    shm_min_bytes: int | str | None = None
    probe_max_age_s: float | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode is not None:
            object.__setattr__(self, "mode", parse_mode(self.mode, setting="TransportConfig.mode"))
        if self.shm_min_bytes is not None:
            parsed = parse_min_bytes(self.shm_min_bytes, setting="TransportConfig.shm_min_bytes")
            object.__setattr__(self, "shm_min_bytes", parsed)
        if self.probe_max_age_s is not None:
            parse_seconds(self.probe_max_age_s, setting="TransportConfig.probe_max_age_s")
        object.__setattr__(self, "origins", parse_labels(self.origins, setting="TransportConfig.origins"))

    def over(self, base: TransportConfig) -> TransportConfig:
        """These settings, and those of ``base`` where nothing is set here: a command line over a file."""
        fields = ("mode", "shm_min_bytes", "probe_max_age_s")
        own = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        kept = {name: place for name, place in base.origins.items() if name not in own}
        return replace(base, **own, origins={**kept, **self.origins})

    def resolve(self, worker: WorkerSpec | None = None, environ: Mapping[str, str] | None = None) -> ResolvedTransport:
        """The mode and the threshold for ``worker``, by ``environ`` (None: that of the process, as it is now).

        Raises :class:`ConfigError` for a bad or unknown ``MMCOPY_*`` variable. Who resolves often reads the
        environment once and calls :meth:`resolve_in`; a :class:`mmcopy.Sender` does.
        """
        return self.resolve_in(read_environment(environ), worker)

    def resolve_in(self, environment: Environment, worker: WorkerSpec | None = None) -> ResolvedTransport:
        """As :meth:`resolve`, by an environment that was read before. Pure."""
        smg = environment.smg
        mode: TransportMode | str
        mode, mode_source = _first(
            ("worker", worker.multimodal_tensor_transport if worker else None),
            (self._source("mode"), self.mode),
            (smg.mode_name, smg.mode),
            ("default", TransportMode.INLINE),
        )
        min_bytes: int | str
        min_bytes, min_bytes_source = _first(
            ("worker", worker.multimodal_shm_min_bytes if worker else None),
            (self._source("shm_min_bytes"), self.shm_min_bytes),
            (smg.shm_min_bytes_name, smg.shm_min_bytes),
            ("default", DEFAULT_SHM_MIN_BYTES),
        )
        return ResolvedTransport(
            TransportMode(mode), mode_source, int(min_bytes), min_bytes_source, warnings=smg.warnings
        )

    def probe_max_age_in(self, environment: Environment) -> float:
        """Seconds a proof of sharing counts: this config's, else ``MMCOPY_PROBE_MAX_AGE_S``, else 30."""
        age, _ = _first(
            ("config", self.probe_max_age_s),
            ("MMCOPY_PROBE_MAX_AGE_S", environment.own.probe_max_age_s),
            ("default", DEFAULT_PROBE_MAX_AGE_S),
        )
        return age

    def _source(self, name: str) -> str:
        place = self.origins.get(name)
        return f"config ({place})" if place else "config"


def _first(*layers: tuple[str, T | None]) -> tuple[T, str]:
    for source, value in layers:
        if value is not None:
            return value, source
    raise AssertionError("the last layer is the default")
