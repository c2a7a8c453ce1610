"""Whether a worker can read what we write: asked over its socket, remembered for a while, and off the sending path.

Equal namespace ids say that two processes see one file system. They do not say that the worker's user may open files of
mode 0600 there, nor that its mount lets it. So an mmcopy worker is asked: the sender writes a small segment, the worker
opens it and tells its bytes (:mod:`mmcopy.endpoint`). The connection stays open, and its end is the worker's.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mmcopy.config import WorkerSpec
from mmcopy.endpoint import SenderLink
from mmcopy.errors import ArenaError, EndpointGoneError, EndpointRefusedError, EndpointTimeoutError, MmcopyError
from mmcopy.metrics import Counter, Metrics

from .delivery import SHARED, Sharing
from .policy import ENDPOINT_LABEL
from .reason import Reason

__all__ = ["Prover"]

_log = logging.getLogger(__name__)

_WATCH_S = 0.25
"""How often the thread looks whether a worker has gone, besides every use."""
_MAX_BACKOFF_S = 30.0
_ROOT = 0
"""A worker that runs as root may be asked by any user: it can read all files, and it needs none of ours to do harm."""

_KEEPS_THE_LINK = (ArenaError, EndpointRefusedError, type(None))
"""Outcomes of an offer after which we have not ended the connection ourselves."""


@dataclass
class _Worker:
    """What is known of one worker; guarded by the prover's lock."""

    url: str
    path: str
    link: SenderLink | None = None
    proved_at: float | None = None
    failure: Sharing | None = None
    failures: int = 0
    gone: bool = False
    unreported: bool = False
    distrusted: int = 0
    asking: bool = False
    next_ask: float = 0.0
    answered: threading.Event = field(default_factory=threading.Event)
    offered: SenderLink | None = None
    """The link over which the arena was offered; over the same one not before ``next_offer``."""
    next_offer: float = 0.0
    refusals: int = 0
    offering: bool = False
    """It is offered now: then an end of the link can be our own doing."""
    consumer: int | None = None
    """The worker's number as a consumer of the arena that went over ``link``."""
    settled: threading.Event = field(default_factory=threading.Event)
    """The arena was offered."""


class Prover:
    """Asks workers on a thread of its own, and remembers the answers for ``max_age_s`` seconds, renewed at half of it.

    A use of a worker that was not asked before, or whose answer is too old, waits ``first_wait_s`` at most for the
    answer; every other use waits for nothing. A failure drops what was proved; after one the worker is asked again
    ``retry_s`` later, and less and less often. ``on_gone`` is called, from any thread, with the url and the socket of a
    worker whose connection has ended. At most ``max_workers`` are remembered.

    ``hand_over`` is called on the thread and after the proof, until it succeeds: it offers the arena, and returns the
    worker's number as its consumer, or None when there is none to offer. After an :class:`MmcopyError` it is called
    again, as rarely as questions are put again.
    """

    def __init__(
        self,
        shm_dir: str,
        *,
        max_age_s: float,
        metrics: Metrics,
        on_gone: Callable[[str, str], object],
        hand_over: Callable[[SenderLink], int | None] = lambda _link: None,
        first_wait_s: float = 0.25,
        ask_timeout_s: float = 1.0,
        retry_s: float = 1.0,
        max_workers: int = 256,
    ) -> None:
        self._shm_dir = shm_dir
        self._max_age_s = max_age_s
        self._metrics = metrics
        self._on_gone = weakref.WeakMethod(on_gone)  # the thread must not keep the sender
        self._hand_over = hand_over
        self._first_wait_s = first_wait_s
        self._ask_timeout_s = ask_timeout_s
        self._retry_s = retry_s
        self._max_workers = max_workers
        self._lock = threading.Lock()
        self._workers: OrderedDict[tuple[str, str], _Worker] = OrderedDict()
        self._questions: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def sharing(self, worker: WorkerSpec) -> Sharing:
        """Whether ``worker``, which has the label ``mmcopy_endpoint``, can read our segments, as far as we know."""
        with self._lock:
            known = self._known(worker)
            verdict, is_fresh = self._verdict(known)
            wants_to_wait = known.failure is None and verdict is not SHARED
            asked = not is_fresh and self._ask_soon(known)
            answered = known.answered
        self._report_gone(known)
        if not (asked and wants_to_wait):
            return verdict
        answered.wait(self._first_wait_s)
        with self._lock:
            return self._verdict(known)[0]

    def prove(self, worker: WorkerSpec, *, timeout_s: float) -> Sharing:
        """Ask now and offer the arena, and block for both, ``timeout_s`` at most."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            known = self._known(worker)
            known.next_ask = known.next_offer = 0.0
            self._ask_soon(known)
            answered, settled = known.answered, known.settled
        if not answered.wait(timeout_s):
            return Sharing(Reason.NOT_PROVED, f"worker {worker.url} did not answer within {timeout_s:g} s")
        settled.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return self._verdict(known)[0]

    def is_gone(self, worker: WorkerSpec) -> bool:
        """Whether the worker was connected and is no more. One that is not known is connected to, in the background."""
        with self._lock:
            known = self._known(worker)
            self._verdict(known)
            if known.link is None:
                self._ask_soon(known)
            gone = known.gone
        self._report_gone(known)
        return gone

    def consumer(self, worker: WorkerSpec) -> int | None:
        """The worker's number as a consumer of our arena; None when it has none. Never blocks.

        One that is not connected is connected to, in the background, and one that has not got the arena is offered it
        again when it is time.
        """
        with self._lock:
            known = self._known(worker)
            self._verdict(known)
            if known.link is None or (known.consumer is None and self._is_offer_due(known, known.link)):
                self._ask_soon(known)
            consumer = known.consumer
        self._report_gone(known)
        return consumer

    def distrust(self, worker: WorkerSpec) -> None:
        """Drop what ``worker`` has proved; it is asked again when it is used."""
        with self._lock:
            known = self._known(worker)
            known.proved_at = None
            known.next_ask = 0.0
            known.distrusted += 1

    def close(self) -> None:
        """End every connection and the thread, and cut a question under way off; what was not put yet is not put any
        more. May be called again."""
        self._closed = True
        if threading.current_thread() is self._thread:
            # Its sender was garbage that this thread happened to collect, perhaps while it holds the lock.
            self._questions.put(None)
            return
        with self._lock:
            thread, self._thread = self._thread, None
        self._unlink_all()
        if thread is not None:
            self._questions.put(None)
            thread.join(2 * self._ask_timeout_s + 5)

    def forget(self) -> None:
        """For a child after ``fork``: it has no connection and no thread."""
        self._lock = threading.Lock()
        self._closed = True
        self._workers = OrderedDict()
        self._thread = None

    # ---- under the lock --------------------------------------------------

    def _known(self, worker: WorkerSpec) -> _Worker:
        key = (worker.url, worker.labels.get(ENDPOINT_LABEL, ""))
        known = self._workers.get(key)
        if known is None:
            known = self._workers[key] = _Worker(*key)
            if len(self._workers) > self._max_workers:
                _, oldest = self._workers.popitem(last=False)
                link = self._unlink(oldest)
                if link is not None:
                    link.close()
        self._workers.move_to_end(key)
        return known

    def _unlink(self, known: _Worker) -> SenderLink | None:
        """Its link, which the caller closes: a link that we end ourselves does not say that the worker has gone."""
        link, known.link, known.consumer = known.link, None, None
        return link

    def _unlink_all(self) -> None:
        """For the end: takes the lock itself."""
        with self._lock:
            links = [self._unlink(known) for known in self._workers.values()]
            self._workers.clear()
        for link in links:
            if link is not None:
                link.close()

    def _verdict(self, known: _Worker) -> tuple[Sharing, bool]:
        """What to tell, and whether there is no need to ask again soon."""
        if known.link is not None and known.link.closed and not known.offering:
            known.link.close()
            self._lose(known)
        if known.proved_at is not None:
            age = time.monotonic() - known.proved_at
            if age <= self._max_age_s:
                return SHARED, age <= self._max_age_s / 2
        if known.failure is not None:
            return known.failure, False
        return Sharing(Reason.NOT_PROVED, f"worker {known.url} has not answered on {known.path} yet"), False

    def _lose(self, known: _Worker) -> None:
        known.link = known.consumer = None
        known.proved_at = None
        known.unreported = known.unreported or not known.gone
        known.gone = True
        known.failure = Sharing(Reason.WORKER_GONE, f"worker {known.url} has closed {known.path}")
        known.next_ask = 0.0

    @staticmethod
    def _is_offer_due(known: _Worker, link: SenderLink) -> bool:
        return known.offered is not link or time.monotonic() >= known.next_offer

    def _ask_soon(self, known: _Worker) -> bool:
        """Whether a question was put now; not while one is under way or the last failure is too fresh."""
        if known.asking or self._closed or time.monotonic() < known.next_ask:
            return False
        known.asking = True
        known.answered = threading.Event()
        known.settled = threading.Event()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmcopy-proof", daemon=True)
            self._thread.start()
        self._questions.put(known)
        return True

    # ---- outside the lock ------------------------------------------------

    def _report_gone(self, known: _Worker) -> None:
        if not known.unreported:
            return
        with self._lock:
            unreported, known.unreported = known.unreported, False
        if unreported and (on_gone := self._on_gone()) is not None:
            on_gone(known.url, known.path)

    def _run(self) -> None:
        while True:
            with self._lock:
                watching = any(known.link is not None for known in self._workers.values())
            try:
                known = self._questions.get(timeout=_WATCH_S if watching else None)
            except queue.Empty:
                self._watch()
                continue
            if known is None:
                self._unlink_all()
                return
            if self._closed:
                known.answered.set()
                known.settled.set()
                continue
            self._ask(known)

    def _watch(self) -> None:
        with self._lock:
            lost = [
                known
                for known in self._workers.values()
                if known.link is not None and known.link.closed and not known.offering
            ]
            for known in lost:
                self._verdict(known)
        for known in lost:
            self._report_gone(known)

    def _ask(self, known: _Worker) -> None:
        started = time.monotonic()
        with self._lock:
            link, distrusted = known.link, known.distrusted
        gone = False
        try:
            if link is None:
                link = SenderLink.connect(known.path, timeout_s=self._ask_timeout_s, allowed_uids=(_ROOT,))
            result = link.probe(self._shm_dir, timeout_s=self._ask_timeout_s)
            ok, reason = result.ok, result.reason
        except EndpointTimeoutError as error:
            # It may be slow and well: the connection stays, and says when the worker ends.
            ok, reason = False, str(error)
        except MmcopyError as error:
            ok, reason = False, str(error)
            gone = isinstance(error, EndpointGoneError)
            if link is not None:
                link.close()
                link = None
        self._metrics.count(Counter.PROOFS, "ok" if ok else "gone" if gone else "failed")
        if not ok:
            _log.info("worker %s: %s", known.url, reason)
        with self._lock:
            if self._workers.get((known.url, known.path)) is known:
                proved = ok and distrusted == known.distrusted
                self._note(known, link, started, proved=proved, gone=gone, reason=reason)
            elif link is not None:  # it was forgotten meanwhile, or all were
                link.close()
        self._report_gone(known)
        known.answered.set()
        try:
            self._offer(known)
        finally:
            with self._lock:
                known.asking = False  # only now: an offer that is due would be a reason to ask again
            known.settled.set()

    def _offer(self, known: _Worker) -> None:
        with self._lock:
            link = known.link
            if link is None or known.consumer is not None or not self._is_offer_due(known, link):
                return
            known.offered, known.offering = link, True
        consumer, error = None, None
        try:
            consumer = self._hand_over(link)
        except MmcopyError as raised:
            error = raised
        with self._lock:
            known.offering = False
            if known.link is not link:
                return
            known.consumer = consumer
            known.refusals = 0 if error is None else known.refusals + 1
            known.next_offer = math.inf if error is None else time.monotonic() + self._backoff_s(known.refusals)
            if isinstance(error, EndpointGoneError):
                link.close()
                self._lose(known)
            elif link.closed and not isinstance(error, _KEEPS_THE_LINK):  # by us: it says nothing about the worker
                known.link = None
        self._report_gone(known)

    def _backoff_s(self, failures: int) -> float:
        return min(self._retry_s * 2.0 ** min(failures - 1, 16), _MAX_BACKOFF_S)

    def _note(
        self, known: _Worker, link: SenderLink | None, started: float, *, proved: bool, gone: bool, reason: str
    ) -> None:
        was_connected = known.link is not None
        if link is not known.link:
            known.link, known.consumer = link, None
        if link is not None:
            known.gone = False
        if proved:
            known.proved_at, known.failure, known.failures, known.next_ask = started, None, 0, 0.0
            return
        known.proved_at = None
        known.failures += 1
        if gone and (was_connected or known.gone):
            self._lose(known)
            known.next_ask = started + self._retry_s
            return
        known.failure = Sharing(Reason.PROOF_FAILED, f"worker {known.url}: {reason}")
        known.next_ask = started + self._backoff_s(known.failures)
