"""What a sender knows of its workers: one state per worker, one lock, one thread that asks them.

Equal namespace ids say that two processes see one file system. They do not say that the worker's user may open files of
mode 0600 there, nor that its mount lets it. So a worker with a socket is probed: the sender writes a small segment, the
worker reads it back (:mod:`mmcopy.endpoint`). Behind the probe the sender's arena is handed over. The connection stays
open, and its end is the worker's end.

    UNKNOWN --ask--> PROBING --ok--> READY --too old--> PROBING
                        |              |
                        +--failed--> REFUSED      (asked again, less and less often)
                        +--the connection ended--> DOWN   (asked again when it is used)
"""

from __future__ import annotations

import enum
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mmcopy._native import SenderLink as NativeLink
from mmcopy._native import shm_namespace_id
from mmcopy.config import ENDPOINT_LABEL, WorkerSpec
from mmcopy.endpoint import SenderLink
from mmcopy.errors import ArenaError, EndpointGoneError, EndpointRefusedError, MmcopyError, MmcopyTimeoutError
from mmcopy.metrics import Counter, Metrics

from .routing import SHARED, Reason, Sharing, Snapshot, by_labels

__all__ = ["Connection", "State", "Workers"]

_log = logging.getLogger(__name__)

_WATCH_S = 0.25
"""How often the thread looks whether a worker has ended, besides every use."""
_MAX_BACKOFF_S = 30.0
_ROOT = 0
"""A worker that runs as root may be asked by any user: it can read all files, and needs none of ours to do harm."""

_KEEPS_THE_LINK = (ArenaError, EndpointRefusedError, type(None))
"""Outcomes of a hand-over after which the sender has not ended the connection itself."""


class State(enum.StrEnum):
    """What the last probe of a worker said."""

    UNKNOWN = "unknown"
    """It was not probed, or the result is too old."""
    PROBING = "probing"
    """It was asked, and has not answered yet."""
    READY = "ready"
    """It reads the sender's segments."""
    REFUSED = "refused"
    """It does not, or could not be reached."""
    DOWN = "down"
    """It was connected, and the connection has ended."""


@dataclass(frozen=True)
class Connection:
    """What :meth:`mmcopy.Sender.connect` found out about a worker.

    ``reason`` is None when the worker reads the sender's segments; otherwise ``detail`` says why not. ``slot`` is its
    number as a consumer of the sender's arena, None when it does not have the arena; ``no_arena`` says why not.
    """

    sharing: Sharing
    slot: int | None = None
    no_arena: str = ""

    @property
    def reason(self) -> Reason | None:
        """Why the worker cannot read the sender's segments; None when it can."""
        return self.sharing.reason

    @property
    def detail(self) -> str:
        """The same in words."""
        return self.sharing.detail

    @property
    def ok(self) -> bool:
        """Whether the worker reads the sender's segments."""
        return self.sharing.ok

    @property
    def has_arena(self) -> bool:
        """Whether the worker has the sender's arena, so that tensors reach it as leases."""
        return self.slot is not None


@dataclass
class _Worker:
    """What is known of one worker; guarded by the lock of :class:`Workers`."""

    url: str
    path: str
    state: State = State.UNKNOWN
    link: SenderLink | None = None
    native: NativeLink | None = None
    """The link's native part, whose end is looked at once per request."""
    probed_at: float = 0.0
    why: Sharing | None = None
    """Why it is REFUSED or DOWN."""
    failures: int = 0
    is_asked: bool = False
    next_ask: float = 0.0
    answered: threading.Event = field(default_factory=threading.Event)
    settled: threading.Event = field(default_factory=threading.Event)
    """The arena was offered, too."""
    slot: int | None = None
    """Its number as a consumer of the arena that went over ``link``."""
    offered: SenderLink | None = None
    """The link over which the arena was offered; over the same one not before ``next_offer``."""
    next_offer: float = 0.0
    refusals: int = 0
    no_arena: str = ""
    is_offered: bool = False
    """It is offered now: then an end of the link can be our own doing."""
    has_unreported_end: bool = False


class Workers:
    """The workers of one sender. Thread-safe; after ``fork`` the child's copy knows none.

    They are asked on a thread of its own, and an answer counts for ``probe_max_age_s`` seconds, renewed at half of it.
    The first use of a worker under ``auto``, or one whose answer is too old, waits ``first_wait_s`` at most; every
    other use waits for nothing. After a failure the worker is asked again ``retry_s`` later, and less and less often.
    At most ``max_workers`` are remembered.

    ``hand_over`` is called on the thread and behind the probe, until it succeeds: it offers the arena, and returns the
    worker's slot, or None when there is no arena to offer. After an :class:`MmcopyError` it is called again, as rarely
    as the worker is probed again. ``unlink`` is called, from any thread, with the names of in-flight segments of a
    worker whose connection has ended.

    In-flight segments are noted by the worker they are for, its url and socket: one that starts again has the same url
    and another socket, and each keeps its own. A segment that was consumed is not reported to a sender: when
    ``max_names`` are noted, those that are no longer there are forgotten, and of half or more the oldest as well.
    """

    def __init__(
        self,
        shm_dir: str,
        *,
        probe_max_age_s: float,
        metrics: Metrics,
        unlink: Callable[[Sequence[str]], object],
        hand_over: Callable[[SenderLink], int | None] = lambda _link: None,
        first_wait_s: float = 0.25,
        ask_timeout_s: float = 1.0,
        retry_s: float = 1.0,
        max_workers: int = 256,
        max_names: int = 1024,
        max_down: int = 1024,
    ) -> None:
        self._shm_dir = shm_dir
        self._max_age_s = probe_max_age_s
        self._metrics = metrics
        self._unlink = unlink
        self._hand_over = hand_over
        self._first_wait_s = first_wait_s
        self._ask_timeout_s = ask_timeout_s
        self._retry_s = retry_s
        self._max_workers = max_workers
        self._max_names = max_names
        self._max_down = max_down
        self._namespace_id = ""
        self._questions: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._workers: OrderedDict[tuple[str, str], _Worker] = OrderedDict()
        self._down: OrderedDict[str, None] = OrderedDict()
        self._in_flight: OrderedDict[str, tuple[str, str]] = OrderedDict()  # url and socket by name

    # ---- what a send asks ------------------------------------------------

    def snapshot(self, receivers: Sequence[WorkerSpec], *, wants_sharing: bool) -> Snapshot:
        """What is known of ``receivers`` now. Looks once whether each is still connected.

        Blocks for the first probe of a worker where ``wants_sharing``, ``first_wait_s`` at most.
        """
        found, waits_for = self._look(receivers, wants_sharing)
        if waits_for:
            deadline = time.monotonic() + self._first_wait_s
            for answered in waits_for:
                answered.wait(max(0.0, deadline - time.monotonic()))
            found, _ = self._look(receivers, wants_sharing)
        return found

    def sharing(self, worker: WorkerSpec) -> Sharing:
        """Whether ``worker`` can read our segments, by its probe or, without a socket, by its labels."""
        return self.snapshot((worker,), wants_sharing=True).sharing[0]

    def connect(self, worker: WorkerSpec, *, timeout_s: float) -> Connection:
        """Probe ``worker`` now and offer it the arena. Blocks for both, ``timeout_s`` at most."""
        if not worker.labels.get(ENDPOINT_LABEL):
            return Connection(self._by_labels(worker), None, f"it advertises no socket ({ENDPOINT_LABEL})")
        deadline = time.monotonic() + timeout_s
        with self._lock:
            known = self._known(worker)
            known.next_ask = known.next_offer = 0.0
            self._ask_soon(known)
            answered, settled = known.answered, known.settled
        if not answered.wait(timeout_s):
            slow = f"worker {worker.url} did not answer within {timeout_s:g} s"
            return Connection(Sharing(Reason.NOT_PROBED, slow), None, slow)
        settled.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return Connection(self._verdict(known)[0], known.slot, known.no_arena)

    # ---- segments in flight ----------------------------------------------

    def note(self, worker: WorkerSpec, names: Sequence[str]) -> bool:
        """Note the names of a segment for ``worker``; False, and nothing is noted, when the worker is down by now."""
        key = _key_of(worker)
        known: _Worker | None = None
        with self._lock:
            is_down = worker.url in self._down
            if not is_down and key[1]:
                known = self._known(worker)
                self._check(known)
                is_down = known.state is State.DOWN
            if not is_down:
                self._in_flight.update(dict.fromkeys(names, key))
                if len(self._in_flight) > self._max_names:
                    self._forget_consumed()
        if known is not None:
            self._report(known)
        return not is_down

    def discard(self, names: Sequence[str]) -> None:
        """Forget segments that were cancelled."""
        with self._lock:
            for name in names:
                self._in_flight.pop(name, None)

    def mark_down(self, url: str) -> list[str]:
        """Remember that the worker at ``url`` is down; the names of its segments in flight, which are forgotten."""
        with self._lock:
            self._down[url] = None
            self._down.move_to_end(url)
            if len(self._down) > self._max_down:
                self._down.popitem(last=False)
            return self._take(lambda whose: whose[0] == url)

    def mark_up(self, url: str) -> bool:
        """Forget that ``url`` was marked down; whether it was."""
        with self._lock:
            return self._down.pop(url, self) is None

    @property
    def num_in_flight(self) -> int:
        """Names that are noted as in flight; some may have been consumed."""
        return len(self._in_flight)

    # ---- ends ------------------------------------------------------------

    def close(self) -> None:
        """End every connection and the thread, and cut a question that is being asked short. May be called again."""
        self._closed = True
        if threading.current_thread() is self._thread:
            # Its sender was garbage that this thread happened to collect, perhaps while it holds the lock.
            self._questions.put(None)
            return
        with self._lock:
            thread, self._thread = self._thread, None
        self._disconnect_all()
        if thread is not None:
            self._questions.put(None)
            thread.join(2 * self._ask_timeout_s + 5)

    def forget(self) -> None:
        """For a child after ``fork``: it has no connection, no thread and no segments."""
        self._closed = True
        self._reset()

    # ---- under the lock --------------------------------------------------

    def _look(self, receivers: Sequence[WorkerSpec], wants_sharing: bool) -> tuple[Snapshot, list[threading.Event]]:
        sharing: list[Sharing] = []
        slots: list[int] = []
        down = ""
        waits_for: list[threading.Event] = []
        ended: list[_Worker] = []
        with self._lock:
            for worker in receivers:
                is_down = worker.url in self._down
                if not worker.labels.get(ENDPOINT_LABEL):
                    if wants_sharing:
                        sharing.append(self._by_labels(worker))
                else:
                    known = self._known(worker)
                    self._check(known)
                    is_due = known.link is None or (known.slot is None and self._is_offer_due(known, known.link))
                    is_first = False
                    if wants_sharing:
                        verdict, is_fresh = self._verdict(known)
                        sharing.append(verdict)
                        is_due = is_due or not is_fresh
                        is_first = verdict.reason is Reason.NOT_PROBED
                    if is_due and self._ask_soon(known) and is_first:
                        waits_for.append(known.answered)
                    if known.has_unreported_end:
                        ended.append(known)
                    is_down = is_down or known.state is State.DOWN
                    if known.slot is not None and not is_down:
                        slots.append(known.slot)
                if is_down and not down:
                    down = worker.url
        for known in ended:
            self._report(known)
        # Receivers that are one process have one slot, which claims a lease once.
        consumers = tuple(dict.fromkeys(slots)) if len(slots) == len(receivers) else ()
        return Snapshot(tuple(sharing), consumers, down), waits_for

    def _known(self, worker: WorkerSpec) -> _Worker:
        key = _key_of(worker)
        known = self._workers.get(key)
        if known is None:
            known = self._workers[key] = _Worker(*key)
            if len(self._workers) > self._max_workers:
                _, oldest = self._workers.popitem(last=False)
                self._close_unshared(self._disconnect(oldest))
        self._workers.move_to_end(key)
        return known

    @staticmethod
    def _disconnect(known: _Worker) -> SenderLink | None:
        """Its link, which the caller closes: a link that we end ourselves does not say that the worker has ended."""
        link, known.link, known.native, known.slot = known.link, None, None, None
        return link

    def _find_link(self, path: str, worker_id: str) -> SenderLink | None:
        """An open connection to the process behind this socket, or that says so of itself: a worker that is known by
        several urls has one connection, and is one consumer of the arena."""
        for known in self._workers.values():
            if known.link is not None and not known.link.closed:
                if worker_id and known.link.native.worker_id == worker_id:
                    return known.link
                if path and known.path == path:
                    return known.link
        return None

    def _sharing_link(self, link: SenderLink) -> list[_Worker]:
        return [known for known in self._workers.values() if known.link is link]

    def _close_unshared(self, link: SenderLink | None) -> None:
        if link is not None and not self._sharing_link(link):
            link.close()

    def _end(self, link: SenderLink, *, besides: _Worker, gone: bool) -> None:
        """Close a connection. Where we end it ourselves that does not say that the worker has ended: others that share
        it lose it, ``besides`` keeps it as closed."""
        if not gone:
            for known in self._sharing_link(link):
                if known is not besides:
                    self._disconnect(known)
        link.close()

    def _check(self, known: _Worker) -> None:
        """Look whether the worker is still connected."""
        if known.native is not None and known.native.closed and not known.is_offered:
            known.native.close()
            self._lose(known)

    def _lose(self, known: _Worker) -> None:
        known.link = known.native = known.slot = None
        known.has_unreported_end = known.has_unreported_end or known.state is not State.DOWN
        known.state = State.DOWN
        known.why = Sharing(Reason.WORKER_DOWN, f"worker {known.url} has closed {known.path}")
        known.next_ask = 0.0

    def _verdict(self, known: _Worker) -> tuple[Sharing, bool]:
        """Whether it can read our segments, and whether there is no need to ask again soon."""
        if known.state is State.READY:
            age = time.monotonic() - known.probed_at
            if age <= self._max_age_s:
                return SHARED, age <= self._max_age_s / 2
            known.state = State.UNKNOWN
        if known.why is not None:
            return known.why, False
        return Sharing(Reason.NOT_PROBED, f"worker {known.url} has not answered on {known.path} yet"), False

    @staticmethod
    def _is_offer_due(known: _Worker, link: SenderLink) -> bool:
        return known.offered is not link or time.monotonic() >= known.next_offer

    def _ask_soon(self, known: _Worker) -> bool:
        """Whether a question was queued now; not while one is on its way or the last failure is too fresh."""
        if known.is_asked or self._closed or time.monotonic() < known.next_ask:
            return False
        known.is_asked = True
        if known.state is State.UNKNOWN:
            known.state = State.PROBING
        known.answered = threading.Event()
        known.settled = threading.Event()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmcopy-probe", daemon=True)
            self._thread.start()
        self._questions.put(known)
        return True

    def _by_labels(self, worker: WorkerSpec) -> Sharing:
        if not self._namespace_id:
            # As in SMG, once; "" is looked up again, because the directory may yet come.
            self._namespace_id = shm_namespace_id(self._shm_dir)
        return by_labels(worker, namespace_id=self._namespace_id, uid=os.geteuid())

    def _take(self, is_theirs: Callable[[tuple[str, str]], bool]) -> list[str]:
        names = [name for name, whose in self._in_flight.items() if is_theirs(whose)]
        for name in names:
            del self._in_flight[name]
        return names

    def _forget_consumed(self) -> None:
        paths = {name: os.path.join(self._shm_dir, name) for name in self._in_flight}  # noqa: PTH118
        for name in [name for name, path in paths.items() if not os.path.lexists(path)]:
            del self._in_flight[name]
        while len(self._in_flight) > self._max_names // 2:
            self._in_flight.popitem(last=False)

    # ---- outside the lock ------------------------------------------------

    def _report(self, known: _Worker) -> None:
        """Unlink what is in flight for a worker that has ended."""
        if not known.has_unreported_end:
            return
        with self._lock:
            known.has_unreported_end = False
            names = self._take(lambda whose: whose == (known.url, known.path))
        if names:
            self._unlink(names)

    def _disconnect_all(self) -> None:
        with self._lock:
            links = [self._disconnect(known) for known in self._workers.values()]
            self._workers.clear()
        for link in links:
            if link is not None:
                link.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                is_watching = any(known.link is not None for known in self._workers.values())
            try:
                known = self._questions.get(timeout=_WATCH_S if is_watching else None)
            except queue.Empty:
                self._watch()
                continue
            if known is None:
                self._disconnect_all()
                return
            if self._closed:
                known.answered.set()
                known.settled.set()
                continue
            self._ask(known)

    def _watch(self) -> None:
        with self._lock:
            for known in self._workers.values():
                self._check(known)
            ended = [known for known in self._workers.values() if known.has_unreported_end]
        for known in ended:
            self._report(known)

    def _ask(self, known: _Worker) -> None:
        started = time.monotonic()
        with self._lock:
            link = known.link or self._find_link(known.path, "")
        gone = False
        try:
            if link is None:
                link = SenderLink.connect(known.path, timeout_s=self._ask_timeout_s, allowed_uids=(_ROOT,))
                with self._lock:
                    shared = self._find_link("", link.native.worker_id)
                if shared is not None:
                    link.close()
                    link = shared
            result = link.probe(self._shm_dir, timeout_s=self._ask_timeout_s)
            ok, reason = result.ok, result.reason
        except MmcopyTimeoutError as error:
            # It may be slow and well: the connection stays, and says when the worker ends.
            ok, reason = False, str(error)
        except MmcopyError as error:
            ok, reason = False, str(error)
            gone = isinstance(error, EndpointGoneError)
            if link is not None:
                with self._lock:
                    self._end(link, besides=known, gone=gone)
                link = None
        self._metrics.count(Counter.PROBES, "ok" if ok else "gone" if gone else "failed")
        if not ok:
            _log.info("worker %s: %s", known.url, reason)
        with self._lock:
            if self._workers.get((known.url, known.path)) is known:
                self._answer(known, link, started, ok=ok, gone=gone, reason=reason)
            else:  # it was forgotten meanwhile, or all were
                self._close_unshared(link)
        self._report(known)
        known.answered.set()
        try:
            self._offer(known)
        finally:
            with self._lock:
                known.is_asked = False  # only now: an offer that is due would be a reason to ask again
            known.settled.set()

    def _answer(
        self, known: _Worker, link: SenderLink | None, started: float, *, ok: bool, gone: bool, reason: str
    ) -> None:
        was_connected, was_down = known.link is not None, known.state is State.DOWN
        if link is not known.link:
            known.link, known.slot = link, None
            known.native = None if link is None else link.native
        if ok:
            known.state, known.probed_at, known.why, known.failures, known.next_ask = State.READY, started, None, 0, 0.0
            return
        known.failures += 1
        if gone and (was_connected or was_down):
            self._lose(known)
            known.next_ask = started + self._retry_s
            return
        if link is not None or not was_down:
            known.state = State.REFUSED
        known.why = Sharing(Reason.PROBE_FAILED, f"worker {known.url}: {reason}")
        known.next_ask = started + self._backoff_s(known.failures)

    def _offer(self, known: _Worker) -> None:
        with self._lock:
            link = known.link
            if link is None:
                known.no_arena = f"not handed over at {known.path}: no connection"
            if link is None or known.slot is not None or not self._is_offer_due(known, link):
                return
            sharing = self._sharing_link(link)
            slots = [other.slot for other in sharing if other.slot is not None]
            if slots:
                known.slot, known.offered, known.next_offer = slots[0], link, math.inf
                return
            for other in sharing:
                other.is_offered = True
            known.offered = link
        slot, error = None, None
        try:
            slot = self._hand_over(link)
        except MmcopyError as raised:
            error = raised
        with self._lock:
            for other in sharing:
                other.is_offered = False
            known.no_arena = _why_no_arena(known.path, error)
            if known.link is not link:
                return
            known.slot = slot
            known.refusals = 0 if error is None else known.refusals + 1
            known.next_offer = math.inf if error is None else time.monotonic() + self._backoff_s(known.refusals)
            if isinstance(error, EndpointGoneError):
                link.close()
                self._lose(known)
            elif link.closed and not isinstance(error, _KEEPS_THE_LINK):  # by us: it says nothing about the worker
                self._end(link, besides=known, gone=False)
                known.link = known.native = None
        self._report(known)

    def _backoff_s(self, failures: int) -> float:
        return min(self._retry_s * 2.0 ** min(failures - 1, 16), _MAX_BACKOFF_S)


def _key_of(worker: WorkerSpec) -> tuple[str, str]:
    """Url and socket: a worker that starts again has the same url and another socket."""
    return worker.url, worker.labels.get(ENDPOINT_LABEL, "")


def _why_no_arena(path: str, error: MmcopyError | None) -> str:
    if error is None:
        return "the sender has no arena"
    if isinstance(error, EndpointRefusedError):
        return f"the worker takes none at {path}"
    if isinstance(error, ArenaError):
        return "this machine has none to give"
    return f"not handed over at {path}: {type(error).__name__}"
