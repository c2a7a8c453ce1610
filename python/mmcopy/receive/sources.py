"""Where a received tensor's bytes are read from: a segment, a lease (leases.py), or the message itself.

A segment's life here: opened (all of a request, or none), its name removed while it is read, closed afterwards. It was
handed over, so it is the receiver's to remove, whatever happens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from mmcopy._native import Reaper, Segment, copy_into, validate_segment_name
from mmcopy.errors import (
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyError,
    RepeatedHandleError,
    SegmentNameError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import Inline, ShmHandle, TensorData

from .leases import LeaseOpener, LeaseRequest, LeaseSource

__all__ = ["ByteArray", "Described", "InlineSource", "SegmentSource", "Source", "SourceOpener"]

_log = logging.getLogger(__name__)

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_REAP_BYTES = 1 << 20
"""Below this, freeing a segment's pages takes no longer than handing it to another thread."""

_REAP_BACKLOG = 8
"""Segments that may wait to be freed. Beyond, the receiver frees by itself, so that shared memory cannot fill up."""


class Described(Protocol):
    """Anything that says which tensor it is about."""

    @property
    def data(self) -> TensorData: ...


class Source(Protocol):
    """The bytes of one tensor, readable in parts and in any order."""

    data: TensorData
    offset: int
    """Where the tensor begins in ``native``."""

    @property
    def native(self) -> Segment | memoryview:
        """What the copy threads read."""

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        """Fill ``dst`` with the tensor's bytes from ``start`` on. Blocks."""

    def remove(self, why: str) -> None:
        """A segment's name goes, and is counted under ``why``; what is open stays readable. Once; never raises."""


class InlineSource:
    """Bytes inside the message."""

    def __init__(self, data: TensorData, payload: Inline) -> None:
        self.data = data
        self.native = memoryview(payload.data).cast("B")
        self.offset = 0

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        copy_into(self.native[start : start + len(dst)], dst, num_threads=num_threads)

    def remove(self, why: str) -> None:
        pass


class SegmentSource:
    """Bytes in an open segment."""

    def __init__(self, data: TensorData, payload: ShmHandle, segment: Segment, metrics: Metrics) -> None:
        self.data = data
        self.native = segment
        self.offset = payload.offset
        self._metrics = metrics
        self._removed = False

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        self.native.read_into(dst, self.offset + start, num_threads=num_threads)

    def remove(self, why: str) -> None:
        if not self._removed:
            self._removed = True
            remove(self.native, why, self._metrics)


def remove(segment: Segment, why: str, metrics: Metrics) -> None:
    """Unlink; a failure is counted and logged, never raised into a request."""
    try:
        if segment.unlink():
            metrics.count(Counter.SEGMENTS_REMOVED, why)
    except MmcopyError as error:
        metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
        _log.warning("could not remove segment %r: %s", segment.name, error)


class SourceOpener:
    """Opens what a request names, all or nothing, and closes it.

    Only names that begin with one of ``accept_prefixes`` are opened, and so removed: a handle is a peer's word, and
    other programs keep files in the same directory.
    """

    def __init__(
        self, shm_dir: str, accept_prefixes: Sequence[str], metrics: Metrics, *, leases: LeaseOpener | None = None
    ) -> None:
        self._shm_dir = shm_dir
        self._accept_prefixes = tuple(accept_prefixes)
        self._metrics = metrics
        self._leases = leases or LeaseOpener(None, metrics, timeout_s=0.0)
        self._reaper = Reaper()

    def open_all(self, items: Sequence[TensorData]) -> list[Source]:
        """One source an item, every segment open and long enough.

        If one cannot be opened, all the others of the request are removed and its error is raised.
        """
        sources: list[Source] = []
        names: set[str] = set()
        leases = self._leases.request()
        try:
            for item in items:
                self._open_one(item, sources, names, leases)
        except BaseException:
            self.close(sources, "released")
            self.release(items[len(sources) :])
            raise
        return sources

    def open_reachable(self, items: Sequence[TensorData], opened: list[Source]) -> dict[int, MmcopyError]:
        """Open what there is here, and remove nothing, not on an error either: others may still want to open it.

        Adds the sources to ``opened``, in order, and returns the index and the error of each item whose segment is not
        here or may not be opened, whose arena is not mapped here, or whose lease is not for this consumer. Any other
        error is raised; what is in ``opened`` then is the caller's to close.
        """
        missing: dict[int, MmcopyError] = {}
        names: set[str] = set()
        leases = self._leases.request()
        for n, item in enumerate(items):
            try:
                self._open_one(item, opened, names, leases)
            except (SegmentNotFoundError, SegmentPermissionError, LeaseUnknownArenaError, LeaseForgedError) as error:
                missing[n] = error.with_traceback(None)  # which refers to `missing`, and would keep all of this
        return missing

    def close(self, sources: Sequence[Source], why: str) -> None:
        """Remove what is not removed yet, and let go of all. The pages of large segments are freed on another thread,
        so that this does not block for them."""
        segments = []
        nbytes = released = 0
        for source in sources:
            source.remove(why)
            if isinstance(source, SegmentSource):
                segments.append(source.native)
                nbytes += source.native.file_nbytes
            elif isinstance(source, LeaseSource) and not source.is_kept:
                released += source.release()
        if released:
            self._metrics.count(Counter.LEASES_RELEASED, why, released)
        if nbytes >= _REAP_BYTES and self._reaper.pending <= _REAP_BACKLOG:
            self._reaper.close_later(segments)
        else:
            for segment in segments:
                segment.close()

    def release(self, items: Sequence[TensorData | ShmHandle]) -> int:
        """Remove the segments and release the leases that ``items`` name, unread; how many. Never raises for a bad
        handle."""
        removed = 0
        for handle in _handles(items):
            if handle.is_lease:
                removed += self._leases.release(handle)
                continue
            try:
                segment = self._open(handle)
            except MmcopyError as error:
                _log.debug("nothing to release for %r: %s", handle.name, error)
                continue
            remove(segment, "released", self._metrics)
            segment.close()
            removed += 1
        return removed

    def join(self, timeout_s: float) -> bool:
        """Wait until all that was closed is freed; False when the limit comes first."""
        return self._reaper.join(timeout_s)

    def _open_one(self, item: TensorData, sources: list[Source], names: set[str], leases: LeaseRequest) -> None:
        handle = item.payload
        if isinstance(handle, Inline):
            sources.append(InlineSource(item, handle))
            return
        if handle.is_lease:
            sources.append(leases.open(item, handle))
            return
        segment = self._open(handle)
        if segment.name in names:
            segment.close()
            raise RepeatedHandleError(f"segment {segment.name!r} is named twice in one request")
        names.add(segment.name)
        sources.append(SegmentSource(item, handle, segment, self._metrics))
        segment.check(handle.offset, handle.nbytes)

    def _open(self, handle: ShmHandle) -> Segment:
        name = validate_segment_name(handle.name)
        if not name.startswith(self._accept_prefixes):
            raise SegmentNameError(
                f"segment {name!r} is refused: accepted names begin with {', '.join(self._accept_prefixes)}"
            )
        return Segment.open(self._shm_dir, name)


def _handles(items: Sequence[TensorData | ShmHandle]) -> Iterator[ShmHandle]:
    for item in items:
        payload = item.payload if isinstance(item, TensorData) else item
        if isinstance(payload, ShmHandle):
            yield payload
