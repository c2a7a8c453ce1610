"""What is measured, and in which order: plain values and pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmcopy.config import parse_count, parse_size
from mmcopy.errors import ConfigError, NoSpaceError
from mmcopy.tools.units import bytes_text

__all__ = [
    "DEFAULT_BATCHES",
    "DEFAULT_SIZES",
    "DEFAULT_SLOTS",
    "DEFAULT_SWEEP_SIZES",
    "DEFAULT_TP_SIZES",
    "Case",
    "Effort",
    "check_space",
    "parse_batches",
    "parse_counts",
    "parse_sizes",
    "thread_counts",
    "turn",
    "turn_of",
]

DEFAULT_SIZES = "64KiB,1MiB,16MiB,64MiB,256MiB,1GiB"
DEFAULT_BATCHES = "256x64KiB,64x1MiB,8x16MiB"
DEFAULT_SWEEP_SIZES = "1MiB,16MiB,64MiB,256MiB"
DEFAULT_TP_SIZES = "64KiB,1MiB,16MiB,32MiB,64MiB,128MiB,256MiB,512MiB"
DEFAULT_SLOTS = "512KiB,1MiB,2MiB,4MiB,8MiB"

NOTHING = "none"
PAGE_BYTES = 4096

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
    def shared_bytes(self) -> int:
        """Bytes that the tensors take in shared memory, each in whole pages."""
        return self.count * -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES

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


def turn_of(case: Case) -> tuple[int, int]:
    """How often a path delivers back to back in one turn: untimed, to have its caches back, and timed.

    Together 512 MiB, 2 to 8 times. Above that caches do not matter, and time does: once, timed.
    """
    deliveries = min(8, (512 << 20) // case.total_bytes)
    return (1, deliveries - 1) if deliveries > 1 else (0, 1)


def parse_sizes(text: str, *, setting: str) -> tuple[int, ...]:
    """Sizes of ``"64KiB,1m"``, each once, in the order given; none of ``"none"``. Raises :class:`ConfigError`."""
    return _listed(lambda part: parse_size(part, setting=setting, least=1), text)


def parse_batches(text: str, *, setting: str) -> tuple[Case, ...]:
    """Batches of ``"256x64KiB,8x16MiB"``, each once; none of ``"none"``. Raises :class:`ConfigError`."""

    def parse(part: str) -> Case:
        count, cross, size = part.partition("x")
        if not cross:
            raise ConfigError(f"{setting} is {part!r}, want COUNTxSIZE, for example 256x64KiB")
        return Case(parse_size(size, setting=setting, least=1), parse_count(count, setting=setting))

    return _listed(parse, text)


def parse_counts(text: str, *, setting: str) -> tuple[int, ...]:
    """Numbers of ``"1,2,8"``, each once and 1 or more. Raises :class:`ConfigError`."""
    return _listed(lambda part: parse_count(part, setting=setting), text)


def _listed(parse: Callable[[str], T], text: str) -> tuple[T, ...]:
    if text.strip().lower() == NOTHING:
        return ()
    return tuple(dict.fromkeys(parse(part) for part in text.split(",")))


def thread_counts(cores: int) -> tuple[int, ...]:
    """Numbers of copy threads worth trying on ``cores`` cores: powers of two, three quarters of them, and all."""
    powers = {1 << power for power in range(cores.bit_length())}
    return tuple(sorted(n for n in powers | {cores * 3 // 4, cores} if 1 <= n <= cores))


def check_space(cases: Sequence[Case], *, free_bytes: int, shm_dir: str) -> None:
    """Raise :class:`NoSpaceError` when the largest case does not fit into ``free_bytes``: one is there at a time."""
    for case in cases:
        wanted = case.shared_bytes
        if wanted > free_bytes:
            raise NoSpaceError(
                f"{shm_dir} has {bytes_text(free_bytes)} free ({free_bytes} bytes) and the case {case.label} takes "
                f"{bytes_text(wanted)} ({wanted} bytes): leave it out with --sizes or --batches, or give the folder "
                "more (mount -o remount,size=8g; docker run --shm-size=8g)"
            )
