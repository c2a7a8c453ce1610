"""A receiver as the router knows it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmcopy.errors import ConfigError

from .mode import TransportMode, parse_mode
from .nearest import wanted
from .numbers import parse_min_bytes

__all__ = [
    "ENDPOINT_LABEL",
    "ENGINES",
    "NAMESPACE_LABEL",
    "UID_LABEL",
    "Role",
    "WorkerSpec",
    "parse_engine",
    "parse_labels",
    "parse_role",
]

NAMESPACE_LABEL = "shm_namespace_id"
"""Which shared memory the worker has: :func:`mmcopy.shm_namespace_id` there."""
UID_LABEL = "shm_uid"
"""The user id of the process that reads the segments."""
ENDPOINT_LABEL = "mmcopy_endpoint"
"""The path of an mmcopy worker's socket."""

ENGINES = ("tokenspeed", "vllm")
"""Engines whose messages have a place for shared memory."""


class Role(enum.StrEnum):
    """Which part of a request a worker does."""

    AGGREGATED = "aggregated"
    """All of it. SMG calls such a worker ``regular``, which is accepted too."""
    ENCODE = "encode"
    """Runs the encoder on pixels, and hands embeddings to prefill."""
    PREFILL = "prefill"
    DECODE = "decode"


def parse_role(value: Role | str, *, setting: str) -> Role:
    """The role that ``value`` names. Raises :class:`ConfigError` that names ``setting`` and the nearest match."""
    try:
        return Role.AGGREGATED if value == "regular" else Role(value)
    except ValueError:
        raise ConfigError(f"{setting} is {value!r}, {wanted(value, [role.value for role in Role])}") from None


def parse_engine(value: str, *, setting: str) -> str:
    """An engine's name. Raises :class:`ConfigError` that names ``setting`` and the nearest match."""
    if value not in ENGINES:
        raise ConfigError(f"{setting} is {value!r}, {wanted(value, ENGINES)}")
    return value


def parse_labels(value: Mapping[str, str], *, setting: str) -> dict[str, str]:
    """Text by text. Raises :class:`ConfigError` that names ``setting``."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{setting} is {value!r}, want a mapping of names to text")
    for name, text in value.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise ConfigError(f"{setting}: {name!r} is {text!r}, want text")
    return dict(value)


@dataclass(frozen=True)
class WorkerSpec:
    """A receiver as the router knows it: its address, role, advertised labels, its overrides, and its engine.

    ``role`` is one of :class:`mmcopy.config.Role`. ``labels`` are those that the worker advertises, with the
    operator's over them; these are read: ``shm_namespace_id``, ``shm_uid`` (who reads the segments),
    ``mmcopy_endpoint`` (the socket of an mmcopy worker), ``multimodal_encoder_dtype``, ``mm_device_do_normalize``.
    ``engine`` is ``"tokenspeed"``, ``"vllm"`` or None (not known: what holds for TokenSpeed is assumed). Raises
    :class:`ConfigError` that names the worker.
    """

    url: str
    role: Role | str = Role.AGGREGATED
    labels: Mapping[str, str] = field(default_factory=dict)
    multimodal_tensor_transport: TransportMode | str | None = None
    multimodal_shm_min_bytes: int | str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url:
            raise ConfigError(f"worker url is {self.url!r}, want text such as grpc://127.0.0.1:9000")
        where = f"worker {self.url}"
        self._put("role", parse_role(self.role, setting=f"{where}: role"))
        self._put("labels", parse_labels(self.labels, setting=f"{where}: labels"))
        if self.multimodal_tensor_transport is not None:
            name = "multimodal_tensor_transport"
            self._put(name, parse_mode(self.multimodal_tensor_transport, setting=f"{where}: {name}"))
        if self.multimodal_shm_min_bytes is not None:
            name = "multimodal_shm_min_bytes"
            self._put(name, parse_min_bytes(self.multimodal_shm_min_bytes, setting=f"{where}: {name}"))
        if self.engine is not None:
            parse_engine(self.engine, setting=f"{where}: engine")

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
