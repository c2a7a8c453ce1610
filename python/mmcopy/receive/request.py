"""What one receive has open: the segments, leases and inline bytes of its items.

A segment was handed over, so it is the receiver's to unlink, on success and on error alike. The order is: open (all
items, or none), unlink the names behind the first copy, close. A lease is claimed, read where its sender wrote it, and
released, by the host or by a release flag behind the last copy out of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mmcopy._native import ArenaMap, Lease, Reaper, Segment, copy_into, lease_arena_id, validate_segment_name
from mmcopy._native import WorkerEndpoint as NativeWorkerEndpoint
from mmcopy.config import check_accepted
from mmcopy.errors import (
    DeviceError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyError,
    PayloadError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import LEASE_PREFIX, Inline, ShmHandle, TensorData

if TYPE_CHECKING:
    from mmcopy.endpoint import WorkerEndpoint

__all__ = [
    "ByteArray",
    "InlineSource",
    "LeaseSource",
    "Request",
    "RequestOpener",
    "SegmentSource",
    "Source",
    "flatten",
    "totals_by_path",
    "values_of",
]

_log = logging.getLogger(__name__)

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_ARENA_ID = slice(len(LEASE_PREFIX), len(LEASE_PREFIX) + 16)
"""Where a lease's name has its arena's id; the whole name is checked when the lease is claimed."""

_FOLLOW_BYTES = 4 << 20
"""How far one host copy follows a sender that is still writing."""

_REAP_BYTES = 1 << 20
"""Below this, freeing a segment's pages takes no longer than handing it to another thread."""

_REAP_BACKLOG = 8
"""Segments that may wait to be freed. Beyond that the receiver frees them itself: shared memory cannot fill up."""


class Source(Protocol):
    """The bytes of one tensor, readable in any extents and any order."""

    data: TensorData
    offset: int
    """Where the tensor begins in ``native``."""

    @property
    def native(self) -> Segment | memoryview:
        """What the copy threads read."""

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        """Fill ``dst`` with the tensor's bytes from ``start`` on. Blocks."""


class InlineSource:
    """Bytes inside the message."""

    __slots__ = ("data", "native")

    offset = 0

    def __init__(self, data: TensorData, payload: Inline) -> None:
        self.data = data
        self.native = memoryview(payload.data).cast("B")

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        copy_into(self.native[start : start + len(dst)], dst, num_threads=num_threads)


class SegmentSource:
    """Bytes in an open segment."""

    __slots__ = ("data", "native", "offset")

    def __init__(self, data: TensorData, segment: Segment, offset: int) -> None:
        self.data = data
        self.native = segment
        self.offset = offset

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        self.native.read_into(dst, self.offset + start, num_threads=num_threads)


class LeaseSource:
    """Bytes in an arena, from ``address`` on in this process.

    The sender may still be writing: only the bytes up to the watermark are the tensor's.
    """

    __slots__ = ("_request", "address", "arena", "data", "is_kept", "lease")

    offset = 0

    def __init__(self, data: TensorData, arena: ArenaMap, lease: Lease, address: int, request: Request) -> None:
        self.data = data
        self.arena = arena
        self.lease = lease
        self.address = address
        self.is_kept = False
        """Closing the request does not release it: copies out of it are queued, and it is released behind them."""
        self._request = request

    @property
    def native(self) -> memoryview:
        """All bytes, read-only. Blocks until the sender has written them. Raises as :meth:`wait`."""
        self.wait(self.data.nbytes)
        return memoryview(self.lease)

    def wait(self, upto: int) -> int:
        """Block until ``upto`` bytes are written; return how many are. Raises :class:`LeaseError` and, at the receive's
        limit, :class:`MmcopyTimeoutError`."""
        return self.lease.wait_written(upto, max(0.0, self._request.deadline - time.monotonic()))

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        memory = np.frombuffer(self.lease, np.uint8)
        done = 0
        while done < len(dst):
            there = self.wait(start + min(len(dst), done + _FOLLOW_BYTES)) - start
            there = min(len(dst), there)
            copy_into(memory[start + done : start + there], dst[done:there], num_threads=num_threads)
            done = there

    def release(self) -> bool:
        """Give the lease back to its sender; False when that was done before, or failed, which is counted. Never
        raises."""
        try:
            return self.lease.release()
        except MmcopyError as error:
            self._request.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
            _log.warning("could not release lease %s: %s", self.lease.name, error)
            return False


class RequestOpener:
    """Opens requests: segments in ``shm_dir`` by name, leases of the arenas that came to ``endpoint``.

    Only names that begin with one of ``accept_prefixes`` are opened, and so unlinked: a handle is a peer's word, and
    other programs keep files in the same directory. ``timeout_s`` limits how long a request waits for senders that
    are still writing.
    """

    def __init__(
        self,
        shm_dir: str,
        accept_prefixes: Sequence[str],
        metrics: Metrics,
        *,
        endpoint: WorkerEndpoint | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.shm_dir = shm_dir
        self.metrics = metrics
        self.endpoint: NativeWorkerEndpoint | None = None if endpoint is None else endpoint.native
        self.timeout_s = timeout_s
        self.reaper = Reaper()
        self._accept_prefixes = tuple(accept_prefixes)

    def request(self, items: Sequence[TensorData]) -> Request:
        """A request with nothing open yet."""
        return Request(self, items)

    def open_segment(self, handle: ShmHandle) -> Segment:
        """Open the segment that ``handle`` names. Raises a :class:`SegmentError`."""
        name = validate_segment_name(handle.name)
        check_accepted(name, self._accept_prefixes)
        return Segment.open(self.shm_dir, name)

    def find_arena(self, handle: ShmHandle) -> ArenaMap:
        """The arena of a lease. Raises a :class:`LeaseError`, or :class:`ClosedError`."""
        arena_id = lease_arena_id(handle.name, handle.offset, handle.nbytes, handle.owner_id)
        arena = None if self.endpoint is None else self.endpoint.find_arena(arena_id)
        if arena is None:
            why = "this receiver has no endpoint" if self.endpoint is None else "no sender that is connected has it"
            raise LeaseUnknownArenaError(f"lease {handle.name}: arena {arena_id} is not mapped here: {why}")
        return arena

    def unlink(self, segment: Segment, why: str) -> None:
        """Remove a segment's name. A failure is counted and logged, never raised into a request."""
        try:
            if segment.unlink():
                self.metrics.count(Counter.SEGMENTS_REMOVED, why)
        except MmcopyError as error:
            self.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
            _log.warning("could not remove segment %r: %s", segment.name, error)

    def release(self, items: Iterable[TensorData | ShmHandle]) -> int:
        """Unlink the segments and release the leases that ``items`` name, unread; return how many. Never raises for a
        bad handle."""
        released = 0
        for item in items:
            handle = item.payload if isinstance(item, TensorData) else item
            if not isinstance(handle, ShmHandle):
                continue
            try:
                if not handle.is_lease:
                    with self.open_segment(handle) as segment:
                        self.unlink(segment, "released")
                    released += 1
                elif (
                    self.find_arena(handle).claim(handle.name, handle.offset, handle.nbytes, handle.owner_id).release()
                ):
                    self.metrics.count(Counter.LEASES_RELEASED, "released")
                    released += 1
            except MmcopyError as error:
                _log.debug("nothing to release for %r: %s", handle.name, error)
        return released

    def join(self, timeout_s: float) -> bool:
        """Wait until all that was closed is freed; False when the limit comes first."""
        return self.reaper.join(timeout_s)


class Request:
    """The items of one receive, and what is open of them.

    ``sources`` and ``sizes`` have one entry for each item that is open, in order; after :meth:`open_all` that is every
    item. ``leases`` are the indices of those sources that are leases. Call :meth:`close` in any case.
    """

    __slots__ = (
        "_arenas",
        "_named",
        "_names",
        "_opener",
        "deadline",
        "items",
        "leases",
        "metrics",
        "missing",
        "sizes",
        "sources",
    )

    def __init__(self, opener: RequestOpener, items: Sequence[TensorData]) -> None:
        self.items = items
        self.sources: list[Source] = []
        self.sizes: list[int] = []
        self.leases: list[int] = []
        self.missing: dict[int, MmcopyError] = {}
        self.deadline = time.monotonic() + opener.timeout_s
        self.metrics = opener.metrics
        self._opener = opener
        self._named: list[Segment] = []  # those that are open and not unlinked
        self._names: set[str] = set()
        self._arenas: dict[str, tuple[ArenaMap, int]] = {}  # by id: each with the address of its data

    def open_all(self) -> None:
        """Open every item: all segments exist and are long enough, all leases are claimed. Does not block for senders.

        Raises the error of the first item that cannot be opened.
        """
        for item in self.items:
            self._open(item)

    def open_reachable(self) -> None:
        """Open what can be opened here. ``missing`` gets the index and the error of each item whose segment is not
        here or may not be opened, whose arena is not mapped here, or whose lease is not for this consumer.

        Unlinks nothing, not on an error either: other ranks may still want to open it. Any other error is raised.
        """
        for n, item in enumerate(self.items):
            try:
                self._open(item)
            except (SegmentNotFoundError, SegmentPermissionError, LeaseUnknownArenaError, LeaseForgedError) as error:
                self.missing[n] = error.with_traceback(None)  # which refers to this request, and would keep all of it

    def add_inline(self, item: TensorData, payload: Inline) -> None:
        """Add an item whose bytes are in the message."""
        source = InlineSource(item, payload)
        self.sources.append(source)
        self.sizes.append(source.native.nbytes)

    def add_segment(self, item: TensorData, segment: Segment) -> None:
        """Take over an open segment that has the bytes of ``item``."""
        handle = item.payload
        assert isinstance(handle, ShmHandle)
        self._named.append(segment)
        self.sources.append(SegmentSource(item, segment, handle.offset))
        self.sizes.append(handle.nbytes)

    def select(self, sources: Sequence[Source]) -> Request:
        """A request of these sources alone, some of which may come from elsewhere. They stay this one's to close."""
        part = Request(self._opener, [source.data for source in sources])
        part.sources = list(sources)
        part.sizes = [source.data.nbytes for source in sources]
        part.leases = [n for n, source in enumerate(sources) if isinstance(source, LeaseSource)]
        part._arenas = self._arenas
        return part

    def by_item(self) -> dict[int, Source]:
        """The sources by the index of their item."""
        here = (n for n in range(len(self.items)) if n not in self.missing)
        return dict(zip(here, self.sources, strict=True))

    def readable_in_place(self, is_registered: Callable[[ArenaMap], bool]) -> tuple[int, ...]:
        """The indices of the leases whose arena ``is_registered``."""
        arenas = [arena for arena, _ in self._arenas.values() if is_registered(arena)]
        if len(arenas) == len(self._arenas):
            return tuple(self.leases)
        return tuple(n for n in self.leases if self.sources[n].arena in arenas)  # type: ignore[attr-defined]

    def unlink(self, why: str = "received") -> None:
        """Remove the names of the segments; what is open stays readable. Once; never raises."""
        named, self._named = self._named, []
        for segment in named:
            self._opener.unlink(segment, why)

    def close(self, why: str) -> None:
        """Unlink what still has a name, release the leases and close the segments; for ``why="released"`` also release
        the items that are not open. Never raises.

        Leases of which copies are queued stay, and are released behind those. The pages of large segments are freed on
        another thread. The sources go: an error's traceback refers to this object, and would keep their memory.
        """
        self.unlink(why)
        sources, self.sources = self.sources, []
        if self.leases:
            released = 0
            for n in self.leases:
                source = sources[n]
                if not source.is_kept:  # type: ignore[attr-defined]
                    released += source.release()  # type: ignore[attr-defined]
            if released:
                self.metrics.count(Counter.LEASES_RELEASED, why, released)
        if len(self.leases) < len(sources):
            self._close_segments([source.native for source in sources if isinstance(source, SegmentSource)])
        if why == "released":
            num_tried = len(sources) + len(self.missing)
            self._opener.release(
                item for n, item in enumerate(self.items) if n >= num_tried or n in self.missing
            )  # fmt: skip
        self.leases, self.missing = [], {}

    def _open(self, item: TensorData) -> None:
        handle = item.payload
        if isinstance(handle, Inline):
            self.add_inline(item, handle)
        elif handle.name.startswith(LEASE_PREFIX):
            arena, start = self._arenas.get(handle.name[_ARENA_ID]) or self._find(handle)
            lease = arena.claim(handle.name, handle.offset, handle.nbytes, handle.owner_id)
            self.leases.append(len(self.sources))
            self.sources.append(LeaseSource(item, arena, lease, start + handle.offset, self))
            self.sizes.append(handle.nbytes)
        else:
            segment = self._opener.open_segment(handle)
            if segment.name in self._names:
                segment.close()
                raise PayloadError(f"segment {segment.name!r} is named twice in one request")
            self._names.add(segment.name)
            self.add_segment(item, segment)
            segment.check(handle.offset, handle.nbytes)

    def _find(self, handle: ShmHandle) -> tuple[ArenaMap, int]:
        arena = self._opener.find_arena(handle)
        found = self._arenas[handle.name[_ARENA_ID]] = (arena, arena.data_address)
        return found

    def _close_segments(self, segments: list[Segment]) -> None:
        reaper = self._opener.reaper
        if sum(segment.file_nbytes for segment in segments) >= _REAP_BYTES and reaper.pending <= _REAP_BACKLOG:
            reaper.close_later(segments)
        else:
            for segment in segments:
                segment.close()


def totals_by_path(items: Iterable[TensorData]) -> dict[str, tuple[int, int]]:
    """How many tensors and bytes come inline, in segments and in leases."""
    totals: dict[str, tuple[int, int]] = {}
    for item in items:
        payload = item.payload
        if isinstance(payload, Inline):
            path = "inline"
        else:
            path = "lease" if payload.name.startswith(LEASE_PREFIX) else "segment"
        count, nbytes = totals.get(path, (0, 0))
        totals[path] = count + 1, nbytes + payload.nbytes
    return totals


def flatten(
    items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], out: Any
) -> tuple[list[TensorData], list[Any] | None, Callable[[list[Any]], Any]]:
    """The items as a list, ``out`` in the same order, and what gives a list of results the form of ``items``.

    Raises :class:`PayloadError` for an item that is not a :class:`TensorData`, and :class:`DeviceError` for an ``out``
    of another form.
    """
    if isinstance(items, TensorData):
        return [items], None if out is None else [out], lambda results: results[0]
    flat = values_of(items)
    for n, item in enumerate(flat):
        if not isinstance(item, TensorData):
            raise PayloadError(f"item {n} of {len(flat)} is {type(item).__name__}, want a TensorData")
    if isinstance(items, Mapping):
        keys = list(items)
        if out is not None and (not isinstance(out, Mapping) or set(out) != set(keys)):
            given = sorted(map(str, out)) if isinstance(out, Mapping) else type(out).__name__
            raise DeviceError(f"out has the keys {given}, items has {sorted(map(str, keys))}")
        flat_out = None if out is None else [out[key] for key in keys]
        return flat, flat_out, lambda results: dict(zip(keys, results, strict=True))
    if out is not None and not isinstance(out, Sequence):
        raise DeviceError(f"out is {type(out).__name__}, want a sequence of {len(items)} tensors as items is one")
    if out is not None and len(out) != len(items):
        raise DeviceError(f"out has {len(out)} tensors, items has {len(items)}")
    return flat, None if out is None else list(out), lambda results: results


def values_of(items: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
    """What a mapping or a sequence holds, in order. Raises :class:`PayloadError` for what is neither."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise PayloadError(f"items is {type(items).__name__}, want a TensorData, or a mapping or a sequence of them")
    return list(items.values() if isinstance(items, Mapping) else items)
