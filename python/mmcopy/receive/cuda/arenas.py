"""Which arenas the GPU reads in place: each is registered with CUDA once, when its sender hands it over.

A thread waits for arenas, so that registering them happens before the first receive that needs it, as a rule.
An arena whose sender has gone is let go of when nothing reads it any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from mmcopy._native import ArenaMap
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import MmcopyError
from mmcopy.receive.ring import CopyEvent

from .registration import register, unregister

__all__ = ["ArenaRegistry"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_MAPPED, _READ_ONLY = 2, 8  # cudaHostRegisterMapped, cudaHostRegisterReadOnly

_Parts = list[tuple[int, int]]


class _Registered:
    """An arena and its parts that are registered: none where CUDA refused."""

    __slots__ = ("arena", "data", "gone_behind", "marks")

    def __init__(self, arena: ArenaMap, data: _Parts, marks: _Parts) -> None:
        self.arena = arena  # keeps the mapping
        self.data = data
        self.marks = marks
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
        self._runtime = runtime
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
        runtime = self._runtime
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
            marks: _Parts = []
            try:
                if data:
                    marks = self._pin(arena.marks_address, arena.marks_nbytes, _MAPPED)
            except runtime.CUDARuntimeError as error:
                _log.info("%s cannot write the marks of arena %s: %s", self._device, arena.instance_id, error)
        return _Registered(arena, data, marks)

    def _pin(self, address: int, nbytes: int, flags: int) -> _Parts:
        return register(self._runtime, address, nbytes, flags, should_stop=lambda: self._stopping)

    def _unregister(self, known: _Registered) -> None:
        unregister(self._runtime, [*known.data, *known.marks])
        known.data, known.marks = [], []

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
