"""The transport settings as options of a command line, for any program that uses argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from mmcopy.errors import ConfigError

from .mode import TransportMode, parse_mode
from .numbers import parse_min_bytes
from .transport import TransportConfig

__all__ = ["add_transport_args", "argument_type", "transport_from_args"]

MODE, MIN_BYTES = "multimodal-tensor-transport", "multimodal-shm-min-bytes"

T = TypeVar("T")


def add_transport_args(parser: argparse.ArgumentParser | argparse._ArgumentGroup, prefix: str = "") -> None:
    """Add ``--multimodal-tensor-transport`` and ``--multimodal-shm-min-bytes``, each name with ``prefix`` in front.

    A bad value ends the program as argparse does, with the nearest match. An option that is not given stays None, so
    that what comes after it in the order (SMG's variables, the default) has its turn.
    """
    parser.add_argument(
        f"--{prefix}{MODE}",
        type=argument_type(parse_mode),
        metavar="{inline,shm,auto}",
        help="how tensors travel to workers. default: SMG_MM_TENSOR_TRANSPORT, else inline",
    )
    parser.add_argument(
        f"--{prefix}{MIN_BYTES}",
        type=argument_type(parse_min_bytes),
        metavar="BYTES",
        help="smaller tensors go inline; 65536, 64KiB, 1MiB. default: SMG_MM_SHM_MIN_BYTES, else 65536",
    )


def transport_from_args(args: argparse.Namespace, prefix: str = "") -> TransportConfig:
    """What the options of :func:`add_transport_args` were given, as a router's config."""
    values: dict[str, TransportMode | int | None] = {
        "mode": getattr(args, f"{prefix}{MODE}".replace("-", "_")),
        "shm_min_bytes": getattr(args, f"{prefix}{MIN_BYTES}".replace("-", "_")),
    }
    options = {"mode": f"--{prefix}{MODE}", "shm_min_bytes": f"--{prefix}{MIN_BYTES}"}
    given = {name: value for name, value in values.items() if value is not None}
    return TransportConfig(**given, origins={name: options[name] for name in given})  # type: ignore[arg-type]


def argument_type(parse: Callable[..., T], **options: Any) -> Callable[[str], T]:
    """A parser of settings as an argparse ``type``: argparse names the option, and the parser says what is wrong."""

    def convert(text: str) -> T:
        try:
            return parse(text, setting="the value", **options)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
