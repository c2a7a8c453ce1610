"""The sending side: an array becomes a :class:`TensorData` whose bytes are in the message or in a segment.

No call here touches CUDA, and torch is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from . import _native
from .arrays import FlatArray, flatten
from .config import (
    Choice,
    Delivery,
    Reason,
    Route,
    Sharing,
    TransportConfig,
    WorkerSpec,
    default_num_threads,
    parse_count,
    read_environment,
)
from .errors import (
    CastError,
    ClosedError,
    InlineTooLargeError,
    MmcopyError,
    NoSpaceError,
    SegmentExistsError,
    SegmentIoError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from .metrics import Counter, Metrics
from .outstanding import Outstanding
from .policy import ENDPOINT_LABEL, Policy, Target
from .proof import Prover
from .tensors import Inline, ShmHandle, TensorData, itemsize_of

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

# What a failed write is counted as. Anything else is a defect, or the caller's: it is raised.
_WRITE_FAILURES: tuple[tuple[type[MmcopyError], Reason], ...] = (
    (NoSpaceError, Reason.NO_SPACE),
    (SegmentPermissionError, Reason.PERMISSION),
    (SegmentNotFoundError, Reason.NOT_FOUND),
    (SegmentExistsError, Reason.EXISTS),
    (SegmentIoError, Reason.OS_ERROR),
)

_live: weakref.WeakSet[Sender] = weakref.WeakSet()
_fork_hook = threading.Lock()  # held for ever once the hook is registered


class Sender:
    """Publishes arrays for workers.

    A tensor goes through a segment (one new file in ``shm_dir``, mode 0600) when the transport says so and it has at
    least ``shm_min_bytes``; otherwise, and whenever the write fails, inside the message. A failed write is counted
    by reason in ``metrics`` and never raised, and so is every other fallback. Empty tensors are always inline.

    ``config`` is what the router was given; SMG's and mmcopy's variables are read from ``environ`` (None: that of the
    process) here and never again.

    A segment belongs to the sender until its message is handed over, then to the worker, who removes it. When the
    request cannot be handed over, :meth:`cancel` takes the tensors back; :meth:`guard` does so by itself.
    :meth:`close` leaves handed-over segments alone. If this process is killed, the next sender on the host removes
    what it left. When a worker has gone, :meth:`worker_gone` takes back what was published for it.

    ``inline_max_bytes`` bounds a tensor inside the message (gRPC's own default for a whole message is 4 MiB); None
    sets no bound. ``num_threads`` copy threads are used for large tensors (None: one a core, 8 at most).

    Methods may be called from several threads. After ``fork`` the child's copy is closed and owns nothing.
    """

    def __init__(
        self,
        config: TransportConfig | None = None,
        *,
        shm_dir: str | os.PathLike[str] = "/dev/shm",
        num_threads: int | None = None,
        inline_max_bytes: int | None = None,
        metrics: Metrics | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config or TransportConfig()
        self.metrics = metrics or Metrics()
        self._shm_dir = os.fspath(shm_dir)
        environment = read_environment(environ)
        if num_threads is None:
            num_threads = default_num_threads(environment)
        self._num_threads = parse_count(num_threads, setting="Sender.num_threads")
        if inline_max_bytes is not None:
            parse_count(inline_max_bytes, setting="Sender.inline_max_bytes", least=0)
        self._inline_max_bytes = inline_max_bytes
        self._lock = threading.Lock()
        self._owner: _native.SegmentOwner | None = None
        self._closed_because: str | None = None
        self._outstanding = self._new_outstanding()
        self._prover = Prover(
            self._shm_dir,
            max_age_s=self.config.proof_max_age_in(environment),
            metrics=self.metrics,
            on_gone=self._socket_closed,
        )
        self._policy = Policy(
            self.config,
            environment,
            shm_dir=self._shm_dir,
            outstanding=self._outstanding,
            proofs=self._prover,
        )
        weakref.finalize(self, self._prover.close)
        _live.add(self)
        if _fork_hook.acquire(blocking=False):
            os.register_at_fork(after_in_child=_disown_all)

    def route(self, workers: Sequence[WorkerSpec]) -> Route:
        """Who of ``workers``, which serve one request, gets what, and by which way; see :class:`mmcopy.config.Route`.

        Pass its decisions on to :meth:`send`: ``worker=route.pixels.to(encoder)``, ``worker=route.side_tensors``. They
        are for one request: what a worker proves, or that it goes, changes the next one.
        Raises :class:`ConfigError` for a set of roles that serves no request.
        """
        return self._policy.route(workers)

    def delivery(self, worker: Target) -> Delivery:
        """What :meth:`send` decides for ``worker``, whatever the size: mode, threshold, sources, and why inline."""
        return self._policy.delivery(worker)

    def choose(self, worker: Target, nbytes: int) -> Choice:
        """Which way :meth:`send` would take with ``nbytes`` bytes for ``worker``, and why."""
        return self._policy.choose(self._policy.delivery(worker), nbytes)

    def send(self, array: object, *, dtype: str | None = None, worker: Target = None) -> TensorData:
        """Publish ``array`` for ``worker`` and return what goes into its message.

        ``worker``: one, several that all read this very tensor, or a decision of :meth:`route`.

        ``array``: numpy, a torch CPU tensor, DLPack or the buffer protocol, any strides; it arrives C-contiguous in
        its shape, 0-d and empty included. ``dtype`` casts on the way (the pairs in ``mmcopy.CASTS``). Blocks until
        all bytes are copied: the source may be reused at once.

        Raises :class:`ArrayTypeError`, :class:`UnknownDtypeError`, :class:`CastError`,
        :class:`InlineTooLargeError`, :class:`ClosedError`, :class:`ConfigError` (``worker`` is none).
        """
        self._check_open()
        delivery = self._policy.delivery(worker)
        flat = flatten(array)
        target = flat.dtype if dtype is None else dtype
        nbytes = len(flat.data) // itemsize_of(flat.dtype) * itemsize_of(target)
        if target != flat.dtype and (flat.dtype, target) not in _native.CASTS:
            pairs = ", ".join(f"{a} to {b}" for a, b in sorted(_native.CASTS))
            raise CastError(f"no cast from {flat.dtype} to {target}; there is {pairs}")
        reason = self._policy.choose(delivery, nbytes).reason
        payload: Inline | ShmHandle | None = None
        if reason is None:
            payload, reason = self._write_segment(flat, target, delivery)
        if reason is not None and reason.is_fallback:
            self.metrics.count(Counter.INLINE_FALLBACKS, reason, runtime=delivery.runtime)
        if payload is None:
            payload = self._inline(flat, target, nbytes)
        data = TensorData(target, flat.shape, payload)
        self.metrics.count(Counter.TENSORS_SENT, data.path, runtime=delivery.runtime)
        self.metrics.count(Counter.BYTES_SENT, data.path, nbytes, runtime=delivery.runtime)
        return data

    def cancel(self, data: TensorData) -> bool:
        """Take ``data`` back: its segment is removed. True when it was still there.

        For a message that was not handed over. Harmless for inline data, and for a segment that is gone already.
        """
        if not isinstance(data.payload, ShmHandle):
            return False
        self._outstanding.discard(data.payload.name)
        removed = _native.unlink_segment(self._shm_dir, data.payload.name)
        if removed:
            self.metrics.count(Counter.SEGMENTS_REMOVED, "cancelled")
        return removed

    @contextlib.contextmanager
    def guard(self, *data: TensorData) -> Iterator[None]:
        """Cancel ``data`` if the block raises (cancellation included); the original exception goes on.

        Leaving the block without an exception is the hand-over: from then on the segments are the worker's.
        """
        try:
            yield
        except BaseException:
            for item in data:
                try:
                    self.cancel(item)
                except MmcopyError as error:  # must not hide the caller's exception
                    self.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
                    _log.warning("could not take back a segment: %s", error)
            raise

    def worker_gone(self, worker: WorkerSpec | str) -> int:
        """Publish nothing more for ``worker`` (or its url) by shared memory, and take back what it has not consumed.

        For a caller that finds out: a failed health check, a call that ends with UNAVAILABLE. Tensors for it go inline
        from now on, until :meth:`worker_back`. Returns how many segments were removed. What was published for several
        workers to choose from (``route.pixels`` without ``to``) is not known to be this one's, and is left alone; so is
        what is older than the last thousand segments. Blocks for the removals only.
        """
        url = worker.url if isinstance(worker, WorkerSpec) else worker
        return self._take_back(self._outstanding.lose(url))

    def worker_back(self, worker: WorkerSpec | str) -> bool:
        """Use shared memory for ``worker`` (or its url) again; True when it was gone before."""
        return self._outstanding.find(worker.url if isinstance(worker, WorkerSpec) else worker)

    def prove(self, worker: WorkerSpec, *, timeout_s: float = 1.0) -> Sharing:
        """Find out now whether ``worker`` can read our segments, and block for the answer, ``timeout_s`` at most.

        Without it the first :meth:`send` under ``auto`` finds out, and waits a quarter of a second at most. A worker
        with the label ``mmcopy_endpoint`` is asked; of others the labels tell. Raises :class:`ClosedError`.
        """
        self._check_open()
        if worker.labels.get(ENDPOINT_LABEL):
            return self._prover.prove(worker, timeout_s=timeout_s)
        return self._policy.by_labels(worker)

    def distrust(self, worker: WorkerSpec) -> None:
        """Let what ``worker`` has proved count no more: it answered that it cannot read a segment. It is asked again.

        Makes no difference for a worker without the label ``mmcopy_endpoint``.
        """
        if worker.labels.get(ENDPOINT_LABEL):
            self._prover.distrust(worker)

    def close(self) -> None:
        """Give up this sender's name on the host. Idempotent. Segments that were handed over are left alone."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = "the sender is closed"
            owner, self._owner = self._owner, None
        self._prover.close()
        if owner is not None:
            owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_segment(
        self, flat: FlatArray, target: str, delivery: Delivery
    ) -> tuple[ShmHandle, None] | tuple[None, Reason]:
        try:
            owner = self._owned()
            name = owner.next_name()
            written = _native.write_segment(
                self._shm_dir,
                name,
                flat.data,
                src_dtype=flat.dtype,
                dst_dtype=target,
                num_threads=self._num_threads,
            )
        except tuple(kind for kind, _ in _WRITE_FAILURES) as error:
            reason = next(reason for kind, reason in _WRITE_FAILURES if isinstance(error, kind))
            self.metrics.count(Counter.SHM_WRITE_FAILURES, reason, runtime=delivery.runtime)
            _log.warning("a tensor goes inline, its segment could not be written: %s", error)
            return None, reason
        # Several receivers: one of them gets it, and nobody says here which.
        if len(delivery.receivers) == 1:
            worker = delivery.receivers[0]
            noted = self._outstanding.add(worker.url, name)
            if not noted or self._policy.is_gone(worker):  # it went while this was written
                self._outstanding.discard(name)
                self._take_back([name])
                return None, Reason.WORKER_GONE
        return ShmHandle(name, 0, written, f"mmcopy:{owner.instance_id}"), None

    def _take_back(self, names: Sequence[str]) -> int:
        removed = 0
        for name in names:
            try:
                removed += _native.unlink_segment(self._shm_dir, name)
            except MmcopyError as error:
                self.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
                _log.warning("could not take back a segment: %s", error)
        if removed:
            self.metrics.count(Counter.SEGMENTS_REMOVED, "worker_gone", removed)
        return removed

    def _socket_closed(self, url: str) -> None:
        self._take_back(self._outstanding.take(url))

    def _new_outstanding(self) -> Outstanding:
        directory = self._shm_dir
        return Outstanding(lambda name: os.path.lexists(os.path.join(directory, name)))  # noqa: PTH118

    def _inline(self, flat: FlatArray, target: str, nbytes: int) -> Inline:
        limit = self._inline_max_bytes
        if limit is not None and nbytes > limit:
            raise InlineTooLargeError(
                f"{target} {list(flat.shape)} takes {nbytes} bytes inside the message, "
                f"inline_max_bytes allows {limit}: raise it, or let the transport use shared memory"
            )
        if target == flat.dtype:
            return Inline(flat.data.tobytes())
        cast = bytearray(nbytes)
        _native.cast_into(flat.data, flat.dtype, cast, target, num_threads=self._num_threads)
        return Inline(cast)

    def _owned(self) -> _native.SegmentOwner:
        """This sender's name on the host, taken with its first segment; what dead senders left is removed then."""
        with self._lock:
            self._check_open()
            if self._owner is None:
                names, _ = _native.sweep(self._shm_dir)
                if names:
                    self.metrics.count(Counter.SEGMENTS_REMOVED, "swept", len(names))
                    _log.info("removed %d segments of senders that are gone", len(names))
                self._owner = _native.SegmentOwner(self._shm_dir)
            return self._owner

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise ClosedError(self._closed_because)

    def _disown(self) -> None:
        self._closed_because = "the sender belongs to the process that this one was forked from"
        self._lock = threading.Lock()  # the parent's may have been held at the fork
        self._outstanding = self._new_outstanding()
        self._prover.forget()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.forget()


def _disown_all() -> None:
    for sender in list(_live):
        sender._disown()
