"""Leases of the arenas that senders handed over: another kind of source, read where the sender wrote it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from mmcopy._native import ArenaMap, Lease, copy_into, lease_arena_id
from mmcopy._native import WorkerEndpoint as NativeWorkerEndpoint
from mmcopy.errors import LeaseUnknownArenaError, MmcopyError
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import LEASE_PREFIX, ShmHandle, TensorData

if TYPE_CHECKING:
    from mmcopy.endpoint import WorkerEndpoint

    from .sources import ByteArray

__all__ = ["LeaseOpener", "LeaseRequest", "LeaseSource"]

_log = logging.getLogger(__name__)

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
