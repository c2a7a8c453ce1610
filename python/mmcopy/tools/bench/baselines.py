"""Plain code without mmcopy, one small function each.

Each takes the messages of one request, returns one new array per tensor, and leaves no segment behind. The docstring
says whether it blocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from .place import ByteArray, Place

__all__ = ["Named", "inline", "pageable", "publish_shared_memory", "shared_memory_staged", "unlink_shared_memory"]

Named = tuple[str, int]
"""A segment's name and the bytes in it."""


def shared_memory_staged(place: Place, segments: Sequence[Named], *, shm_dir: str) -> list[Any]:
    """SharedMemory, a pinned staging buffer, an asynchronous copy, unlink: how serving engines do it with torch.

    The staging buffer is allocated in the request. torch caches pinned memory that was freed, so that only the first
    request of a size pins any. The copy is queued; the unlink runs beside it. In host memory the staging buffer, not
    pinned, is the result.
    """
    arrays = []
    for name, nbytes in segments:
        staging = place.host(nbytes)
        with closing(_attach(name)) as memory:
            place.fill(staging, place.view(memory.buf, nbytes))
            arrays.append(place.upload_async(staging))
        os.unlink(os.path.join(shm_dir, name))  # noqa: PTH108, PTH118 - timed: pathlib costs more than the call
    return arrays


def pageable(place: Place, segments: Sequence[Named], *, shm_dir: str) -> list[Any]:
    """The mapping copied straight to the GPU, with nothing pinned. Blocks until the bytes have left the mapping."""
    arrays = []
    for name, nbytes in segments:
        with closing(_attach(name)) as memory:
            arrays.append(place.upload(place.view(memory.buf, nbytes)))
        os.unlink(os.path.join(shm_dir, name))  # noqa: PTH108, PTH118
    return arrays


def publish_shared_memory(parts: Sequence[ByteArray]) -> list[Named]:
    """One new SharedMemory per tensor, filled by numpy; the receiver unlinks it. Blocks until every byte is there."""
    named: list[Named] = []
    try:
        for part in parts:
            with closing(_untracked(create=True, size=len(part))) as memory:
                named.append((memory.name, len(part)))
                np.copyto(np.ndarray(len(part), np.uint8, memory.buf), part)
    except BaseException:
        unlink_shared_memory(named)
        raise
    return named


def unlink_shared_memory(named: Sequence[Named]) -> None:
    """Unlink what was not received."""
    for name, _ in named:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join("/dev/shm", name))  # noqa: PTH108, PTH118


def inline(place: Place, messages: Sequence[bytes]) -> list[Any]:
    """Bytes that came inside the message, copied to the device from where they are. Blocks as :func:`pageable`."""
    return [place.upload(place.view(message, len(message))) for message in messages]


def _attach(name: str) -> SharedMemory:
    return _untracked(name=name)


def _untracked(**arguments: Any) -> SharedMemory:
    """Without the resource tracker, which would unlink the segment when this process ends."""
    register = resource_tracker.register
    resource_tracker.register = _not_tracked
    try:
        return SharedMemory(**arguments)
    finally:
        resource_tracker.register = register


def _not_tracked(name: object, rtype: object) -> None:
    pass
