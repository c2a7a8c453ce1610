"""Options and behaviour that all benchmarks share."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mmcopy.errors import ConfigError, MmcopyError

__all__ = ["add_common", "argument", "effort", "guarded", "one_count"]

T = TypeVar("T")


def guarded(measure: Callable[..., T]) -> T | None:
    """``measure``, stopped only where nothing is left behind. None, and the reason on stderr, for wrong bytes."""
    from mmcopy.tools.bench.load import BytesDifferError
    from mmcopy.tools.bench.paths import LeftBehindError
    from mmcopy.tools.demo.signals import Signals

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with Signals() as signals:
        try:
            return measure(poll=signals.check, say=say)
        except (BytesDifferError, LeftBehindError) as error:
            say(f"mmcopy bench: {error}")
            return None


def add_common(parser: argparse.ArgumentParser, *, device_help: str = "cpu or cuda:N, where the tensors go") -> None:
    """--device, --repeats or --seconds, and --json."""
    parser.add_argument("--device", default="cpu", help=f"{device_help}. default: %(default)s")
    rounds = parser.add_mutually_exclusive_group()
    rounds.add_argument("--repeats", type=argument(one_count), metavar="N", help="rounds a case")
    rounds.add_argument(
        "--seconds",
        type=argument(_seconds),
        default=2.0,
        metavar="S",
        help="as many rounds a case as fit, 7 at least. default: %(default)s",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end; the table goes to stderr"
    )


def effort(args: argparse.Namespace) -> Any:
    """How many rounds the command line asks for."""
    from mmcopy.tools.bench.plan import Effort

    return Effort(repeats=args.repeats, seconds=args.seconds)


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as argparse wants it: its message, and not its name, reaches the user."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except MmcopyError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def one_count(text: str) -> int:
    """One whole number, 1 or more. Raises :class:`ConfigError`."""
    from mmcopy.tools.bench.plan import parse_counts

    counts = parse_counts(text)
    if len(counts) != 1:
        raise ConfigError(f"{text!r}: want one whole number")
    return counts[0]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 3600:
        raise ConfigError(f"{text!r}: want a number of seconds, more than 0 and at most 3600")
    return value
