"""Whether a worker may be sent requests yet, and if not, why: one object that health and model-info RPCs read."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mmcopy.config import parse_seconds

__all__ = ["Readiness", "ReadinessSnapshot", "ReadinessState"]


class ReadinessState(enum.StrEnum):
    """How far a worker's start has come."""

    STARTING = "starting"
    """Before any warm-up: weights are loaded, ranks meet."""
    WARMING = "warming"
    """The encoders are being run; the snapshot says which modality, which shape, and how far."""
    READY = "ready"
    """Requests are welcome."""
    FAILED = "failed"
    """It will not become ready; the snapshot says why."""


@dataclass(frozen=True, slots=True)
class ReadinessSnapshot:
    """One moment of a :class:`Readiness`.

    ``done`` of ``total`` shapes are warm; ``modality`` and ``shape`` are those that run now, "" outside of warming.
    ``reason`` is why it failed, or what was not as it should be although it is ready. ``since_s`` is how long the
    state has lasted.
    """

    state: ReadinessState
    modality: str = ""
    shape: str = ""
    done: int = 0
    total: int = 0
    reason: str = ""
    since_s: float = 0.0

    def __str__(self) -> str:
        text = str(self.state)
        if self.shape:
            text += f" {self.shape} ({self.done} of {self.total} done)"
        return f"{text}: {self.reason}" if self.reason else text


class Readiness:
    """Starting, warming, ready or failed. Begins as starting.

    Give one to :func:`mmcopy.prewarm`, which moves it, and to ``SmgWorker``, which is not healthy, tells nothing about
    its model and refuses requests before it is ready. Every method may be called from any thread; only :meth:`wait`
    blocks.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = ReadinessSnapshot(ReadinessState.STARTING)
        self._since = time.monotonic()
        self._watchers: list[Callable[[ReadinessSnapshot], object]] = []

    def __repr__(self) -> str:
        return f"Readiness({self.snapshot()})"

    @property
    def state(self) -> ReadinessState:
        """The state now."""
        return self.snapshot().state

    @property
    def is_ready(self) -> bool:
        """Whether requests are welcome."""
        return self.state is ReadinessState.READY

    def snapshot(self) -> ReadinessSnapshot:
        """State, progress and reason of one moment."""
        with self._changed:
            return replace(self._snapshot, since_s=time.monotonic() - self._since)

    def warming(self, shape: str, *, modality: str, done: int, total: int) -> None:
        """A warm-up shape begins, when ``done`` of ``total`` have ended."""
        self._set(ReadinessSnapshot(ReadinessState.WARMING, modality, shape, done, total))

    def ready(self, warning: str = "") -> None:
        """Requests are welcome from now on; ``warning`` is kept in the snapshot."""
        self._set(ReadinessSnapshot(ReadinessState.READY, reason=warning))

    def fail(self, reason: str) -> None:
        """The worker will not become ready."""
        self._set(ReadinessSnapshot(ReadinessState.FAILED, reason=reason))

    def wait(self, timeout_s: float) -> ReadinessSnapshot:
        """Block until it is ready or failed, ``timeout_s`` at most; what it is then.

        Raises :class:`ConfigError` for an invalid limit.
        """
        limit = parse_seconds(timeout_s, setting="Readiness.wait timeout_s")
        with self._changed:
            self._changed.wait_for(
                lambda: self._snapshot.state in (ReadinessState.READY, ReadinessState.FAILED), timeout=limit
            )
        return self.snapshot()

    def watch(self, watcher: Callable[[ReadinessSnapshot], object]) -> None:
        """Call ``watcher`` with every change, on the thread that makes it. It must not block, nor raise."""
        with self._changed:
            self._watchers.append(watcher)

    def _set(self, snapshot: ReadinessSnapshot) -> None:
        with self._changed:
            if snapshot.state is not self._snapshot.state:
                self._since = time.monotonic()
            self._snapshot = snapshot
            watchers = list(self._watchers)
            self._changed.notify_all()
        for watcher in watchers:
            watcher(snapshot)
