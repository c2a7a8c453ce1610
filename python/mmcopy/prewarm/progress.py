"""How far a prewarm has come: a bar at a terminal, where rich is installed; log lines say the same elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from .inputs import Shape
from .readiness import Readiness

__all__ = ["Step", "following"]

Step: TypeAlias = Callable[[Shape, int, int], None]

_log = logging.getLogger("mmcopy.prewarm")


@contextlib.contextmanager
def following(readiness: Readiness, total: int, *, bar: bool) -> Iterator[Step]:
    """What to call with each shape that begins, how many are done, and of how many.

    After the block it does nothing: a thread that was left behind there must not make a ready worker warming again.
    """
    lock, ended = threading.Lock(), False

    def step(shape: Shape, done: int, total: int) -> None:
        with lock:
            if ended:
                return
            readiness.warming(str(shape), modality=shape.modality, done=done, total=total)
        _log.info("%s begins, %d of %d done", shape, done, total)

    try:
        with _drawn(step, total, bar=bar) as drawn:
            yield drawn
    finally:
        with lock:
            ended = True


@contextlib.contextmanager
def _drawn(step: Step, total: int, *, bar: bool) -> Iterator[Step]:
    """``step``, with a bar where there is a place for one."""
    if not bar or not total or not sys.stderr.isatty():
        yield step
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield step
        return
    columns = (
        TextColumn("prewarm"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[shape]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("prewarm", total=total, shape="")

        def draw(shape: Shape, done: int, total: int) -> None:
            progress.update(task, completed=done, shape=str(shape))
            step(shape, done, total)

        yield draw
