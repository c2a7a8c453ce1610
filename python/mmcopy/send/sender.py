"""The sending side: an array becomes a :class:`TensorData` whose bytes are in a lease, a segment or the message.

One loop serves every way to send: look at the workers once, decide per tensor (routing.py), take the leases of all
tensors together, write the rest as segments or inline, count. No call here touches CUDA, and torch is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, overload

import numpy as np

from mmcopy._native import Arena, LaterWrite, LeaseWriter, cast_into, start_copy_threads
from mmcopy.arrays import FlatArray, numpy_dtype
from mmcopy.config import (
    ResolvedTransport,
    TransportConfig,
    TransportMode,
    WorkerSpec,
    default_num_threads,
    parse_count,
    parse_seconds,
    read_environment,
)
from mmcopy.errors import (
    ArenaError,
    ArenaFullError,
    ArrayTypeError,
    ClosedError,
    ConfigError,
    InlineTooLargeError,
    MmcopyError,
)
from mmcopy.fanout import names_of
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import Inline, ShmHandle, TensorData, nbytes_of, shape_of

from .leases import DEFAULT_ARENA_BYTES, Reservation, SenderArena, StreamingSend
from .outgoing import Outgoing, dtype_of, outgoing
from .routing import Decision, Delivery, Reason, Route, Snapshot, decide, deliver, plan_route
from .segments import SegmentWriter
from .workers import Connection, Workers

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

_live: weakref.WeakSet[Sender] = weakref.WeakSet()
_fork_hook = threading.Lock()  # held for ever once the hook is registered

_MAX_DELIVERIES = 256

Key = TypeVar("Key", bound=Hashable)
Target: TypeAlias = "WorkerSpec | Sequence[WorkerSpec] | Delivery | None"
"""Who a tensor is for: one worker, several that all read it, a delivery of a route, or no worker in particular."""

_NO_SNAPSHOT = Snapshot()
_STREAM_LIMIT_S = 60.0
"""How long closing waits for streams to be written."""

_DECIDED = frozenset({Reason.MODE, Reason.RECEIVERS_DISAGREE})
"""Reasons that hold whatever is known of the workers."""


class Sender:
    """Publishes arrays for workers.

    A tensor of ``shm_min_bytes`` or more goes by shared memory where its settings and workers allow it: as a lease in
    this sender's arena where the worker has that, otherwise as a segment (one new file in ``shm_dir``, mode 0600). All
    else, and every tensor whose segment cannot be written, goes inside the message; each such fallback is counted by
    reason in ``metrics`` and never raised. Empty tensors are always inline.

    A tensor belongs to the sender until its message is handed over, then to the worker. When the request cannot be
    handed over, :meth:`cancel` takes the tensors back; :meth:`guard` does so by itself. :meth:`close` leaves
    handed-over segments alone. If this process is killed, the next sender or worker of its
    user on the host unlinks what it left, on a thread of its own when it starts and once a minute while it is used.

    Methods may be called from several threads. After ``fork`` the child's copy is closed and owns nothing.

    Args:
        config: What the router was given. SMG's and mmcopy's variables are read here, and never again.
        shm_dir: Where segments are written.
        num_threads: Copy threads for large tensors; None: as many as
            :func:`mmcopy.config.default_num_threads` says.
        inline_max_bytes: Bound of a tensor inside the message (gRPC's own default for a whole message is 4 MiB); None
            sets none.
        metrics: Counters; several senders and receivers may share one object.
        environ: The environment to read; None: that of the process.
        arena_bytes: Size of the arena, made when the first worker with a socket connects; 0: none.
        arena_wait_s: How long a send waits for room in a full arena before the tensor goes by a segment.
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
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        arena_wait_s: float = 0.1,
    ) -> None:
        self.config = config or TransportConfig()
        self.metrics = metrics or Metrics()
        directory = os.fspath(shm_dir)
        self._environment = read_environment(environ)
        if num_threads is None:
            num_threads = default_num_threads(self._environment)
        self._num_threads = parse_count(num_threads, setting="Sender.num_threads")
        if inline_max_bytes is not None:
            inline_max_bytes = parse_count(inline_max_bytes, setting="Sender.inline_max_bytes", least=0)
        self._inline_max_bytes = inline_max_bytes
        arena_bytes = parse_count(arena_bytes, setting="Sender.arena_bytes", least=0)
        if arena_wait_s != 0:  # which is not to wait
            arena_wait_s = parse_seconds(arena_wait_s, setting="Sender.arena_wait_s")
        self._arena_wait_s = arena_wait_s
        self._segments = SegmentWriter(directory, num_threads=self._num_threads, metrics=self.metrics)
        self._arena = SenderArena(arena_bytes, num_threads=self._num_threads, metrics=self.metrics)
        self._workers = Workers(
            directory,
            probe_max_age_s=self.config.probe_max_age_in(self._environment),
            metrics=self.metrics,
            unlink=self._segments.unlink,
            hand_over=self._arena.hand_over,
        )
        self._no_worker = deliver((), self._resolve)
        self._deliveries: dict[int, Delivery] = {}  # by the spec's id, which the delivery keeps from being another's
        self._streams: set[LaterWrite] = set()  # each keeps its source until it is written
        start_copy_threads(self._num_threads + 1)  # here, so that no send starts one
        weakref.finalize(self, self._workers.close)
        _live.add(self)
        if _fork_hook.acquire(blocking=False):
            os.register_at_fork(after_in_child=_disown_all)

    def connect(self, worker: WorkerSpec, *, timeout_s: float = 1.0) -> Connection:
        """Find out now what ``worker`` shares with this sender, and hand the arena over.

        Without it the first :meth:`send` asks, waits a quarter of a second at most under ``auto``, and goes by a
        segment at best. A worker with the label ``mmcopy_endpoint`` is probed over its socket, again if it was before;
        of others the labels say whether they share memory.

        Returns:
            Whether the worker reads segments and has the arena, and in words why not.

        Raises:
            ClosedError: the sender is closed.

        Blocking: for the answer and the hand-over, ``timeout_s`` at most.
        """
        self._check_open()
        return self._workers.connect(worker, timeout_s=timeout_s)

    def route(self, workers: Sequence[WorkerSpec]) -> Route:
        """Which of ``workers``, which serve one request together, gets what, and by which settings.

        Pass its deliveries on to :meth:`send`: ``worker=route.pixels.to(encoder)``, ``worker=route.side_tensors``. They
        are for one request: a worker that answers, or goes down, changes the next one.

        Raises:
            ConfigError: a set of roles that serves no request.
        """
        return plan_route(workers, self._resolve, self._workers.sharing)

    def send(self, array: object, *, dtype: str | None = None, worker: Target = None, consumers: int = 1) -> TensorData:
        """Publish ``array`` for ``worker`` and return what goes into its message.

        Args:
            array: numpy, a torch CPU tensor, DLPack or the buffer protocol, any strides; it arrives C-contiguous in
                its shape, 0-d and empty included.
            dtype: Casts on the way (the pairs in ``mmcopy.tensors.CASTS``); None keeps the array's own.
            worker: One worker, several that all read this very tensor, or a delivery of :meth:`route`.
            consumers: How many receivers read it, each in its own time. A lease serves all of ``worker``'s by one
                handle; where fewer than ``consumers`` have the arena it is a segment. A segment gets a name for each:
                number ``n`` receives ``mmcopy.fanout.for_consumer(data, n)``. A group of ranks that receives together
                is one consumer of a segment.

        Raises:
            ArrayTypeError, DtypeError: an array or cast that cannot be sent.
            InlineTooLargeError: the tensor has to go inline, and exceeds ``inline_max_bytes``.
            ConfigError: ``worker`` or ``consumers`` is invalid.
            ClosedError: the sender is closed.

        Blocking: until all bytes are copied; the source may be reused at once. While the arena is full,
        ``arena_wait_s`` more at most.
        """
        delivery, consumers = self._target(worker, consumers, "send")
        return self._send([outgoing(array, dtype)], delivery, consumers)[0]

    @overload
    def send_many(
        self,
        arrays: Mapping[Key, object],
        *,
        dtype: Mapping[Key, str] | str | None = None,
        worker: Target = None,
        consumers: int = 1,
    ) -> dict[Key, TensorData]: ...
    @overload
    def send_many(
        self,
        arrays: Sequence[object],
        *,
        dtype: Sequence[str | None] | str | None = None,
        worker: Target = None,
        consumers: int = 1,
    ) -> list[TensorData]: ...
    def send_many(self, arrays: Any, *, dtype: Any = None, worker: Target = None, consumers: int = 1) -> Any:
        """:meth:`send` for all tensors of one request, in the form of ``arrays``: a dict with its keys, or a list.

        Leases lie side by side, so that one copy brings them to each GPU. ``dtype``: one for all, or in the form of
        ``arrays``; what a mapping leaves out keeps its dtype. ``consumers`` as in :meth:`send`, the same for all. When
        one tensor cannot be sent, none is: those published before are cancelled. Blocks and raises as :meth:`send`.
        """
        delivery, consumers = self._target(worker, consumers, "send_many")
        if not hasattr(arrays, "__len__") or not hasattr(arrays, "__getitem__"):
            raise ArrayTypeError(f"arrays is {type(arrays).__name__}, want a mapping or a sequence of arrays")
        keys = list(arrays) if isinstance(arrays, Mapping) else list(range(len(arrays)))
        tensors = [outgoing(arrays[key], dtype_of(dtype, key)) for key in keys]
        sent = self._send(tensors, delivery, consumers)
        return dict(zip(keys, sent, strict=True)) if isinstance(arrays, Mapping) else sent

    def send_streaming(
        self, array: object, *, dtype: str | None = None, worker: Target = None, consumers: int = 1
    ) -> StreamingSend:
        """:meth:`send`, but a lease is returned at once and written meanwhile by the copy threads.

        Send ``.data`` on: every consumer follows the writing. ``array`` must stay as it is until ``.wait()`` has
        returned. Where there is no lease this blocks as :meth:`send`, and all is written when it returns.
        """
        delivery, consumers = self._target(worker, consumers, "send_streaming")
        tensor = outgoing(array, dtype)
        writer, may_lease = self._lease_one(delivery, tensor.nbytes, consumers)
        if writer is not None:
            for each in [*self._streams]:
                if each.done():
                    self._streams.discard(each)
            self._check_open()
            writing = writer.write_later(tensor, num_threads=self._num_threads)
            self._streams.add(writing)
            self._count("lease", 1, tensor.nbytes, delivery)
            data = writer.describe(tensor.dtype, tensor.flat.shape)
            return StreamingSend(data, writing, self._streams.discard)
        return StreamingSend(self._send([tensor], delivery, consumers, may_lease=may_lease)[0], None)

    def reserve(self, shape: Sequence[int], dtype: str, *, worker: Target = None, consumers: int = 1) -> Reservation:
        """Memory for a tensor, to write into: where it is a lease, the receivers' GPUs read what is written there.

        ``.array`` is a numpy array (bfloat16 and float8 as ml_dtypes' types, or as unsigned integers of the same width
        without that package). ``.commit()`` returns what goes into the message; a reservation that is dropped is given
        back. Where there is no lease it is ordinary memory, sent by ``commit`` as by :meth:`send`. Raises as
        :meth:`send`, and PayloadError for an invalid shape.

        Blocking: while the arena is full, ``arena_wait_s`` at most.
        """
        delivery, consumers = self._target(worker, consumers, "reserve")
        shape = shape_of(shape)
        nbytes = nbytes_of(dtype, shape)
        writer, may_lease = self._lease_one(delivery, nbytes, consumers)
        if writer is None:
            memory = np.empty(shape, numpy_dtype(dtype))
            tensor = Outgoing(FlatArray(dtype, shape, nbytes, memory.reshape(-1).view(np.uint8)), dtype, nbytes)

            def send() -> TensorData:
                self._check_open()
                return self._send([tensor], delivery, consumers, may_lease=may_lease)[0]

            return Reservation(memory, send, lambda: None)
        array = np.frombuffer(writer, numpy_dtype(dtype), math.prod(shape)).reshape(shape)

        def commit() -> TensorData:
            writer.commit()
            self._count("lease", 1, nbytes, delivery)
            return writer.describe(dtype, shape)

        return Reservation(array, commit, writer.abort)

    def cancel(self, data: TensorData) -> bool:
        """Take ``data`` back: its segment is unlinked, its lease can no longer be claimed.

        For a message that was not handed over. Harmless for inline data, and for what is gone already.

        Returns:
            Whether it was still there.

        Raises:
            ClosedError: in a forked child, whose parent's it is.
        """
        handle = data.payload
        if not isinstance(handle, ShmHandle):
            return False
        self._segments.check_process()
        if handle.is_lease:
            arena = self._arena.native
            return arena is not None and arena.cancel(handle.name, handle.offset, handle.nbytes, handle.owner_id)
        self._workers.discard(names_of(handle))
        return self._segments.cancel(handle)

    @contextlib.contextmanager
    def guard(self, *data: TensorData) -> Iterator[None]:
        """Cancel ``data`` if the block raises (cancellation included); the original exception goes on.

        Leaving the block without an exception is the hand-over: from then on the tensors are the worker's.
        """
        try:
            yield
        except BaseException:
            for item in data:
                try:
                    self.cancel(item)
                except MmcopyError as error:  # must not hide the caller's exception
                    self.metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
                    _log.warning("could not cancel a tensor: %s", error)
            raise

    def mark_down(self, worker: WorkerSpec | str) -> int:
        """Publish nothing more for ``worker`` (or its url) by shared memory, and unlink its segments in flight.

        For a caller that finds out: a failed health check, a call that ends with UNAVAILABLE. A worker with a socket
        needs no report, its connection ends. Tensors for it go inline from now on, until :meth:`mark_up`. What was
        published for several workers to choose from (``route.pixels`` without ``to``) is left alone, because it may be
        another's; so is what is older than the last thousand segments.

        Returns:
            How many segments were unlinked.

        Blocking: for the unlinking only.
        """
        return self._segments.unlink(self._workers.mark_down(_url_of(worker)))

    def mark_up(self, worker: WorkerSpec | str) -> bool:
        """Use shared memory for ``worker`` (or its url) again; True when it was marked down before."""
        return self._workers.mark_up(_url_of(worker))

    @property
    def leases_out(self) -> int:
        """Leases that receivers have not released, and those that are being written."""
        arena = self._arena.native
        return 0 if arena is None else int(arena.statistics()["leases_out"])

    @property
    def arena(self) -> Arena | None:
        """The native arena, for its statistics; None until the first worker has connected."""
        return self._arena.native

    def close(self, *, linger_s: float = 5.0) -> None:
        """Give up this sender's name on the host. Idempotent. Segments that were handed over are left alone.

        Raises:
            MmcopyTimeoutError: the arena's thread did not end within 5 s more; everything else is closed.

        Blocking: until streaming sends are written, 60 s at most, then until all leases in flight are released,
        ``linger_s`` seconds at most: for so long they can still be received.
        """
        self._segments.close()  # first: from here on no stream begins
        deadline = time.monotonic() + _STREAM_LIMIT_S
        for writing in [*self._streams]:
            with contextlib.suppress(MmcopyError):  # that stream's own wait raises it
                writing.wait(max(0.0, deadline - time.monotonic()))
        self._streams.clear()
        try:
            self._arena.close(linger_s=linger_s)
        finally:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- who it is for ---------------------------------------------------

    def _check_open(self) -> None:
        if self._segments.closed_because is not None:
            raise ClosedError(self._segments.closed_because)

    def _resolve(self, worker: WorkerSpec | None) -> ResolvedTransport:
        return self.config.resolve_in(self._environment, worker)

    def _target(self, worker: Target, consumers: int, method: str) -> tuple[Delivery, int]:
        self._check_open()
        found = self._segments.sweeper.sweep_if_due()
        if found is not None:
            self._segments.count_swept(found)
        if type(consumers) is not int or consumers < 1:
            consumers = parse_count(consumers, setting=f"Sender.{method} consumers")
        if isinstance(worker, WorkerSpec):
            known = self._deliveries.get(id(worker))
            if known is None or known.receivers[0] is not worker:
                if len(self._deliveries) >= _MAX_DELIVERIES:
                    self._deliveries.clear()
                known = self._deliveries[id(worker)] = deliver((worker,), self._resolve)
            return known, consumers
        if worker is None:
            return self._no_worker, consumers
        if isinstance(worker, Delivery):
            return worker, consumers
        receivers = tuple(worker) if isinstance(worker, Sequence) else ()
        if not receivers or not all(isinstance(each, WorkerSpec) for each in receivers):
            raise ConfigError(f"worker is {worker!r}, want a WorkerSpec, several, or a Delivery")
        return deliver(receivers, self._resolve, several_readers=True), consumers

    def _look(self, delivery: Delivery, largest_nbytes: int) -> Snapshot:
        """What is known of the receivers, where the path of any tensor depends on it."""
        if delivery.reason in _DECIDED or not delivery.receivers:
            return _NO_SNAPSHOT
        if largest_nbytes == 0 or largest_nbytes < delivery.shm_min_bytes:
            return _NO_SNAPSHOT
        wants_sharing = delivery.mode is TransportMode.AUTO
        return self._workers.snapshot(delivery.receivers, wants_sharing=wants_sharing)

    # ---- the loop --------------------------------------------------------

    def _send(
        self, tensors: Sequence[Outgoing], delivery: Delivery, consumers: int, *, may_lease: bool = True
    ) -> list[TensorData]:
        """Publish the tensors of one request, all or none."""
        sizes = {tensor.nbytes for tensor in tensors}
        snapshot = self._look(delivery, max(sizes, default=0))
        if not may_lease:
            snapshot = snapshot._replace(slots=())
        decisions = {nbytes: decide(delivery, snapshot, nbytes, consumers) for nbytes in sizes}
        leased = self._fitting(tensors, decisions)
        leases = self._lease([tensors[n] for n in leased], snapshot.slots) if leased else []
        if len(leases) == len(tensors):
            self._count("lease", len(leases), sum([tensor.nbytes for tensor in tensors]), delivery)
            return leases
        sent: dict[int, TensorData] = dict(zip(leased, leases, strict=False))
        try:
            without = snapshot._replace(slots=())
            for n, tensor in enumerate(tensors):
                if n not in sent:
                    decision = decisions[tensor.nbytes]
                    if decision.path == "lease":  # the arena had no room for it
                        decision = decide(delivery, without, tensor.nbytes, consumers)
                    sent[n] = self._segment_or_inline(tensor, delivery, decision, consumers)
        except BaseException:
            for data in sent.values():
                with contextlib.suppress(MmcopyError):
                    self.cancel(data)
            raise
        for path in ("lease", "segment", "inline"):
            theirs = [data.nbytes for data in sent.values() if data.path == path]
            if theirs:
                self._count(path, len(theirs), sum(theirs), delivery)
        return [sent[n] for n in range(len(tensors))]

    def _fitting(self, tensors: Sequence[Outgoing], decisions: Mapping[int, Decision]) -> list[int]:
        """The tensors that are to be leases, without those larger than the arena: they must not keep the others off
        it."""
        leased = [n for n, tensor in enumerate(tensors) if decisions[tensor.nbytes].path == "lease"]
        arena = self._arena.native
        if arena is None or not leased:
            return []
        room = arena.data_nbytes
        fitting = [n for n in leased if tensors[n].nbytes <= room]
        if len(fitting) < len(leased):
            self.metrics.count(Counter.LEASE_FALLBACKS, "full", len(leased) - len(fitting))
        return fitting

    def _lease(self, tensors: Sequence[Outgoing], slots: tuple[int, ...]) -> list[TensorData]:
        """The tensors as leases side by side, each with a release flag per slot; none, and counted why, when there are
        none. Blocks, without the GIL, while the arena is full, ``arena_wait_s`` at most, and for the writing."""
        arena = self._arena.native
        if arena is None:
            return []
        try:
            return arena.send(tensors, slots, timeout_s=self._arena_wait_s, num_threads=self._num_threads)
        except (ArenaError, ConfigError, ClosedError) as error:
            self._count_no_lease(error)
            return []

    def _lease_one(self, delivery: Delivery, nbytes: int, consumers: int) -> tuple[LeaseWriter | None, bool]:
        """A lease to be written later, if there is one; and whether a send may still try for one: what found no room
        does not wait for it again."""
        snapshot = self._look(delivery, nbytes)
        arena = self._arena.native
        if arena is None or decide(delivery, snapshot, nbytes, consumers).path != "lease":
            return None, True
        try:
            return arena.take([nbytes], snapshot.slots, timeout_s=self._arena_wait_s)[0], True
        except (ArenaError, ConfigError, ClosedError) as error:
            self._count_no_lease(error)
            return None, False

    def _count_no_lease(self, error: MmcopyError) -> None:
        if isinstance(error, ArenaFullError):
            self.metrics.count(Counter.LEASE_FALLBACKS, "full")
            _log.info("no lease: %s", error)
        else:  # the worker went down between the snapshot and this, or while this waited for room
            self.metrics.count(Counter.LEASE_FALLBACKS, "worker_gone")

    def _segment_or_inline(
        self, tensor: Outgoing, delivery: Delivery, decision: Decision, consumers: int
    ) -> TensorData:
        reason = decision.reason
        if decision.path == "segment":
            written = self._segments.write(tensor, consumers=consumers, runtime=delivery.runtime)
            if isinstance(written, TensorData) and self._noted(written, delivery):
                return written
            reason = written if isinstance(written, Reason) else Reason.WORKER_DOWN
        if reason is not None and reason.is_fallback:
            self.metrics.count(Counter.INLINE_FALLBACKS, reason, runtime=delivery.runtime)
        return TensorData(tensor.dtype, tensor.flat.shape, self._inline(tensor))

    def _noted(self, data: TensorData, delivery: Delivery) -> bool:
        """Note a segment as in flight; False, and it is unlinked, when its worker went down while it was written.

        Of several receivers the sender does not know which gets it, or which name is whose: nothing is noted.
        """
        if len(delivery.receivers) != 1:
            return True
        assert isinstance(data.payload, ShmHandle)
        names = names_of(data.payload)
        if self._workers.note(delivery.receivers[0], names):
            return True
        self._segments.unlink(names)
        return False

    def _inline(self, tensor: Outgoing) -> Inline:
        flat, dtype, nbytes = tensor
        limit = self._inline_max_bytes
        if limit is not None and nbytes > limit:
            raise InlineTooLargeError(
                f"{dtype} {list(flat.shape)} takes {nbytes} bytes inside the message, "
                f"inline_max_bytes allows {limit}: raise it, or let the transport use shared memory"
            )
        if dtype == flat.dtype:
            return Inline(flat.array.tobytes())
        cast = bytearray(nbytes)
        cast_into(flat.array, flat.dtype, cast, dtype, num_threads=self._num_threads)
        return Inline(cast)

    def _count(self, path: str, tensors: int, nbytes: int, delivery: Delivery) -> None:
        """Once a request for each path."""
        runtime = delivery.runtime
        self.metrics.count(Counter.TENSORS_SENT, path, tensors, runtime=runtime)
        self.metrics.count(Counter.BYTES_SENT, path, nbytes, runtime=runtime)

    def _disown(self) -> None:
        self._streams = set()
        self._segments.forget()
        self._arena.forget()
        self._workers.forget()


def _url_of(worker: WorkerSpec | str) -> str:
    return worker.url if isinstance(worker, WorkerSpec) else worker


def _disown_all() -> None:
    for sender in list(_live):
        sender._disown()
