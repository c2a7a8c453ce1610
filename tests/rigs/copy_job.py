"""Jobs of a copy pool that read bytes and open segments, with no message around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcopy import Inline, ShmHandle, TensorData, _native

Piece = tuple[int, int, int, int, int]


def request_of(sources: Sequence[Any]) -> _native.Request:
    """A request with an item for each buffer and each open segment, which it takes over."""
    items, segments = [], []
    for source in sources:
        is_segment = isinstance(source, _native.Segment)
        segments.append(source if is_segment else None)
        if is_segment:
            payload: Inline | ShmHandle = ShmHandle(source.name, 0, source.file_nbytes)
        else:
            payload = Inline(memoryview(source).cast("B"))
        items.append(TensorData("uint8", (payload.nbytes,), payload))
    request = _native.RequestOpener("/dev/shm", [], None, timeout_s=60).request(items)
    assert [n for n in request.open_attached(segments) if segments[n] is not None] == []
    return request


def start(
    pool: _native.CopyPool, sources: Sequence[Any], slots: Sequence[Any], pieces: Sequence[Piece]
) -> _native.CopyJob:
    """A job of ``pool``; it alone keeps the sources open."""
    return start_of(pool, request_of(sources), slots, pieces)


def start_of(
    pool: _native.CopyPool, request: _native.Request, slots: Sequence[Any], pieces: Sequence[Piece]
) -> _native.CopyJob:
    """A job of ``pool`` over all items of ``request``."""
    return pool.start(request, slots, _native.ChunkTable(range(len(request.opened()[0])), pieces))


def copy_now(pool: _native.CopyPool, sources: Sequence[Any], slot: Any, pieces: Sequence[Piece]) -> None:
    """Copy one chunk on the calling thread."""
    request = request_of(sources)
    pool.copy_now(request, slot, _native.ChunkTable(range(len(sources)), pieces))
