"""A router's whole configuration: its transport settings and its workers, and both as plain mappings for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmcopy.errors import ConfigError

from .mode import parse_mode
from .numbers import parse_min_bytes, parse_seconds
from .section import Entries, Entry, Field, entries_of, read_section
from .transport import TransportConfig
from .worker import WorkerSpec, parse_engine, parse_labels, parse_role

__all__ = ["RouterConfig", "router_from_entries", "transport_from_dict", "worker_from_dict"]

MODE_ALIASES = ("multimodal_tensor_transport",)
MIN_BYTES_ALIASES = ("multimodal_shm_min_bytes",)


@dataclass(frozen=True)
class RouterConfig:
    """What a file says; see :func:`mmcopy.config.load_config`."""

    transport: TransportConfig = field(default_factory=TransportConfig)
    workers: tuple[WorkerSpec, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(self.workers))
        seen: set[str] = set()
        for worker in self.workers:
            if worker.url in seen:
                raise ConfigError(f"worker {worker.url} is listed twice")
            seen.add(worker.url)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``."""
        return {**asdict(self.transport), "workers": [asdict(worker) for worker in self.workers]}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, place: str = "config") -> RouterConfig:
        """From plain values, such as :meth:`to_dict` gives or JSON holds.

        Raises :class:`ConfigError` that names ``place``, the setting, and the nearest match of an unknown name.
        """
        return router_from_entries(entries_of(mapping, place=place))


def transport_from_dict(mapping: Mapping[str, Any], *, place: str = "config") -> TransportConfig:
    """The transport settings of a plain mapping, strictly; see :meth:`RouterConfig.from_dict`."""
    return _transport(read_section(entries_of(mapping, place=place), _TRANSPORT))


def worker_from_dict(mapping: Mapping[str, Any], *, place: str = "worker") -> WorkerSpec:
    """A worker from a plain mapping, strictly. SMG's names ``worker_type`` and ``runtime_type`` are known too."""
    return _worker(entries_of(mapping, place=place))


def router_from_entries(entries: Iterable[Entry]) -> RouterConfig:
    """The configuration in these entries of a file or a mapping."""
    found = read_section(entries, {**_TRANSPORT, "workers": Field(_workers)})
    workers, _ = found.pop("workers", ((), None))
    return RouterConfig(_transport(found), workers)


def _transport(found: Mapping[str, tuple[Any, Entry]]) -> TransportConfig:
    values = {name: value for name, (value, _) in found.items()}
    # A file's place has a line; that of a plain mapping is its name, and tells nothing that "config" does not.
    places = {name: entry.place for name, (_, entry) in found.items() if ":" in entry.place}
    return TransportConfig(**{**values, "origins": {**places, **values.get("origins", {})}})


def _workers(value: Any, *, setting: str) -> tuple[WorkerSpec, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, Entries)):
        raise ConfigError(f"{setting}: want a list of workers, found {type(value).__name__}")
    return tuple(_worker(entries_of(each, place=f"{setting}[{number}]")) for number, each in enumerate(value))


def _worker(entries: Entries) -> WorkerSpec:
    found = read_section(entries, _WORKER)
    if "url" not in found:
        raise ConfigError(f"{entries[0].place if entries else 'a worker'}: a worker needs a url")
    return WorkerSpec(**{name: value for name, (value, _) in found.items()})


def _labels(value: Any, *, setting: str) -> dict[str, str]:
    if isinstance(value, Entries):
        value = {each.key: each.value for each in value}
    return parse_labels(value, setting=setting)


def _url(value: Any, *, setting: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{setting} is {value!r}, want text such as grpc://127.0.0.1:9000")
    return value


_TRANSPORT = {
    "mode": Field(parse_mode, MODE_ALIASES),
    "shm_min_bytes": Field(parse_min_bytes, MIN_BYTES_ALIASES),
    "probe_max_age_s": Field(parse_seconds),
    "origins": Field(_labels),
}
_WORKER = {
    "url": Field(_url),
    "role": Field(parse_role, ("worker_type",)),
    "labels": Field(_labels),
    "multimodal_tensor_transport": Field(parse_mode),
    "multimodal_shm_min_bytes": Field(parse_min_bytes),
    "engine": Field(parse_engine, ("runtime_type",)),
}
