"""Which segments were published for which worker, so that they can be taken back when it is gone. Bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Outstanding"]


class Outstanding:
    """Names of segments by the worker they are for, and the workers that are gone.

    A worker is named by its url. One that starts again has the same, and another socket: each of the two, as far as it
    has one, keeps its own segments.

    A segment that was consumed is not reported to a sender: when ``max_names`` are noted, ``is_there`` is asked about
    each, and those that are gone are forgotten; if half or more are still there, the oldest of them as well. At most
    ``max_workers`` workers are remembered to be gone. Thread-safe; never blocks but for that one round of questions.
    """

    def __init__(self, is_there: Callable[[str], bool], *, max_names: int = 1024, max_workers: int = 1024) -> None:
        self._is_there = is_there
        self._max_names = max_names
        self._max_workers = max_workers
        self._lock = threading.Lock()
        self._worker_of: OrderedDict[str, tuple[str, str]] = OrderedDict()  # url and socket
        self._gone: OrderedDict[str, None] = OrderedDict()

    def add(self, worker: str, name: str, *, socket: str = "") -> bool:
        """Note a segment. False, and nothing noted, when the worker was lost meanwhile: the segment is the caller's."""
        with self._lock:
            if worker in self._gone:
                return False
            self._worker_of[name] = (worker, socket)
            if len(self._worker_of) > self._max_names:
                self._forget_consumed()
            return True

    def discard(self, name: str) -> None:
        """Forget a segment that was taken back by its name."""
        with self._lock:
            self._worker_of.pop(name, None)

    def take(self, worker: str, *, socket: str = "") -> list[str]:
        """Forget the segments of ``worker`` at ``socket``, and return their names: the caller removes them."""
        with self._lock:
            return self._take(lambda whose: whose == (worker, socket))

    def lose(self, worker: str) -> list[str]:
        """Remember ``worker`` as gone, and do as :meth:`take`, whatever the socket."""
        with self._lock:
            self._gone[worker] = None
            self._gone.move_to_end(worker)
            if len(self._gone) > self._max_workers:
                self._gone.popitem(last=False)
            return self._take(lambda whose: whose[0] == worker)

    def find(self, worker: str) -> bool:
        """Forget that ``worker`` was gone; whether it was."""
        with self._lock:
            return self._gone.pop(worker, self) is None

    def is_gone(self, worker: str) -> bool:
        """Whether ``worker`` was lost and not found again."""
        return worker in self._gone

    def forget(self) -> None:
        """For a child after ``fork``: all of it is the parent's."""
        self._lock = threading.Lock()
        self._worker_of = OrderedDict()
        self._gone = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_of)

    def _take(self, is_theirs: Callable[[tuple[str, str]], bool]) -> list[str]:
        names = [name for name, whose in self._worker_of.items() if is_theirs(whose)]
        for name in names:
            del self._worker_of[name]
        return names

    def _forget_consumed(self) -> None:
        for name in [name for name in self._worker_of if not self._is_there(name)]:
            del self._worker_of[name]
        while len(self._worker_of) > self._max_names // 2:
            self._worker_of.popitem(last=False)
