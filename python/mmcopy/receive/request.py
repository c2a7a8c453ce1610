"""What one request has open: segments, leases and the bytes inside the message, all or nothing.

A segment's life here: opened (all of a request, or none), its name removed while it is read, closed afterwards. It was
handed over, so it is the receiver's to remove, whatever happens. A lease is claimed, read where its sender wrote it,
and released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mmcopy._native import (
    ArenaMap,
    Lease,
    Reaper,
    Segment,
    copy_into,
    lease_arena_id,
    validate_segment_name,
)
from mmcopy._native import WorkerEndpoint as NativeWorkerEndpoint
from mmcopy.errors import (
    DeviceError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyError,
    PayloadError,
    RepeatedHandleError,
    SegmentNameError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import LEASE_PREFIX, Inline, ShmHandle, TensorData

if TYPE_CHECKING:
    from mmcopy.endpoint import WorkerEndpoint

__all__ = [
    "ByteArray",
    "Described",
    "InlineSource",
    "LeaseOpener",
    "LeaseRequest",
    "LeaseSource",
    "SegmentSource",
    "Source",
    "SourceOpener",
    "flatten",
    "values_of",
]

_log = logging.getLogger(__name__)

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_ARENA_ID = slice(len(LEASE_PREFIX), len(LEASE_PREFIX) + 16)
"""Where a lease's name tells its arena; the name is checked when it is claimed."""

_STEP_BYTES = 4 << 20
"""How far a copy into host memory follows a sender that is still writing, at a time."""


class LeaseSource:
    """Bytes in an arena. ``lease`` is held until :meth:`release`, or until somebody else writes its mark.

    The sender may still be writing: only the bytes up to the watermark are the tensor's. ``address`` is where it begins
    in this process.
    """

    __slots__ = ("_request", "address", "arena", "data", "is_kept", "lease")

    offset = 0

    def __init__(self, data: TensorData, arena: ArenaMap, lease: Lease, address: int, request: LeaseRequest) -> None:
        self.data = data
        self.arena = arena
        self.lease = lease
        self.address = address
        self.is_kept = False
        """Somebody else releases it later: copies out of it are still queued."""
        self._request = request

    @property
    def native(self) -> memoryview:
        """All bytes, read-only. Blocks until the sender has written them. Raises as :meth:`wait`."""
        self.wait(self.data.nbytes)
        return memoryview(self.lease)

    def wait(self, upto: int) -> int:
        """Block until ``upto`` bytes are written; how many are. Raises :class:`LeaseAbortedError`,
        :class:`LeaseOwnerGoneError` and, at the receive's limit, :class:`LeaseTimeoutError`."""
        return self.lease.wait_written(upto, max(0.0, self._request.deadline - time.monotonic()))

    def read_into(self, dst: ByteArray, *, num_threads: int, start: int = 0) -> None:
        memory = np.frombuffer(self.lease, np.uint8)
        done = 0
        while done < len(dst):
            there = self.wait(start + min(len(dst), done + _STEP_BYTES)) - start
            there = min(len(dst), there)
            copy_into(memory[start + done : start + there], dst[done:there], num_threads=num_threads)
            done = there

    def remove(self, why: str) -> None:
        """A lease has no name that others could open."""

    def release(self) -> bool:
        """Let the sender have it back; False when that was done before, or failed, which is counted. Never raises."""
        try:
            return self.lease.release()
        except MmcopyError as error:
            self._request.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
            _log.warning("could not release lease %s: %s", self.lease.name, error)
            return False


class LeaseRequest:
    """Claims the leases of one request; they are mostly of one arena, which is looked for once."""

    def __init__(self, endpoint: NativeWorkerEndpoint | None, metrics: Metrics, *, deadline: float) -> None:
        self._endpoint = endpoint
        self.metrics = metrics
        self.deadline = deadline
        self._arenas: dict[str, tuple[ArenaMap, int]] = {}

    def open(self, data: TensorData, handle: ShmHandle) -> LeaseSource:
        """Claim a lease. Never blocks. Raises a :class:`LeaseError`, or :class:`ClosedError`."""
        arena, start = self._arenas.get(handle.name[_ARENA_ID]) or self.find(handle)
        lease = arena.claim(handle.name, handle.offset, handle.nbytes, handle.owner_id)
        return LeaseSource(data, arena, lease, start + handle.offset, self)

    def find(self, handle: ShmHandle) -> tuple[ArenaMap, int]:
        """The arena that a handle names, and where its data begins. Raises as :meth:`open`."""
        arena_id = lease_arena_id(handle.name, handle.offset, handle.nbytes, handle.owner_id)
        arena = None if self._endpoint is None else self._endpoint.find_arena(arena_id)
        if arena is None:
            why = "this receiver has no endpoint" if self._endpoint is None else "no sender that is connected has it"
            raise LeaseUnknownArenaError(f"lease {handle.name}: arena {arena_id} is not mapped here: {why}")
        self._arenas[arena_id] = (arena, arena.data_address)
        return self._arenas[arena_id]


class LeaseOpener:
    """Claims leases of the arenas that were handed over at ``endpoint``."""

    def __init__(self, endpoint: WorkerEndpoint | None, metrics: Metrics, *, timeout_s: float) -> None:
        self._endpoint = None if endpoint is None else endpoint.native
        self._metrics = metrics
        self._timeout_s = timeout_s

    def request(self) -> LeaseRequest:
        """For the leases of one request."""
        return LeaseRequest(self._endpoint, self._metrics, deadline=time.monotonic() + self._timeout_s)

    def release(self, handle: ShmHandle) -> bool:
        """Claim a lease and let go of it, unread; False when there is nothing to let go of. Never raises."""
        try:
            arena, _ = self.request().find(handle)
            if not arena.claim(handle.name, handle.offset, handle.nbytes, handle.owner_id).release():
                return False
        except MmcopyError as error:
            _log.debug("nothing to release for lease %r: %s", handle.name, error)
            return False
        self._metrics.count(Counter.LEASES_RELEASED, "released")
        return True


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


def flatten(
    items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], out: Any
) -> tuple[list[TensorData], list[Any] | None, Callable[[list[Any]], Any]]:
    """The items as a list, ``out`` in the same order, and what gives a list of results the form of ``items``.

    Raises :class:`PayloadError` for items that are none, and :class:`DeviceError` for an ``out`` of another form.
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
