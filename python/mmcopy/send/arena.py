"""A sender's arena: made when the first worker can take it, handed over once a connection.

Leases go to workers whose connection stands; for all others there are segments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from mmcopy._native import Arena, LeaseWriter
from mmcopy.endpoint import SenderLink
from mmcopy.errors import ArenaConsumerError, ArenaError, ArenaFullError, ClosedError, ConfigError, MmcopyError
from mmcopy.metrics import Counter, Metrics

__all__ = ["DEFAULT_ARENA_BYTES", "SenderArena"]

_log = logging.getLogger(__name__)

DEFAULT_ARENA_BYTES = 512 << 20
"""Eight requests of 64 MiB at once. It is taken when the first worker connects, and not before."""

HAND_OVER_LIMIT_S = 5.0
_POLL_S = 0.002


class SenderArena:
    """Memory that is leased to workers on this host. Thread-safe.

    ``nbytes`` 0 switches it off. Where it cannot be made (too little memory or descriptors, a kernel without memfd)
    that is logged once, counted, and segments are used until it can.
    """

    def __init__(self, nbytes: int, *, num_threads: int, wait_s: float, metrics: Metrics) -> None:
        self._nbytes = nbytes
        self._num_threads = num_threads
        self._wait_s = wait_s
        self._metrics = metrics
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._is_off = nbytes == 0
        self._has_warned = False

    @property
    def native(self) -> Arena | None:
        """The arena, once it was made."""
        return self._arena

    def hand_over(self, link: SenderLink) -> int | None:
        """Give the worker at the other end of ``link`` the arena, and make it first if need be.

        Its number as a consumer; None when there is to be no arena. Blocks for seconds at most, without the GIL: not
        for the sending path. What it raises, an :class:`MmcopyError`, is counted; it can be tried again.
        """
        arena = self._made()
        if arena is None:
            return None
        try:
            consumer = arena.hand_over(link.native, timeout_s=HAND_OVER_LIMIT_S)
        except MmcopyError as error:
            self._metrics.count(Counter.ARENA_HAND_OVERS, type(error).__name__)
            _log.info("worker at %s takes no arena, it gets segments: %s", link.path, error)
            raise
        self._metrics.count(Counter.ARENA_HAND_OVERS, "ok")
        return consumer

    def take(self, sizes: Sequence[int], consumers: Sequence[int]) -> list[LeaseWriter] | None:
        """Leases side by side, one a size, for all of ``consumers``; None, and counted why, when there are none.

        Blocks, without the GIL, while the arena is full, as long as the sender was told at most.
        """
        arena = self._arena
        if arena is None:
            return None
        try:
            return arena.take(list(sizes), list(consumers), timeout_s=self._wait_s)
        except ArenaFullError as error:
            self._metrics.count(Counter.LEASE_FALLBACKS, "full")
            _log.info("no lease: %s", error)
        except (ArenaConsumerError, ConfigError, ClosedError):
            # It went between the choice and this, or while this waited for room.
            self._metrics.count(Counter.LEASE_FALLBACKS, "worker_gone")
        return None

    def cancel(self, name: str, offset: int, nbytes: int, owner_id: str) -> bool:
        """Take a lease back that was not handed over; False when it is over, or nobody's. Never blocks."""
        arena = self._arena
        return arena is not None and arena.cancel(name, offset, nbytes, owner_id)

    def close(self, *, linger_s: float) -> None:
        """Give out nothing more. Leases that are out can be received for ``linger_s`` seconds more: blocks for them."""
        with self._lock:
            self._is_off = True
            arena, self._arena = self._arena, None
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
        self._arena = None

    def _made(self) -> Arena | None:
        with self._lock:
            if self._arena is None and not self._is_off:
                try:
                    self._arena = Arena(self._nbytes, num_threads=self._num_threads)
                except ArenaError as error:
                    self._metrics.count(Counter.LEASE_FALLBACKS, "no_arena")
                    level = logging.DEBUG if self._has_warned else logging.WARNING
                    _log.log(level, "no arena of %d bytes, tensors go by segments: %s", self._nbytes, error)
                    self._has_warned = True
                    raise
            return self._arena
