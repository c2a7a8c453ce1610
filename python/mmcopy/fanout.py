"""One segment for several consumers, each with a name of its own for the same file.

A segment has one consumer, who removes it. For data-parallel workers that each want all of it the sender gives the file
one further name a consumer. Each consumer opens and removes its own name, in its own time, and knows nothing of the
others; the kernel counts the names and the open files, and frees the memory after the last. A consumer that dies leaves
its own name alone, and a later sender removes that like any other that is left.

The further names follow from the first, so one handle serves all: consumer ``n`` uses ``for_consumer(data, n)``. They
are names as :func:`mmcopy._native.sweep` knows them, of digits that no counter has, since none has a zero in front.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import re
from dataclasses import replace

from ._native import Process, unlink_segment
from .errors import (
    ConfigError,
    MmcopyError,
    NoSpaceError,
    PayloadError,
    SegmentError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from .tensors import ShmHandle, TensorData

__all__ = [
    "MAX_CONSUMERS",
    "consumers_of",
    "for_consumer",
    "link_consumers",
    "names_of",
    "owner_id_for",
    "unlink_consumers",
]

MAX_CONSUMERS = 99_999
_NAME = re.compile(r"(mmcopy-[0-9a-f]{16}-)(0|[1-9]\d*)")
_OWNER = re.compile(r"mmcopy:([0-9a-f]{16})\*([1-9][0-9]{0,4})")

_BY_ERRNO: dict[int | None, type[MmcopyError]] = {
    errno.ENOENT: SegmentNotFoundError,
    errno.EPERM: SegmentPermissionError,
    errno.EACCES: SegmentPermissionError,
    errno.EROFS: SegmentPermissionError,
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.ENOMEM: NoSpaceError,
}


def for_consumer(data: TensorData, consumer: int) -> TensorData:
    """``data`` as consumer number ``consumer`` has to receive it; number 0 has the handle as it is.

    Inline data is the same for all, and so is a lease, which knows its consumers. Raises :class:`PayloadError` for a
    segment that was not sent to so many consumers, and :class:`ConfigError` for an invalid number.
    """
    try:
        consumer = operator.index(consumer)
    except TypeError:
        raise ConfigError(f"consumer is {consumer!r}, want a whole number, from 0 on") from None
    payload = data.payload
    if not isinstance(payload, ShmHandle) or payload.is_lease:
        return data
    consumers = consumers_of(payload)
    if not 0 <= consumer < consumers:
        raise PayloadError(
            f"segment {payload.name!r} has {consumers} consumers, numbered from 0: there is no {consumer}"
        )
    return replace(data, payload=replace(payload, name=_name_for(payload.name, consumer)))


def consumers_of(handle: ShmHandle) -> int:
    """How many consumers a segment was sent to, from its handle; 1 for a handle that does not say."""
    match = _OWNER.fullmatch(handle.owner_id)
    return int(match[2]) if match else 1


def names_of(handle: ShmHandle) -> list[str]:
    """The names of all its consumers, in their order."""
    return [_name_for(handle.name, consumer) for consumer in range(consumers_of(handle))]


def owner_id_for(instance_id: str, consumers: int) -> str:
    """What a sender writes into a handle's ``owner_id``, so that :func:`consumers_of` finds it."""
    return f"mmcopy:{instance_id}" if consumers == 1 else f"mmcopy:{instance_id}*{consumers}"


def link_consumers(shm_dir: str | os.PathLike[str], name: str, consumers: int) -> None:
    """Give a segment that is complete the names of consumers 1 to ``consumers - 1``. For its sender, before hand-over.

    All or none: after an error only the first name is there. Raises :class:`NoSpaceError` (each name counts as a
    file), :class:`SegmentNotFoundError`,
    :class:`SegmentPermissionError` and :class:`SegmentError`.
    """
    _check_consumers(consumers)
    path = os.path.join(shm_dir, name)  # noqa: PTH118
    made: list[str] = []
    try:
        for consumer in range(1, consumers):
            further = _name_for(name, consumer)
            os.link(path, os.path.join(shm_dir, further), follow_symlinks=False)  # noqa: PTH118
            made.append(further)
    except BaseException as error:
        for further in made:
            with contextlib.suppress(MmcopyError):
                unlink_segment(shm_dir, further, Process.current())
        if not isinstance(error, OSError):
            raise
        kind: type[MmcopyError] = _BY_ERRNO.get(error.errno, SegmentError)
        text = f"segment {name!r}: name {len(made) + 1} of {consumers - 1} further ones: {error.strerror}"
        raise kind(error.errno, text, path) from error


def unlink_consumers(shm_dir: str | os.PathLike[str], handle: ShmHandle, owner: Process) -> int:
    """Take a segment back from all its consumers; how many names were still there. For its sender's process, ``owner``.

    Raises what :func:`mmcopy._native.unlink_segment` raises, after it has tried all.
    """
    removed = 0
    failed: MmcopyError | None = None
    for name in names_of(handle):
        try:
            removed += unlink_segment(shm_dir, name, owner)
        except MmcopyError as error:
            failed = error
    if failed is not None:
        raise failed
    return removed


def _name_for(name: str, consumer: int) -> str:
    if consumer == 0:
        return name
    match = _NAME.fullmatch(name)
    if match is None:
        raise PayloadError(f"segment {name!r} has one consumer: names of several begin with mmcopy-<16 hex digits>-")
    return f"{match[1]}0{consumer:05d}{match[2]}"


def _check_consumers(consumers: int) -> None:
    if isinstance(consumers, bool) or not isinstance(consumers, int) or not 1 <= consumers <= MAX_CONSUMERS:
        raise ConfigError(f"consumers is {consumers!r}, want a whole number, 1 to {MAX_CONSUMERS}")
