"""A copy stream that a test plays: what is queued happens later, in order, on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class PlayedStream:
    """Does what is queued while ``gate`` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def queue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def finish(self) -> None:
        """Open the gate, and wait until all that was queued has happened."""
        self.gate.set()
        done = threading.Event()
        self.queue(done.set)
        assert done.wait(20)

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            assert self.gate.wait(20)
            work()
