"""Checks every path's bytes, and then times the paths in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from .load import Load
from .paths import Path
from .plan import Effort, turn

__all__ = ["measure"]


def measure(
    paths: Sequence[Path], load: Load, effort: Effort, *, poll: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every round, by path's name.

    First each path delivers once and its bytes are compared with the load's, which are new for each path; a wrong
    byte is :class:`BytesDifferError`, and nothing is timed. Then one round warms up. Time runs from the call until
    the device is synchronised; nothing else runs. Python's garbage collector rests. ``poll`` is called where stopping
    leaves nothing behind, and may raise.
    """
    for path in paths:
        poll()
        load.change()
        _deliver(path, load, check=True)
    seconds: dict[str, list[float]] = {path.name: [] for path in paths}
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for path in paths:
            poll()
            _deliver(path, load)
        started, rounds = time.perf_counter(), 0
        while not effort.is_enough(rounds, time.perf_counter() - started):
            for path in turn(paths, rounds):
                poll()
                seconds[path.name].append(_deliver(path, load))
            rounds += 1
    finally:
        if was_enabled:
            gc.enable()
    return seconds


def _deliver(path: Path, load: Load, *, check: bool = False) -> float:
    """Publish, receive, settle; the seconds that receiving took. The message is taken back when that fails."""
    message = path.publish()
    try:
        load.place.synchronize()
        start = time.perf_counter()
        arrays = path.receive(message)
        load.place.synchronize()
        seconds = time.perf_counter() - start
        if check:
            load.check(arrays, path=path.name)
        del arrays
    except BaseException:
        path.cancel(message)
        raise
    path.settle(message)
    return seconds
