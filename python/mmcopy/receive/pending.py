"""A receive that runs on a thread of the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from mmcopy._native import Process
from mmcopy.config import LONGEST_S
from mmcopy.errors import ClosedError, MmcopyTimeoutError

__all__ = ["PendingReceive"]


class PendingReceive:
    """The tensors of one request, under way. Awaitable.

    They are safe on the stream that was current where :meth:`Receiver.receive_async` was called. Cancelling a receive
    that has not begun removes its segments unread; one that has begun goes on to its end, because a copy cannot be
    interrupted, and its tensors are dropped. Cancelling an ``await`` cancels the receive. In a forked child every call
    raises :class:`ClosedError`: the thread is the parent's.
    """

    def __init__(self, future: Future[Any], release: Callable[[], object]) -> None:
        self._future = future
        self._release = release
        self._process = Process.current()

    def done(self) -> bool:
        """Whether :meth:`wait` returns or raises at once. Does not block."""
        self._check_process()
        return self._future.done()

    def settle(self, timeout_s: float) -> bool:
        """Whether the receive has ended, well or not, within ``timeout_s``. Blocks so long at most."""
        self._check_process()
        done, _ = wait([self._future], timeout_s)
        return bool(done)

    def wait(self, timeout_s: float | None = None) -> Any:
        """The tensors, in the form of the items. Blocks the calling thread, ``timeout_s`` at most.

        Raises what the receive raised, and :class:`MmcopyTimeoutError` on the limit: the receive goes on then.
        """
        self._check_process()
        if timeout_s is not None:
            timeout_s = min(timeout_s, LONGEST_S)  # infinity, for example
        try:
            return self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():  # its own error, or it ended just behind the limit
                return self._future.result()
            raise MmcopyTimeoutError("receive", f"the receive did not end within {timeout_s:g} s") from None

    @property
    def tensors(self) -> Any:
        """The tensors of a receive that is done; :class:`MmcopyTimeoutError` before."""
        return self.wait(0.0)

    def cancel(self) -> bool:
        """Give the receive up. True when it had not begun: its segments are removed unread."""
        self._check_process()
        cancelled = self._future.cancel()
        if cancelled:
            self._release()
        return cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    def _check_process(self) -> None:
        # A lock of the future may have been held at the fork, by a thread that the child does not have.
        if not self._process.is_current():
            raise ClosedError(f"process {self._process.pid} receives it, and this process was forked from that one")

    async def _awaited(self) -> Any:
        self._check_process()
        inner = asyncio.wrap_future(self._future)
        inner.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieved, so that asyncio does not warn
        try:
            return await asyncio.shield(inner)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.cancel)
            raise
