"""A mapping from outside, taken strictly: known names, one value per setting, and errors that name the place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmcopy.errors import ConfigError

from .nearest import wanted

__all__ = ["Entries", "Entry", "Field", "entries_of", "read_section"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One name and its value, and the place where they stand: a file with a line, or the mapping's own name."""

    key: str
    value: Any
    place: str


class Entries(tuple[Entry, ...]):
    """A mapping whose names have places."""


@dataclass(frozen=True, slots=True)
class Field:
    """A setting: its parser, which gets the setting's name and place, and its other names."""

    parse: Callable[..., Any]
    aliases: tuple[str, ...] = ()


def entries_of(mapping: Any, *, place: str) -> Entries:
    """The entries of a plain mapping. Raises :class:`ConfigError` for what is none, or has names that are no text."""
    if isinstance(mapping, Entries):
        return mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{place}: want a mapping of names to values, found {type(mapping).__name__}")
    for key in mapping:
        if not isinstance(key, str):
            raise ConfigError(f"{place}: the name {key!r} is no text")
    return Entries(Entry(key, value, place) for key, value in mapping.items())


def read_section(entries: Iterable[Entry], fields: Mapping[str, Field]) -> dict[str, tuple[Any, Entry]]:
    """The settings among ``entries``: parsed values by their first names, each with its entry.

    A name may be written with ``-`` for ``_``; an empty value (None) is not set. Raises :class:`ConfigError` for an
    unknown name, with the nearest; for a bad value; and for two names of one setting that have different values.
    """
    names = {alias: name for name, field in fields.items() for alias in (name, *field.aliases)}
    found: dict[str, tuple[Any, Entry]] = {}
    for entry in entries:
        name = names.get(entry.key.replace("-", "_"))
        if name is None:
            raise ConfigError(f"{entry.place}: {entry.key} is no setting, {wanted(entry.key, names)}")
        if entry.value is None:
            continue
        value = fields[name].parse(entry.value, setting=f"{entry.place}: {entry.key}")
        if name in found and found[name][0] != value:
            other = found[name][1]
            raise ConfigError(
                f"{entry.place}: {entry.key} is {entry.value!r}, but {other.key} ({other.place}), "
                f"which is the same setting, is {other.value!r}"
            )
        found.setdefault(name, (value, entry))
    return found
