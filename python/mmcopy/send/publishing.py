"""Where the bytes of one tensor are put: a segment, or the message. Leases are arena.py's."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from mmcopy._native import SegmentOwner, cast_into, sweep, unlink_segment, write_segment
from mmcopy.arrays import FlatArray
from mmcopy.config import WorkerSpec
from mmcopy.errors import (
    ClosedError,
    InlineTooLargeError,
    MmcopyError,
    NoSpaceError,
    SegmentExistsError,
    SegmentIoError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.fanout import link_consumers, names_of, owner_id_for, unlink_consumers
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import Inline, ShmHandle

from .delivery import Delivery
from .outstanding import Outstanding
from .policy import ENDPOINT_LABEL
from .reason import Reason

__all__ = ["Publisher"]

_log = logging.getLogger(__name__)

# What a failed write is counted as. Anything else is a defect, or the caller's: it is raised.
_WRITE_FAILURES: tuple[tuple[type[MmcopyError], Reason], ...] = (
    (NoSpaceError, Reason.NO_SPACE),
    (SegmentPermissionError, Reason.PERMISSION),
    (SegmentNotFoundError, Reason.NOT_FOUND),
    (SegmentExistsError, Reason.EXISTS),
    (SegmentIoError, Reason.OS_ERROR),
)


class Publisher:
    """One sender's segments, under one name on the host, and what goes inline. Thread-safe."""

    def __init__(self, shm_dir: str, *, num_threads: int, inline_max_bytes: int | None, metrics: Metrics) -> None:
        self.outstanding = self._new_outstanding(shm_dir)
        self._shm_dir = shm_dir
        self._num_threads = num_threads
        self._inline_max_bytes = inline_max_bytes
        self._metrics = metrics
        self._lock = threading.Lock()
        self._owner: SegmentOwner | None = None
        self._closed_because: str | None = None
        self._is_forked = False

    def segment(
        self,
        flat: FlatArray,
        dtype: str,
        delivery: Delivery,
        *,
        is_gone: Callable[[WorkerSpec], bool],
        consumers: int = 1,
    ) -> tuple[ShmHandle, None] | tuple[None, Reason]:
        """Write a segment, with a name for each consumer; or why there is none, which is counted and logged."""
        try:
            owner = self._owned()
            name = owner.next_name()
            written = write_segment(
                self._shm_dir,
                name,
                flat.data,
                src_dtype=flat.dtype,
                dst_dtype=dtype,
                num_threads=self._num_threads,
            )
            if consumers > 1:
                self._link(name, consumers)
        except tuple(kind for kind, _ in _WRITE_FAILURES) as error:
            reason = next(reason for kind, reason in _WRITE_FAILURES if isinstance(error, kind))
            self._metrics.count(Counter.SHM_WRITE_FAILURES, reason, runtime=delivery.runtime)
            _log.warning("a tensor goes inline, its segment could not be written: %s", error)
            return None, reason
        handle = ShmHandle(name, 0, written, owner_id_for(owner.instance_id, consumers))
        # Several receivers: nobody says here which of them gets it, or which name is whose.
        if len(delivery.receivers) == 1:
            worker, names = delivery.receivers[0], names_of(handle)
            socket = worker.labels.get(ENDPOINT_LABEL, "")
            noted = all(self.outstanding.add(worker.url, each, socket=socket) for each in names)
            if not noted or is_gone(worker):  # it went while this was written
                self._discard(names)
                self.take_back(names)
                return None, Reason.WORKER_GONE
        return handle, None

    def _link(self, name: str, consumers: int) -> None:
        try:
            link_consumers(self._shm_dir, name, consumers)
        except BaseException:
            with contextlib.suppress(MmcopyError):
                unlink_segment(self._shm_dir, name)
            raise

    def inline(self, flat: FlatArray, dtype: str, nbytes: int) -> Inline:
        """The bytes for the message. Raises :class:`InlineTooLargeError`."""
        limit = self._inline_max_bytes
        if limit is not None and nbytes > limit:
            raise InlineTooLargeError(
                f"{dtype} {list(flat.shape)} takes {nbytes} bytes inside the message, "
                f"inline_max_bytes allows {limit}: raise it, or let the transport use shared memory"
            )
        if dtype == flat.dtype:
            return Inline(flat.data.tobytes())
        cast = bytearray(nbytes)
        cast_into(flat.data, flat.dtype, cast, dtype, num_threads=self._num_threads)
        return Inline(cast)

    def cancel(self, handle: ShmHandle) -> bool:
        """Remove a segment that was not handed over, from all its consumers. True when it was still there; False in a
        forked child: it is the parent's."""
        if self._is_forked:
            return False
        self._discard(names_of(handle))
        removed = unlink_consumers(self._shm_dir, handle)
        if removed:
            self._metrics.count(Counter.SEGMENTS_REMOVED, "cancelled", removed)
        return removed > 0

    def take_back(self, names: Sequence[str]) -> int:
        """Remove segments whose worker has gone; how many were there."""
        removed = 0
        for name in names:
            try:
                removed += unlink_segment(self._shm_dir, name)
            except MmcopyError as error:
                self._metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
                _log.warning("could not take back a segment: %s", error)
        if removed:
            self._metrics.count(Counter.SEGMENTS_REMOVED, "worker_gone", removed)
        return removed

    def check_open(self) -> None:
        """Raises :class:`ClosedError`."""
        if self._closed_because is not None:
            raise ClosedError(self._closed_because)

    def close(self) -> None:
        """Give up the name on the host. Idempotent."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = "the sender is closed"
            owner, self._owner = self._owner, None
        if owner is not None:
            owner.close()

    def forget(self) -> None:
        """For a child after ``fork``: the name and the segments are the parent's."""
        self._closed_because = "the sender belongs to the process that this one was forked from"
        self._is_forked = True
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        self.outstanding.forget()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.forget()

    def _discard(self, names: Sequence[str]) -> None:
        for name in names:
            self.outstanding.discard(name)

    def _owned(self) -> SegmentOwner:
        """The sender's name on the host, taken with its first segment; what dead senders left is removed then."""
        with self._lock:
            self.check_open()
            if self._owner is None:
                names, _ = sweep(self._shm_dir)
                if names:
                    self._metrics.count(Counter.SEGMENTS_REMOVED, "swept", len(names))
                    _log.info("removed %d segments of senders that are gone", len(names))
                self._owner = SegmentOwner(self._shm_dir)
            return self._owner

    @staticmethod
    def _new_outstanding(shm_dir: str) -> Outstanding:
        return Outstanding(lambda name: os.path.lexists(os.path.join(shm_dir, name)))  # noqa: PTH118
