"""The paths that are timed against each other, each as three calls: publish, receive, and settle or cancel."""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from mmcopy.config import WorkerSpec
from mmcopy.errors import MmcopyError, NoSpaceError
from mmcopy.receive.receiver import Receiver
from mmcopy.send.leases import StreamingSend
from mmcopy.send.sender import Sender
from mmcopy.tensors import ShmHandle, TensorData

from . import baselines
from .load import Load
from .plan import Case

__all__ = [
    "Leases",
    "LeftBehindError",
    "Path",
    "Role",
    "Segments",
    "arena_bytes_for",
    "free_bytes",
    "h2d_paths",
    "segment_path",
]

GONE_LIMIT_S = 10.0
FREED_LIMIT_S = 0.2
POLL_S = 0.0005


class Role(enum.StrEnum):
    """What a path is compared as."""

    LIMIT = "limit"
    OURS = "ours"
    BASELINE = "baseline"


class LeftBehindError(MmcopyError):
    """A path delivered its tensors and did not remove their segments."""


def _nothing(message: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Path:
    """One way for the bytes of one load.

    ``publish`` makes a message, untimed. ``receive`` is timed: from the message to one array per tensor (or one array
    of all of them), not yet synchronised with the GPU. ``settle``, untimed, returns when nothing of the message is
    left; after a failure ``cancel`` is called instead.
    """

    name: str
    role: Role
    publish: Callable[[], Any]
    receive: Callable[[Any], Any]
    settle: Callable[[Any], None] = _nothing
    cancel: Callable[[Any], None] = _nothing

    @contextlib.contextmanager
    def message(self) -> Iterator[Any]:
        """A published message for the block to receive; settled after it, or cancelled when it raises."""
        message = self.publish()
        try:
            yield message
        except BaseException:
            self.cancel(message)
            raise
        self.settle(message)


def free_bytes(shm_dir: str) -> int:
    """Room in ``shm_dir``. Raises :class:`NoSpaceError` when there is no such folder."""
    try:
        room = os.statvfs(shm_dir)
    except OSError as error:
        raise NoSpaceError(f"{shm_dir}: {error.strerror}: segments need shared memory there") from error
    return room.f_bavail * room.f_frsize


class Segments:
    """Publishes a load through a sender, in new segments."""

    def __init__(self, sender: Sender, load: Load, *, shm_dir: str) -> None:
        self._sender = sender
        self._load = load
        self._shm_dir = shm_dir
        self._free_before = 0

    def publish(self) -> list[TensorData]:
        """One segment per tensor. Raises :class:`NoSpaceError` when one had to go inline; none is left then."""
        self._free_before = free_bytes(self._shm_dir)
        sent: list[TensorData] = []
        try:
            for part in self._load.parts:
                sent.append(self._sender.send(part))
                if not isinstance(sent[-1].payload, ShmHandle):
                    raise NoSpaceError(
                        f"{self._shm_dir}: segment {len(sent)} of {self._load.case.label} could not be written; "
                        f"{free_bytes(self._shm_dir)} bytes free, {self._free_before} before this case was published"
                    )
        except BaseException:
            self.cancel(sent)
            raise
        return sent

    def settle(self, sent: Sequence[TensorData]) -> None:
        """Wait until the names are gone and their pages are free, so that no clean-up runs into the next path's time.

        Raises :class:`LeftBehindError`, and removes what is left, when a name stays.
        """
        left = [FilePath(self._shm_dir, name) for name, _ in named(sent)]
        deadline = time.monotonic() + GONE_LIMIT_S
        while left := [path for path in left if path.exists()]:
            if time.monotonic() > deadline:
                self.cancel(sent)
                raise LeftBehindError(f"{len(left)} segments were not removed within {GONE_LIMIT_S} s: {left[0].name}")
            time.sleep(POLL_S)
        # Another program may have taken room meanwhile, so this wait just ends.
        deadline = time.monotonic() + FREED_LIMIT_S
        while free_bytes(self._shm_dir) < self._free_before and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def cancel(self, sent: Sequence[TensorData]) -> None:
        """Cancel what was not received."""
        for data in sent:
            self._sender.cancel(data)


class Leases:
    """Publishes a load through a sender's arena for one worker, or for several that each read it, all tensors of a
    request at once."""

    def __init__(
        self, sender: Sender, worker: WorkerSpec | Sequence[WorkerSpec], load: Load, *, is_streamed: bool = False
    ) -> None:
        self._sender = sender
        self._worker = worker
        self._load = load
        self._is_streamed = is_streamed
        self._writing: list[StreamingSend] = []

    def publish(self) -> list[TensorData]:
        """One lease per tensor; with ``is_streamed`` they are still being written. Raises :class:`NoSpaceError`."""
        self._writing = []
        sent: list[TensorData] = []
        try:
            if self._is_streamed:
                for part in self._load.parts:
                    self._writing.append(self._sender.send_streaming(part, worker=self._worker))
                    sent.append(self._writing[-1].data)
            else:
                sent = self._sender.send_many(self._load.parts, worker=self._worker)
            if any(data.path != "lease" for data in sent):
                raise NoSpaceError(
                    f"{self._load.case.label}: not every tensor found room in the arena, or a worker took none"
                )
        except BaseException:
            self.cancel(sent)
            raise
        return sent

    def settle(self, sent: Sequence[TensorData]) -> None:
        """Wait until the arena is empty again. Raises :class:`LeftBehindError`."""
        for writing in self._writing:
            writing.wait()
        deadline = time.monotonic() + GONE_LIMIT_S
        while (out := self._sender.leases_out) > 0:
            if time.monotonic() > deadline:
                self.cancel(sent)
                raise LeftBehindError(f"{out} leases were not released within {GONE_LIMIT_S} s")
            time.sleep(POLL_S)

    def cancel(self, sent: Sequence[TensorData]) -> None:
        """Cancel what was not received."""
        for writing in self._writing:
            with contextlib.suppress(MmcopyError):
                writing.wait()
        for data in sent:
            self._sender.cancel(data)


def arena_bytes_for(cases: Sequence[Case]) -> int:
    """An arena in which each case finds room."""
    return max(case.shared_bytes for case in cases) + (1 << 20)


def named(sent: Sequence[TensorData]) -> list[baselines.Named]:
    """Names and sizes, as plain code would get them."""
    return [(data.payload.name, data.nbytes) for data in sent if isinstance(data.payload, ShmHandle)]


def segment_path(name: str, receiver: Receiver, segments: Segments) -> Path:
    """mmcopy's own: a sender's segments, received in one call."""
    return Path(name, Role.OURS, segments.publish, receiver.receive, segments.settle, segments.cancel)


def h2d_paths(
    load: Load, sender: Sender, receiver: Receiver, *, shm_dir: str, worker: WorkerSpec | None = None
) -> list[Path]:
    """Everything that ``mmcopy bench h2d`` compares, the limit first.

    With ``worker``, the receiver's own address, ``sender``'s leases are among them.

    The limit is one copy of all the load's bytes, a batch's too, out of memory that is pinned and filled already into
    memory that exists: nothing that starts from elsewhere can be faster.
    """
    place = load.place
    segments = Segments(sender, load, shm_dir=shm_dir)
    existing = place.empty(load.case.total_bytes)

    def copy_into_existing(_message: None) -> list[Any]:
        place.overwrite(existing, load.host)
        return [existing]

    def plain(name: str, receive: Callable[..., list[Any]]) -> Path:
        def run(sent: Sequence[TensorData]) -> list[Any]:
            return receive(place, named(sent), shm_dir=shm_dir)

        return Path(name, Role.BASELINE, segments.publish, run, segments.settle, segments.cancel)

    paths = [
        Path(place.limit_name, Role.LIMIT, lambda: None, copy_into_existing),
        segment_path("segment", receiver, segments),
        plain("shared_memory_staged", baselines.shared_memory_staged),
    ]
    if worker is not None:
        leases = Leases(sender, worker, load)
        paths.insert(1, Path("lease", Role.OURS, leases.publish, receiver.receive, leases.settle, leases.cancel))
    if place.is_gpu:  # in host memory nothing is pinned anyway
        paths.append(plain("pageable", baselines.pageable))
    paths.append(
        Path(
            "inline",
            Role.BASELINE,
            lambda: [part.tobytes() for part in load.parts],
            lambda messages: baselines.inline(place, messages),
        )
    )
    return paths
