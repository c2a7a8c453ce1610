"""Where a received tensor's bytes are read from: a segment, or the message itself.

A source reads any part of its bytes into any host buffer, and is closed once. Closing a segment's source removes the
segment: it was handed over, so it is the receiver's to remove.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from . import _native
from .errors import MmcopyError, RepeatedHandleError, SegmentNameError
from .metrics import Counter, Metrics
from .tensors import Inline, ShmHandle, TensorData

__all__ = ["InlineSource", "SegmentSource", "Source", "SourceOpener"]

_log = logging.getLogger(__name__)

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Source(Protocol):
    """The bytes of one tensor, readable in parts and in any order."""

    data: TensorData

    def read_into(self, dst: ByteArray, start: int, *, num_threads: int) -> None:
        """Fill ``dst`` with the tensor's bytes from ``start`` on. Blocks."""

    def close(self, why: str = "received") -> None:
        """Let go of the bytes; a segment is removed, and counted under ``why``. Idempotent, never raises."""


class InlineSource:
    """Bytes inside the message."""

    def __init__(self, data: TensorData, payload: Inline) -> None:
        self.data = data
        self._bytes = memoryview(payload.data).cast("B")

    def read_into(self, dst: ByteArray, start: int, *, num_threads: int) -> None:
        _native.copy_into(self._bytes[start : start + len(dst)], dst, num_threads=num_threads)

    def close(self, why: str = "received") -> None:
        pass


class SegmentSource:
    """Bytes in an open segment."""

    def __init__(self, data: TensorData, payload: ShmHandle, segment: _native.Segment, metrics: Metrics) -> None:
        self.data = data
        self._offset = payload.offset
        self._segment = segment
        self._metrics = metrics
        self._closed = False

    def read_into(self, dst: ByteArray, start: int, *, num_threads: int) -> None:
        self._segment.read_into(dst, self._offset + start, num_threads=num_threads)

    def close(self, why: str = "received") -> None:
        if not self._closed:
            self._closed = True
            remove(self._segment, why, self._metrics)


def remove(segment: _native.Segment, why: str, metrics: Metrics) -> None:
    """Unlink and close; a failure is counted and logged, never raised into a request."""
    try:
        if segment.unlink():
            metrics.count(Counter.SEGMENTS_REMOVED, why)
    except MmcopyError as error:
        metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
        _log.warning("could not remove segment %r: %s", segment.name, error)
    finally:
        segment.close()


class SourceOpener:
    """Opens what a request names, all or nothing.

    Only names that begin with one of ``accept_prefixes`` are opened, and so removed: a handle is a peer's word, and
    other programs keep files in the same directory.
    """

    def __init__(self, shm_dir: str, accept_prefixes: Sequence[str], metrics: Metrics) -> None:
        self._shm_dir = shm_dir
        self._accept_prefixes = tuple(accept_prefixes)
        self._metrics = metrics

    def open_all(self, items: Sequence[TensorData]) -> list[Source]:
        """One source an item, every segment open and long enough.

        If one cannot be opened, all the others of the request are removed and its error is raised.
        """
        sources: list[Source] = []
        names: set[str] = set()
        try:
            for item in items:
                if isinstance(item.payload, Inline):
                    sources.append(InlineSource(item, item.payload))
                    continue
                handle = item.payload
                segment = self._open(handle)
                if segment.name in names:
                    segment.close()
                    raise RepeatedHandleError(f"segment {segment.name!r} is named twice in one request")
                names.add(segment.name)
                sources.append(SegmentSource(item, handle, segment, self._metrics))
                segment.check(handle.offset, handle.nbytes)
        except BaseException:
            for source in sources:
                source.close("released")
            self.release(items[len(sources) :])
            raise
        return sources

    def release(self, items: Sequence[TensorData | ShmHandle]) -> int:
        """Remove the segments that ``items`` name, unread; how many were removed. Never raises for a bad handle."""
        removed = 0
        for handle in _handles(items):
            try:
                segment = self._open(handle)
            except MmcopyError as error:
                _log.debug("nothing to release for %r: %s", handle.name, error)
                continue
            remove(segment, "released", self._metrics)
            removed += 1
        return removed

    def _open(self, handle: ShmHandle) -> _native.Segment:
        name = _native.validate_segment_name(handle.name)
        if not name.startswith(self._accept_prefixes):
            raise SegmentNameError(
                f"segment {name!r} is refused: accepted names begin with {', '.join(self._accept_prefixes)}"
            )
        return _native.Segment.open(self._shm_dir, name)


def _handles(items: Sequence[TensorData | ShmHandle]) -> Iterator[ShmHandle]:
    for item in items:
        payload = item.payload if isinstance(item, TensorData) else item
        if isinstance(payload, ShmHandle):
            yield payload
