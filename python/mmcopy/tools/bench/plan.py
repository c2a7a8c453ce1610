"""What is measured, and in which order: plain values and pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmcopy.errors import ConfigError, NoSpaceError
from mmcopy.tools.doctor.line import bytes_text

__all__ = [
    "DEFAULT_BATCHES",
    "DEFAULT_SIZES",
    "DEFAULT_SLOTS",
    "DEFAULT_SWEEP_SIZES",
    "Case",
    "Effort",
    "check_space",
    "parse_batches",
    "parse_counts",
    "parse_size",
    "parse_sizes",
    "thread_counts",
    "turn",
]

DEFAULT_SIZES = "64KiB,1MiB,16MiB,64MiB,256MiB,1GiB"
DEFAULT_BATCHES = "256x64KiB,64x1MiB,8x16MiB"
DEFAULT_SWEEP_SIZES = "1MiB,16MiB,64MiB,256MiB"
DEFAULT_SLOTS = "512KiB,1MiB,2MiB,4MiB,8MiB"

NOTHING = "none"
PAGE_BYTES = 4096
UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """One receive: ``count`` tensors of ``nbytes`` bytes each."""

    nbytes: int
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all the tensors."""
        return self.nbytes * self.count

    @property
    def label(self) -> str:
        """``"16 MiB"``, or ``"256 x 64 KiB"`` for a batch."""
        return (f"{self.count} x " if self.count > 1 else "") + bytes_text(self.nbytes)


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds a case gets: ``repeats``, or as many as fit into ``seconds``, 7 at least and 1000 at most."""

    repeats: int | None = None
    seconds: float = 2.0
    min_rounds: int = 7
    max_rounds: int = 1000

    def is_enough(self, rounds: int, elapsed_s: float) -> bool:
        """Whether ``rounds`` rounds, which took ``elapsed_s`` with all that is not timed, will do."""
        if self.repeats is not None:
            return rounds >= self.repeats
        return rounds >= self.max_rounds or (rounds >= self.min_rounds and elapsed_s >= self.seconds)


def turn(paths: Sequence[T], round_index: int) -> list[T]:
    """The order of one round: every path once, beginning one further with each round."""
    start = round_index % len(paths) if paths else 0
    return [*paths[start:], *paths[:start]]


def parse_size(text: str) -> int:
    """Bytes of ``"64KiB"``, ``"1 MiB"``, ``"2GiB"`` or ``"4096"``. Raises :class:`ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"size {text!r}: want a whole number with KiB, MiB or GiB, or bytes; for example 64KiB")
    nbytes = int(match[1]) * UNITS[match[2].lower()]
    if nbytes == 0:
        raise ConfigError(f"size {text!r}: want at least 1 byte")
    return nbytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of ``"64KiB,1MiB"``, each once, in the order given; none of ``"none"``. Raises :class:`ConfigError`."""
    return _listed(parse_size, text)


def parse_batches(text: str) -> tuple[Case, ...]:
    """Batches of ``"256x64KiB,8x16MiB"``, each once; none of ``"none"``. Raises :class:`ConfigError`."""
    return _listed(_parse_batch, text)


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers of ``"1,2,8"``, each once and 1 or more. Raises :class:`ConfigError`."""
    return _listed(_parse_count, text)


def _listed(parse: Callable[[str], T], text: str) -> tuple[T, ...]:
    if text.strip().lower() == NOTHING:
        return ()
    return tuple(dict.fromkeys(parse(part) for part in text.split(",")))


def _parse_batch(text: str) -> Case:
    count, cross, size = text.partition("x")
    if not cross:
        raise ConfigError(f"batch {text!r}: want COUNTxSIZE, for example 256x64KiB")
    return Case(parse_size(size), _parse_count(count))


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) == 0:
        raise ConfigError(f"{text.strip()!r}: want a whole number, 1 or more")
    return int(text)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of copy threads worth trying on ``cores`` cores: powers of two, three quarters of them, and all."""
    powers = {1 << power for power in range(cores.bit_length())}
    return tuple(sorted(n for n in powers | {cores * 3 // 4, cores} if 1 <= n <= cores))


def check_space(cases: Sequence[Case], *, free_bytes: int, shm_dir: str) -> None:
    """Raise :class:`NoSpaceError` when the largest case does not fit into ``free_bytes``: one is there at a time."""
    for case in cases:
        wanted = case.count * -(-case.nbytes // PAGE_BYTES) * PAGE_BYTES
        if wanted > free_bytes:
            raise NoSpaceError(
                f"{shm_dir} has {bytes_text(free_bytes)} free ({free_bytes} bytes) and the case {case.label} takes "
                f"{bytes_text(wanted)} ({wanted} bytes): leave it out with --sizes or --batches, or give the folder "
                "more (mount -o remount,size=8g; docker run --shm-size=8g)"
            )
