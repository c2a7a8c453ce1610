"""Copies to the device straight out of registered arenas, with the release flags behind them.

Nothing is staged: the H2D reads what the sender wrote. Leases that lie side by side in the arena as their tensors do in
the destination are one copy; scattered ones are queued together. A lease that is still being written is followed: each
time the watermark passes a step, that step is copied. Behind the last copy the copy stream itself writes each lease's
release flag, which its sender reads, so no thread waits for the GPU. One write takes the caller 2 us, so for many
leases, and where the driver refuses such writes, an event is recorded behind the copies, and a thread releases the
leases when it has happened.

When that takes longer than the receiver's limit, the thread logs it and goes on; the leases stay kept, because a copy
may still read them: their sender has less room, but no wrong bytes are read. The thread checks them once a second, and
they are released when the copies have ended after all, or with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from mmcopy._native import Extents, KeptLeases
from mmcopy.metrics import Counter, Metrics

from .plan import ALIGN_BYTES
from .request import Request, count_given_back
from .staging import CopyEvent

__all__ = ["PART_BYTES", "DirectCopies", "DirectLink", "Growing", "Run"]

_log = logging.getLogger(__name__)

_MOST_FLAGS_BY_STREAM = 16
_POLL_S = 50e-6
_LOOK_AFTER_LATE_S = 1.0
_LEAST_STEP_BYTES, _MOST_STEP_BYTES = 256 << 10, 4 << 20
"""How far a copy follows a sender that writes: little at both ends, so that the link begins early and is not left with
much behind the last byte; between them so much that copies run at the link's speed (of 1 MiB a tenth slower)."""


PART_BYTES = 1 << 30
"""Memory is registered in parts that end at multiples of this address, and CUDA refuses one copy out of two
registrations (cudaErrorInvalidValue): copies are cut there, whosever memory they read."""

Run: TypeAlias = tuple[int, int, int]
"""A copy: its destination's and its source's address, and its bytes."""

Growing: TypeAlias = tuple[int, int, int, int]
"""A part of a lease that is still being written: the open item, the first of its bytes that are wanted, how many, and
the address that they go to."""


class _Behind(NamedTuple):
    """Leases that go back when ``event`` has happened, which is waited for until ``deadline``."""

    event: CopyEvent
    leases: KeptLeases
    deadline: float

    def has_happened(self) -> bool:
        try:
            return self.event.query()
        except Exception:  # the device is broken: no copy reads the leases any more
            _log.exception("asking for the end of copies out of an arena")
            return True


class DirectLink(Protocol):
    """A device's copy stream, as far as it is needed here."""

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Queue copies, in any order among themselves."""

    def write_word(self, address: int, value: int) -> bool:
        """Let the stream write 32 bits to registered memory, behind what is queued; False where it cannot."""

    def new_event(self) -> CopyEvent:
        """An event behind what is queued."""

    def bind_thread(self) -> None:
        """Called once on a thread that asks for events."""


class DirectCopies:
    """Queues direct copies, and releases behind them, on one link. Several threads may use it at once.

    ``timeout_s`` is how long copies may take before that is a warning.
    """

    def __init__(self, link: DirectLink, *, timeout_s: float, metrics: Metrics) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._changed = threading.Condition()
        self._behind: deque[_Behind] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def copy(self, request: Request, extents: Extents, addresses: Sequence[int], *, is_packed: bool) -> list[Growing]:
        """Queue the copies of everything in ``extents`` that is written; return what is for :meth:`follow`.

        ``addresses`` are those of the bases. ``is_packed``: a copy may write anything to the bytes between neighbouring
        tensors. In any case call :meth:`release_behind` in the end. Never blocks.
        """
        runs, growing = request.native.runs(
            extents, addresses, max_gap_bytes=ALIGN_BYTES - 1 if is_packed else 0, part_bytes=PART_BYTES
        )
        self._link.copy_all(runs)
        return growing

    def follow(self, request: Request, growing: Iterable[Growing]) -> None:
        """Queue the copies of leases that are still being written, step by step.

        Blocks while senders write, up to the last byte that is wanted and no further. Raises :class:`LeaseError` and,
        at the receive's limit, :class:`MmcopyTimeoutError`.
        """
        for item, start, nbytes, dest in growing:
            done = 0
            while done < nbytes:
                step = min(_MOST_STEP_BYTES, max(_LEAST_STEP_BYTES, min(done, nbytes - done) // 4))
                part = (item, start + done, nbytes - done, dest + done)
                there, runs = request.native.follow(part, step, part_bytes=PART_BYTES)
                self._link.copy_all(runs)
                done += there

    def release_behind(self, request: Request) -> None:
        """Release each lease that copies read behind what is queued; once, however many copies read it.

        Call it when no further copy out of these leases will be queued. Never blocks.
        """
        flags = request.native.flags()
        written = 0
        if len(flags) <= _MOST_FLAGS_BY_STREAM:
            for address, value in flags:
                if not self._link.write_word(address, value):
                    break
                written += 1
            if written:
                request.native.flags_written(written)
                self._metrics.count(Counter.LEASES_RELEASED, "received", written)
        if written < len(flags):
            self._release_on_event(self._link.new_event(), request.native.keep())

    def close(self, deadline: float) -> None:
        """End the thread, if there is one. All copies that were queued must have happened."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _release_on_event(self, event: CopyEvent, leases: KeptLeases) -> None:
        with self._changed:
            self._behind.append(_Behind(event, leases, time.monotonic() + self._timeout_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="mmcopy-release", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _watch(self) -> None:
        self._link.bind_thread()
        late: deque[_Behind] = deque()
        while True:
            with self._changed:
                if not self._behind and not self._closed:
                    self._changed.wait(_LOOK_AFTER_LATE_S if late else None)
                behind = self._behind.popleft() if self._behind else None
                is_over = behind is None and self._closed
            while late and late[0].has_happened():
                self._release(late.popleft())
            if behind is not None:
                while not (has_happened := behind.has_happened()) and time.monotonic() < behind.deadline:
                    time.sleep(_POLL_S)
                if has_happened:
                    self._release(behind)
                else:
                    late.append(behind)
                    _log.warning(
                        "copies out of an arena have not ended within %g s: %d leases are kept until they have",
                        self._timeout_s,
                        len(behind.leases),
                    )
            if is_over:
                return

    def _release(self, behind: _Behind) -> None:
        count_given_back(self._metrics, behind.leases.release(), "received")
