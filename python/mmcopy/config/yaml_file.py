"""A router's configuration in a YAML file. Needs ``pip install 'mmcopy[yaml]'``.

Scalars are taken as they are written, so that YAML's own ideas (``no`` is false, ``1_000`` is a number, ``1:30`` is
90) reach no setting; the settings' parsers decide. The text is composed, never constructed: no tag makes an object.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from mmcopy.errors import ConfigError, MissingDependencyError

from .environment import read_environment
from .router import RouterConfig, router_from_entries
from .section import Entries, Entry

__all__ = ["load_config"]

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
"""Anchors can make a small file large."""
MAX_DEPTH = 8
_PLAIN_TAGS = ("str", "int", "float", "bool", "timestamp")


def load_config(
    path: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] | None = None
) -> RouterConfig:
    """Read ``path``; without one the file that ``MMCOPY_CONFIG`` names; without that, an empty configuration.

        multimodal_tensor_transport: auto
        multimodal_shm_min_bytes: 64KiB
        probe_max_age_s: 30
        workers:
          - url: grpc://10.0.0.1:9000
            role: encode
            engine: tokenspeed
            multimodal_shm_min_bytes: 1MiB
            labels: {multimodal_encoder_dtype: float16}

    Raises :class:`ConfigError` with file and line for what is not YAML, an unknown or repeated name (with the
    nearest), a bad value, and two names of one setting with different values;
    :class:`MissingDependencyError` without PyYAML.
    """
    if path is None:
        path = read_environment(environ).own.config
        if path is None:
            return RouterConfig()
    file = pathlib.Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes, want {MAX_BYTES} at most")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    return parse_yaml(text, name=str(file))


def parse_yaml(text: str, *, name: str) -> RouterConfig:
    """The configuration in ``text``; ``name`` is what errors call the file."""
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("a YAML file needs PyYAML: pip install 'mmcopy[yaml]'") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {error}") from error
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return RouterConfig()
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:1: want a mapping of names to values")
    return router_from_entries(_Reader(name).mapping(node, depth=0))


class _Reader:
    """Nodes into values: a mapping is a list of entries with their lines, a scalar its text, an empty one None."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes = 0

    def value(self, node: Any, *, depth: int) -> Any:
        import yaml

        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise ConfigError(f"{self.place(node)}: more than {MAX_NODES} values, or deeper than {MAX_DEPTH} levels")
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self.mapping(node, depth=depth)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return tuple(self.value(each, depth=depth + 1) for each in node.value)
        if isinstance(node, yaml.ScalarNode) and tag == "null":
            return None
        if isinstance(node, yaml.ScalarNode) and tag in _PLAIN_TAGS:
            return node.value
        raise ConfigError(f"{self.place(node)}: the tag {node.tag} is not taken")

    def mapping(self, node: Any, *, depth: int) -> Entries:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, depth=depth + 1)
            place = self.place(key_node)
            if not isinstance(key, str):
                raise ConfigError(f"{place}: a name must be text")
            if key in entries:
                raise ConfigError(f"{place}: {key} is given twice, first at {entries[key].place}")
            entries[key] = Entry(key, self.value(value_node, depth=depth + 1), place)
        return Entries(entries.values())

    def place(self, node: Any) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
