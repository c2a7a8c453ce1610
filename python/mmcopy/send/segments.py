"""Segments: one file in shared memory per tensor, under one name per sender."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable, Sequence

from mmcopy._native import Process, SegmentOwner, Sweeper, unlink_segment
from mmcopy.errors import (
    ClosedError,
    MmcopyError,
    NoSpaceError,
    SegmentError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.fanout import link_consumers, owner_id_for, unlink_consumers
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import ShmHandle, TensorData

from .outgoing import Outgoing
from .routing import Reason

__all__ = ["SegmentWriter"]

_log = logging.getLogger(__name__)

_SEGMENTS_TRIED = 4
_FORKED = "the sender belongs to the process that this one was forked from"

# What a failed write is counted as, by the error's class.
_WRITE_FAILURES: tuple[tuple[type[SegmentError], Reason], ...] = (
    (NoSpaceError, Reason.NO_SPACE),
    (SegmentPermissionError, Reason.PERMISSION),
    (SegmentNotFoundError, Reason.NOT_FOUND),
    (SegmentError, Reason.OS_ERROR),
)


class SegmentWriter:
    """The segments of one sender. Thread-safe; after ``fork`` the child's copy is closed and owns nothing."""

    def __init__(self, shm_dir: str, *, num_threads: int, metrics: Metrics) -> None:
        self.closed_because: str | None = None
        """Why nothing is written any more; None while it is open."""
        self._shm_dir = shm_dir
        self._num_threads = num_threads
        self._metrics = metrics
        self._lock = threading.Lock()
        self._owner: SegmentOwner | None = None
        self._process = Process.current()
        self._has_warned = False
        self.sweeper = Sweeper(shm_dir)
        """Removes what senders that are gone left, when that is due; every send starts it."""
        found = self.sweeper.sweep_if_due()
        if found is not None:
            self.count_swept(found)

    def count_swept(self, found: tuple[int, int, int, str]) -> None:
        """Count and log what :attr:`sweeper` has found."""
        swept, nbytes, failures, last_failure = found
        if swept:
            self._metrics.count(Counter.SEGMENTS_REMOVED, "swept", swept)
            _log.info("unlinked %d segments, %d bytes, of senders that are gone", swept, nbytes)
        if failures:
            self._metrics.count(Counter.REMOVE_FAILURES, "swept", failures)
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "%d leftovers of other senders stay, the last: %s", failures, last_failure)
            self._has_warned = True

    def write(self, tensor: Outgoing, *, consumers: int, runtime: str) -> TensorData | Reason:
        """Write a segment with a name for each of ``consumers``; or the reason why that failed, counted and logged."""
        flat, dtype, _ = tensor
        try:
            owner = self._owned()
            write = functools.partial(
                owner.write, flat.array, src_dtype=flat.dtype, dst_dtype=dtype, num_threads=self._num_threads
            )
            name, nbytes = write() if consumers == 1 else self._linked(write, consumers)
        except SegmentError as error:  # any other error is a defect, or the caller's
            reason = next(reason for kind, reason in _WRITE_FAILURES if isinstance(error, kind))
            if error.errno == errno.EEXIST:
                reason = Reason.EXISTS
            self._metrics.count(Counter.SHM_WRITE_FAILURES, reason, runtime=runtime)
            _log.warning("a tensor goes inline, its segment could not be written: %s", error)
            return reason
        return TensorData(dtype, flat.shape, ShmHandle(name, 0, nbytes, owner_id_for(owner.instance_id, consumers)))

    def check_process(self) -> None:
        """Raise :class:`ClosedError` in a forked child."""
        if not self._process.is_current():
            raise ClosedError(_FORKED)

    def cancel(self, handle: ShmHandle) -> bool:
        """Unlink a segment that was not handed over, for all its consumers. True when it was still there. Raises
        :class:`ClosedError` in a forked child: it is the parent's."""
        removed = unlink_consumers(self._shm_dir, handle, self._process)
        if removed:
            self._metrics.count(Counter.SEGMENTS_REMOVED, "cancelled", removed)
        return removed > 0

    def unlink(self, names: Sequence[str]) -> int:
        """Unlink segments whose worker is down; how many were there. A failure is counted and logged."""
        removed = 0
        for name in names:
            try:
                removed += unlink_segment(self._shm_dir, name, self._process)
            except MmcopyError as error:
                self._metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
                _log.warning("could not unlink a segment: %s", error)
        if removed:
            self._metrics.count(Counter.SEGMENTS_REMOVED, "worker_gone", removed)
        return removed

    def close(self) -> None:
        """Give up the sender's name on the host. Idempotent."""
        with self._lock:
            if self.closed_because is None:
                self.closed_because = "the sender is closed"
            owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()

    def forget(self) -> None:
        """For a child after ``fork``: the name and the segments are the parent's."""
        self.closed_because = _FORKED
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        self._owner = None

    def _linked(self, write: Callable[[], tuple[str, int]], consumers: int) -> tuple[str, int]:
        """A segment with names for all its consumers. Another user who sees its first name could take a further one."""
        for left in reversed(range(_SEGMENTS_TRIED)):
            name, nbytes = write()
            try:
                link_consumers(self._shm_dir, name, consumers)
                break
            except BaseException as error:
                with contextlib.suppress(MmcopyError):
                    unlink_segment(self._shm_dir, name, self._process)
                if left == 0 or not isinstance(error, SegmentError) or error.errno != errno.EEXIST:
                    raise
        return name, nbytes

    def _owned(self) -> SegmentOwner:
        """The sender's name on the host, taken with its first segment."""
        with self._lock:
            if self.closed_because is not None:
                raise ClosedError(self.closed_because)
            if self._owner is None:
                self._owner = SegmentOwner(self._shm_dir)
            return self._owner
