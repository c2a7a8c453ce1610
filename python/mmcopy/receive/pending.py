"""A receive that runs on a thread of the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from mmcopy.config import LONGEST_S
from mmcopy.errors import MmcopyTimeoutError

__all__ = ["PendingReceive"]


class PendingReceive:
    """The tensors of one request, under way. Awaitable.

    They are safe on the stream that was current where :meth:`Receiver.receive_async` was called. Cancelling a receive
    that has not begun removes its segments unread; one that has begun goes on to its end, because a copy cannot be
    interrupted, and its tensors are dropped. Cancelling an ``await`` cancels the receive.
    """

    def __init__(self, future: Future[Any], release: Callable[[], object]) -> None:
        self._future = future
        self._release = release

    def done(self) -> bool:
        """Whether :meth:`wait` returns or raises at once. Does not block."""
        return self._future.done()

    def settle(self, timeout_s: float) -> bool:
        """Whether the receive has ended, well or not, within ``timeout_s``. Blocks so long at most."""
        done, _ = wait([self._future], timeout_s)
        return bool(done)

    def wait(self, timeout_s: float | None = None) -> Any:
        """The tensors, in the form of the items. Blocks the calling thread, ``timeout_s`` at most.

        Raises what the receive raised, and :class:`MmcopyTimeoutError` on the limit: the receive goes on then.
        """
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
        cancelled = self._future.cancel()
        if cancelled:
            self._release()
        return cancelled

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        inner = asyncio.wrap_future(self._future)
        inner.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieved, so that asyncio does not warn
        try:
            return await asyncio.shield(inner)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.cancel)
            raise
