"""What people write without mmcopy: honest plain code, one small function each. Blocks or queues as its docstring says.

Each takes the messages of one request and returns one new array a tensor, and leaves no segment behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from .place import Place

__all__ = ["Named", "inline", "pageable", "shared_memory_staged"]

Named = tuple[str, int]
"""A segment's name and the bytes in it."""


def shared_memory_staged(place: Place, segments: Sequence[Named], *, shm_dir: str) -> list[Any]:
    """SharedMemory, a pinned staging buffer, an asynchronous copy, unlink: how serving engines do it with torch.

    The staging buffer is asked for in the request. torch keeps pinned memory that was freed and gives it out again, so
    after the first request of a size no memory is pinned. Queued only; the unlink runs beside the copy to the GPU. In
    host memory the staging buffer, not pinned, is the result.
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


def inline(place: Place, messages: Sequence[bytes]) -> list[Any]:
    """Bytes that came inside the message, copied to the device from where they are. Blocks as :func:`pageable`."""
    return [place.upload(place.view(message, len(message))) for message in messages]


def _attach(name: str) -> SharedMemory:
    """Attach without the resource tracker, which would take the segment for this process's own to remove."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name=name, track=False)
    register = resource_tracker.register
    resource_tracker.register = _not_tracked
    try:
        return SharedMemory(name=name)
    finally:
        resource_tracker.register = register


def _not_tracked(name: object, rtype: object) -> None:
    pass
