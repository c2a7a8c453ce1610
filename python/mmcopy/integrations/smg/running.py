"""The calls that a worker serves right now, so that ``Abort`` and ``stop`` can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Call", "RunningCalls"]


class Call:
    """One call, and the task that serves it."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self._aborted = False

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self.task.cancel()

    def take_back_abort(self) -> bool:
        """After a CancelledError: whether it was only :meth:`abort`, so that the task may go on and say so."""
        if not self._aborted:
            return False
        self._aborted = False
        return self.task.uncancel() == 0


class RunningCalls:
    """Used on the event loop only. A request id need not be unique: a repeated request has the same one."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Call]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    @contextmanager
    def entered(self, request_id: str) -> Iterator[Call]:
        """The current task's call, registered inside the block."""
        task = asyncio.current_task()
        assert task is not None
        call = Call(task)
        self._calls.setdefault(request_id, []).append(call)
        try:
            yield call
        finally:
            calls = self._calls[request_id]
            calls.remove(call)
            if not calls:
                del self._calls[request_id]

    def abort(self, request_id: str) -> bool:
        """Cancel every call of ``request_id``; False when there is none."""
        calls = self._calls.get(request_id, [])
        for call in calls:
            call.abort()
        return bool(calls)

    async def wait(self, timeout_s: float) -> int:
        """Wait until the calls that run now have ended; how many have not after ``timeout_s``."""
        tasks = {call.task for calls in self._calls.values() for call in calls}
        if not tasks:
            return 0
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        return len(pending)
