"""Which family makes a model's warm-up inputs. Users add theirs with :func:`register_family`."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from mmcopy.errors import ConfigError, UnknownFamilyError

from .builtin import ALL
from .family import Config, Family

__all__ = ["families", "family_for", "register_family"]

_lock = threading.Lock()
_by_type: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make ``family`` the one for its ``model_types``; the latest wins, over those that come with mmcopy too.

    Raises :class:`ConfigError` when it names none or is not a :class:`Family`. May be called from any thread.
    """
    if not isinstance(family, Family):
        raise ConfigError(
            f"register_family got {family!r}, want an object of a subclass of mmcopy.prewarm.inputs.Family"
        )
    if not getattr(family, "model_types", ()):
        raise ConfigError(f"{type(family).__name__}.model_types is empty: which models is it for?")
    names: object = family.model_types
    if isinstance(names, str):
        raise ConfigError(f"{type(family).__name__}.model_types is {names!r}, want a tuple: ({names!r},)")
    with _lock:
        _by_type.update(dict.fromkeys(family.model_types, family))


def family_for(config: Config) -> Family:
    """The family of a config, by its ``model_type`` or its thinker's.

    Raises :class:`UnknownFamilyError`, which names :func:`register_family`.
    """
    names = [config.get("model_type"), (config.get("thinker_config") or {}).get("model_type")]
    for name in names:
        if name in _by_type:
            return _by_type[name]
    raise UnknownFamilyError(
        f"no warm-up inputs are known for model_type {names[0]!r}; known: {', '.join(sorted(_by_type))}. "
        "Write a mmcopy.prewarm.inputs.Family for it and hand it to mmcopy.prewarm.inputs.register_family()"
    )


def families() -> Mapping[str, Family]:
    """Every known ``model_type`` and its family."""
    with _lock:
        return dict(_by_type)


for _family in ALL:
    register_family(_family)
