"""Memory registered with CUDA part by part.

Pinning takes 0.05 to 0.07 s a GiB (one H200 host; several threads are no faster), and a call cannot be interrupted. In
parts, a stop waits for one of them, and what was pinned before a refusal is given back. The price: CUDA
refuses one copy out of two registrations (cudaErrorInvalidValue), so copies are cut where parts meet. Parts end at
multiples of their size in the address space, so that a copy is cut without asking whose memory it reads.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mmcopy._native import ArenaMap
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import MmcopyError
from mmcopy.receive.in_place import PART_BYTES
from mmcopy.receive.staging import CopyEvent

__all__ = [
    "ArenaRegistry",
    "register",
    "unregister",
]

_log = logging.getLogger(__name__)


def register(
    runtime: Any, address: int, nbytes: int, flags: int, *, should_stop: Callable[[], bool]
) -> list[tuple[int, int]]:
    """Register ``nbytes`` from ``address`` on the current device; the parts, each an address and its bytes.

    All or nothing: on an error, which is raised, and when ``should_stop`` says so between two parts (then there are no
    parts), what was registered is unregistered again. Blocks.
    """
    done: list[tuple[int, int]] = []
    try:
        for part in _parts(address, nbytes):
            if should_stop():
                unregister(runtime, done)
                return []
            runtime.hostRegister(*part, flags)
            done.append(part)
    except BaseException:
        unregister(runtime, done)
        raise
    return done


def unregister(runtime: Any, parts: Iterable[tuple[int, int]]) -> None:
    """Unregister all parts. No copy out of them may be queued. What CUDA refuses is logged."""
    for address, nbytes in parts:
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            _log.warning("letting go of %d bytes of an arena: %s", nbytes, error)


def _parts(address: int, nbytes: int) -> list[tuple[int, int]]:
    first = (address // PART_BYTES + 1) * PART_BYTES
    edges = [address, *range(first, address + nbytes, PART_BYTES), address + nbytes]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


_LOOK_S = 0.2
_MAPPED, _READ_ONLY = 2, 8  # cudaHostRegisterMapped, cudaHostRegisterReadOnly

_Parts = list[tuple[int, int]]


class _Registered:
    """An arena and its parts that are registered: none where CUDA refused."""

    __slots__ = ("arena", "data", "flags", "gone_behind")

    def __init__(self, arena: ArenaMap, data: _Parts, flags: _Parts) -> None:
        self.arena = arena  # keeps the mapping
        self.data = data
        self.flags = flags
        self.gone_behind: CopyEvent | None = None

    @property
    def works(self) -> bool:
        return bool(self.data)


class ArenaRegistry:
    """The registered arenas of one GPU. ``new_event`` gives an event behind all copies that are queued.

    Everything runs with the device current, as ``on_device`` makes it. Thread-safe.
    """

    def __init__(
        self,
        runtime: Any,
        endpoint: WorkerEndpoint,
        *,
        on_device: Callable[[], Any],
        new_event: Callable[[], CopyEvent],
        device: str,
    ) -> None:
        self.runtime = runtime
        self._endpoint = endpoint.native
        self._on_device = on_device
        self._new_event = new_event
        self._device = device
        self._lock = threading.Lock()
        self._known: dict[int, _Registered] = {}  # by the data's address: each keeps its mapping
        self._warned = False
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="mmcopy-arenas", daemon=True)
        self._thread.start()

    def is_registered(self, arena: ArenaMap) -> bool:
        """Whether the GPU can read ``arena`` in place. Registers it if that was not done yet, and blocks for that."""
        return self._find(arena).works

    @property
    def num_parts(self) -> int:
        """Registrations of arenas' data that are held now."""
        return sum(len(known.data) for known in self._known.values())

    @property
    def num_registered(self) -> int:
        """Arenas that are registered now."""
        return sum(known.works for known in self._known.values())

    def close(self, deadline: float) -> None:
        """End the thread and let all arenas go. No copy may be queued any more."""
        self._stopping = True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock, self._on_device():
            for known in self._known.values():
                self._unregister(known)
            self._known.clear()

    def _find(self, arena: ArenaMap) -> _Registered:
        key = arena.data_address
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.get(key)
                if known is None:
                    known = self._known[key] = self._register(arena)
        return known

    def _register(self, arena: ArenaMap) -> _Registered:
        runtime = self.runtime
        with self._on_device():
            try:
                data = self._pin(arena.data_address, arena.data_nbytes, _READ_ONLY | _MAPPED)
            except runtime.CUDARuntimeError as error:
                if not self._warned:
                    self._warned = True
                    _log.warning(
                        "%s cannot read arena %s of %d bytes in place, it stages its tensors (see `mmcopy doctor`): %s",
                        self._device,
                        arena.instance_id,
                        arena.data_nbytes,
                        error,
                    )
                return _Registered(arena, [], [])
            flags: _Parts = []
            try:
                if data:
                    flags = self._pin(arena.flags_address, arena.flags_nbytes, _MAPPED)
            except runtime.CUDARuntimeError as error:
                _log.info("%s cannot write the release flags of arena %s: %s", self._device, arena.instance_id, error)
        return _Registered(arena, data, flags)

    def _pin(self, address: int, nbytes: int, flags: int) -> _Parts:
        return register(self.runtime, address, nbytes, flags, should_stop=lambda: self._stopping)

    def _unregister(self, known: _Registered) -> None:
        unregister(self.runtime, [*known.data, *known.flags])
        known.data, known.flags = [], []

    def _watch(self) -> None:
        seen = 0
        while not self._stopping:
            try:
                seen = self._endpoint.wait_arena(seen, _LOOK_S)
                for arena in self._endpoint.arenas():
                    self._find(arena)
                with self._on_device():
                    self._let_go()
            except MmcopyError as error:  # the endpoint is closed
                if not self._stopping:
                    _log.debug("no further arenas: %s", error)
                    time.sleep(_LOOK_S)
            except Exception:
                _log.exception("watching for arenas")
                time.sleep(_LOOK_S)

    def _let_go(self) -> None:
        with self._lock:
            for key, known in list(self._known.items()):
                if not known.arena.owner_gone or known.arena.num_held:
                    known.gone_behind = None
                elif known.gone_behind is None:
                    known.gone_behind = self._new_event()
                elif known.gone_behind.query():
                    self._unregister(known)
                    del self._known[key]
