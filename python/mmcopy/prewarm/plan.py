"""Which shapes a prewarm runs: a pure function of a config and of options, so that every rank has the same list."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from mmcopy.encoders import MODALITIES
from mmcopy.errors import ConfigError

from .inputs import Config, Family, Shape

__all__ = ["Role", "Sizes", "encodes", "parse_role", "parse_shapes", "plan_shapes"]

Sizes: TypeAlias = Mapping[str, Iterable[Any]]
"""By modality, one encode each: a size, such as (1024, 1024), or a list of sizes that are encoded at once."""


class Role(enum.StrEnum):
    """What a worker does with a request."""

    AGGREGATED = "aggregated"
    """All of it."""
    PREFILL = "prefill"
    """Encodes and prefills: the other half of a decode worker."""
    ENCODE = "encode"
    """Encodes for prefill workers elsewhere."""
    DECODE = "decode"
    """Sees no pixels."""


_ENCODING = {Role.AGGREGATED: True, Role.PREFILL: True, Role.ENCODE: True, Role.DECODE: False}


def encodes(role: Role) -> bool:
    """Whether a worker of that role runs encoders."""
    return _ENCODING[role]


def parse_role(role: Role | str) -> Role:
    """The role of that name. Raises :class:`ConfigError` with the nearest one."""
    try:
        return Role(role)
    except ValueError:
        near = difflib.get_close_matches(str(role).lower(), [each.value for each in Role], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"role is {role!r}, want one of {', '.join(Role)}{hint}") from None


def parse_shapes(sizes: Sizes) -> dict[str, tuple[Shape, ...]]:
    """The shapes that a user's ``sizes`` name. Raises :class:`ConfigError` for one that cannot be."""
    if not isinstance(sizes, Mapping):
        raise ConfigError(f"sizes is a {type(sizes).__name__}, want a mapping: {{'image': [(1024, 1024)]}}")
    for modality, entries in sizes.items():
        if not isinstance(entries, Iterable):
            raise ConfigError(f"sizes[{modality!r}] is {entries!r}, want a list of sizes, such as (1024, 1024)")
    return {modality: tuple(_shape(modality, each) for each in entries) for modality, entries in sizes.items()}


def plan_shapes(
    config: Config,
    family: Family,
    modalities: Sequence[str],
    *,
    sizes: Sizes | None = None,
    max_pixels: int | None = None,
) -> list[Shape]:
    """What is encoded, in order: a modality's ``sizes``, or the family's own where there are none; none twice.

    Raises :class:`ConfigError` for sizes that the family cannot take, or of a modality that is not warmed.
    """
    chosen = parse_shapes(sizes or {})
    other = [name for name in chosen if name not in modalities]
    if other:
        raise ConfigError(f"sizes has {other[0]!r}, which is not warmed: {', '.join(modalities) or 'nothing is'}")
    shapes = []
    for modality in sorted(modalities, key=MODALITIES.index):
        wanted = chosen[modality] if modality in chosen else family.shapes(config, modality, max_pixels)
        shapes += [family.fit(config, shape) for shape in wanted]
    return list(dict.fromkeys(shapes))


def _shape(modality: str, entry: Any) -> Shape:
    if isinstance(entry, Shape):
        if entry.modality != modality:
            raise ConfigError(f"sizes[{modality!r}] has {entry}")
        return entry
    if isinstance(entry, int):
        entry = (entry,)
    if not isinstance(entry, Sequence) or isinstance(entry, str):
        raise ConfigError(f"sizes[{modality!r}] has {entry!r}, want a tuple of whole numbers, or a list of such")
    several = any(not isinstance(each, int) for each in entry)
    try:
        items = tuple(tuple(each) for each in entry) if several else (tuple(entry),)
    except TypeError:
        raise ConfigError(f"sizes[{modality!r}] has {entry!r}, want tuples of whole numbers") from None
    return Shape(modality, items)
