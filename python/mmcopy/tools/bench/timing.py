"""Paths are timed in turns: each is checked once, warmed up once, and then takes its place in every round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from .load import Load
from .paths import Path
from .plan import Effort, turn

__all__ = ["measure", "take_turns"]

P = TypeVar("P")
T = TypeVar("T")


def take_turns(
    paths: Sequence[P],
    *,
    check: Callable[[P], object],
    deliver: Callable[[P], T],
    is_enough: Callable[[int, float], bool],
    poll: Callable[[], None] = lambda: None,
) -> list[list[T]]:
    """What ``deliver`` returned in every round, path by path, with Python's garbage collector switched off.

    Args:
        paths: What is compared.
        check: Delivers once and compares the bytes. Nothing is timed when it raises.
        deliver: Delivers once, and times it.
        is_enough: Of the rounds so far and the seconds they took.
        poll: Called where stopping leaves nothing behind; may raise.
    """
    for path in paths:
        poll()
        check(path)
    found: list[list[T]] = [[] for _ in paths]
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for path in paths:
            poll()
            deliver(path)
        started, rounds = time.perf_counter(), 0
        while not is_enough(rounds, time.perf_counter() - started):
            for number in turn(range(len(paths)), rounds):
                poll()
                found[number].append(deliver(paths[number]))
            rounds += 1
    finally:
        if was_enabled:
            gc.enable()
    return found


def measure(
    paths: Sequence[Path], load: Load, effort: Effort, *, poll: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every round, by path's name: from the call until the device is synchronised, and nothing else runs.

    First each path delivers new bytes, which are compared with the load's: a wrong one is :class:`BytesDifferError`.
    """

    def deliver(path: Path, *, check: bool = False) -> float:
        with path.message() as message:
            load.place.synchronize()
            start = time.perf_counter()
            arrays = path.receive(message)
            load.place.synchronize()
            seconds = time.perf_counter() - start
            if check:
                load.check(arrays, path=path.name)
            del arrays
        return seconds

    def check(path: Path) -> None:
        load.change()
        deliver(path, check=True)

    seconds = take_turns(paths, check=check, deliver=deliver, is_enough=effort.is_enough, poll=poll)
    return {path.name: times for path, times in zip(paths, seconds, strict=True)}
