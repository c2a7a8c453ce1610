"""The sender's arena, and tensors that are announced before all their bytes are written.

The arena is made when the first worker can take it, and handed over once per connection. Leases go to workers whose
connection stands; all others get segments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from mmcopy._native import Arena, LaterWrite, Process
from mmcopy.endpoint import SenderLink
from mmcopy.errors import ArenaError, ClosedError, MmcopyError, MmcopyTimeoutError
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import TensorData

__all__ = ["DEFAULT_ARENA_BYTES", "Reservation", "SenderArena", "StreamingSend"]

_log = logging.getLogger(__name__)

DEFAULT_ARENA_BYTES = 512 << 20
"""Eight requests of 64 MiB at once. The memory is taken when the first worker connects, and not before."""

HAND_OVER_LIMIT_S = 5.0
_POLL_S = 0.002


class SenderArena:
    """One sender's arena. Thread-safe.

    ``nbytes`` 0 switches it off. Where it cannot be made (too little memory or descriptors, a kernel without memfd)
    that is logged once, counted, and segments are used until it can.
    """

    def __init__(self, nbytes: int, *, num_threads: int, metrics: Metrics) -> None:
        self.native: Arena | None = None
        """The arena, once it was made."""
        self._nbytes = nbytes
        self._num_threads = num_threads
        self._metrics = metrics
        self._lock = threading.Lock()
        self._is_off = nbytes == 0
        self._has_warned = False

    def hand_over(self, link: SenderLink) -> int | None:
        """Give the worker at the other end of ``link`` the arena, and make it first if need be.

        Returns the worker's slot, its number as a consumer; None when there is to be no arena. Blocks for seconds at
        most, without the GIL: not for the sending path. What it raises, an :class:`MmcopyError`, is counted; it can be
        tried again.
        """
        arena = self._made()
        if arena is None:
            return None
        try:
            slot = arena.hand_over(link.native, timeout_s=HAND_OVER_LIMIT_S)
        except MmcopyError as error:
            self._metrics.count(Counter.ARENA_HAND_OVERS, type(error).__name__)
            _log.info("worker at %s takes no arena, it gets segments: %s", link.path, error)
            raise
        self._metrics.count(Counter.ARENA_HAND_OVERS, "ok")
        return slot

    def close(self, *, linger_s: float) -> None:
        """Give out nothing more. In-flight leases can be received for ``linger_s`` seconds more: blocks for them."""
        with self._lock:
            self._is_off = True
            arena, self.native = self.native, None
        if arena is None or arena.closed:
            return
        deadline = time.monotonic() + linger_s
        while arena.statistics()["leases_out"] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        arena.close(5.0)

    def forget(self) -> None:
        """For a child after ``fork``: the arena is the parent's."""
        self._lock = threading.Lock()
        self._is_off = True
        self.native = None

    def _made(self) -> Arena | None:
        with self._lock:
            if self.native is None and not self._is_off:
                try:
                    self.native = Arena(self._nbytes, num_threads=self._num_threads)
                except ArenaError as error:
                    self._metrics.count(Counter.LEASE_FALLBACKS, "no_arena")
                    level = logging.DEBUG if self._has_warned else logging.WARNING
                    _log.log(level, "no arena of %d bytes, tensors go by segments: %s", self._nbytes, error)
                    self._has_warned = True
                    raise
            return self.native


class StreamingSend:
    """A tensor that is being written. ``data`` can be sent at once; the source is in use until :meth:`wait` returns."""

    def __init__(
        self, data: TensorData, writing: LaterWrite | None, forget: Callable[[LaterWrite], object] = lambda _: None
    ) -> None:
        self.data = data
        """What goes into the message."""
        self._writing = writing
        self._forget = forget
        self._process = Process.current()

    def done(self) -> bool:
        """Whether the source may be reused. Never blocks."""
        return self._writing is None or self._is_forked or self._writing.done()

    def wait(self, timeout_s: float = 60.0) -> TensorData:
        """Block until every byte is written; :attr:`data`. From then on the source may be reused.

        Raises what the writing raised (the receiver then gets an error, too), and :class:`MmcopyTimeoutError`. In a
        forked child :class:`ClosedError` at once, because the parent writes.
        """
        if self._is_forked:
            raise ClosedError(f"process {self._process.pid} writes it, and this process was forked from that one")
        if self._writing is not None:
            if not self._writing.wait(timeout_s):
                raise MmcopyTimeoutError("send", f"{self.data.nbytes} bytes were not written within {timeout_s:g} s")
            self._forget(self._writing)
        return self.data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_forked:
            self.wait()

    @property
    def _is_forked(self) -> bool:
        return not self._process.is_current()


class Reservation:
    """Memory to write a tensor into, where the receiver reads it. A context manager: it commits, or aborts on an error.

    ``array`` is C-contiguous and writable, with what was there before in it. Use it no more after :meth:`commit`: what
    is written then can reach the receiver, or another tensor's. In a forked child it holds zeros of the child's own.
    """

    def __init__(
        self, array: np.ndarray[Any, Any], commit: Callable[[], TensorData], abort: Callable[[], None]
    ) -> None:
        self.array: np.ndarray[Any, Any] | None = array
        self._commit = commit
        self._abort = abort
        self._data: TensorData | None = None

    @property
    def data(self) -> TensorData | None:
        """What goes into the message, once it is committed."""
        return self._data

    def commit(self) -> TensorData:
        """The bytes are in place; what goes into the message. Once. Raises :class:`ClosedError` when it is over."""
        if self.array is None:
            raise ClosedError("the reservation is over: it was committed or aborted before")
        self.array = None
        self._data = self._commit()
        return self._data

    def abort(self) -> None:
        """Give the memory back. Harmless when it is over."""
        if self.array is not None:
            self.array = None
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif self.array is not None:
            self.commit()

    def __del__(self) -> None:
        # Dropped without commit: no message names it.
        if self.array is not None:
            self.array = None
            self._abort()
