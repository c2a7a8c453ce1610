"""The sending side: an array becomes a :class:`TensorData` whose bytes are in the message, a segment or a lease.

No call here touches CUDA, and torch is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import numpy as np

from mmcopy._native import LeaseWriter
from mmcopy.arrays import FlatArray, numpy_dtype
from mmcopy.config import (
    TransportConfig,
    WorkerSpec,
    default_num_threads,
    parse_count,
    parse_seconds,
    read_environment,
)
from mmcopy.errors import ArrayTypeError, MmcopyError
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import TensorData, nbytes_of, shape_of

from .arena import DEFAULT_ARENA_BYTES, SenderArena
from .delivery import Choice, Delivery, Sharing
from .dispatch import Dispatch, handle_of
from .outgoing import Reservation, StreamingSend
from .parcel import Parcel, dtype_of, parcel_of
from .policy import ENDPOINT_LABEL, Policy, Target
from .proof import Prover
from .publishing import Publisher
from .route import Route

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

_live: weakref.WeakSet[Sender] = weakref.WeakSet()
_fork_hook = threading.Lock()  # held for ever once the hook is registered

Key = TypeVar("Key", bound=Hashable)


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

    A worker on this host that advertises ``mmcopy_endpoint`` is handed this sender's arena: ``arena_bytes`` of memory,
    made when the first such worker connects (0: none). Its tensors are leases then, written into memory that the worker
    has mapped and its GPU reads in place. While the arena is full a send waits ``arena_wait_s`` at most, and the tensor
    goes by a segment.

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
        arena_bytes: int = DEFAULT_ARENA_BYTES,
        arena_wait_s: float = 0.1,
    ) -> None:
        self.config = config or TransportConfig()
        self.metrics = metrics or Metrics()
        self._shm_dir = os.fspath(shm_dir)
        environment = read_environment(environ)
        if num_threads is None:
            num_threads = default_num_threads(environment)
        self._num_threads = parse_count(num_threads, setting="Sender.num_threads")
        if inline_max_bytes is not None:
            inline_max_bytes = parse_count(inline_max_bytes, setting="Sender.inline_max_bytes", least=0)
        arena_bytes = parse_count(arena_bytes, setting="Sender.arena_bytes", least=0)
        if arena_wait_s != 0:  # which is not to wait
            arena_wait_s = parse_seconds(arena_wait_s, setting="Sender.arena_wait_s")
        self._publisher = Publisher(
            self._shm_dir, num_threads=self._num_threads, inline_max_bytes=inline_max_bytes, metrics=self.metrics
        )
        self._arena = SenderArena(arena_bytes, num_threads=self._num_threads, wait_s=arena_wait_s, metrics=self.metrics)
        self._writers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._prover = Prover(
            self._shm_dir,
            max_age_s=self.config.proof_max_age_in(environment),
            metrics=self.metrics,
            on_gone=self._socket_closed,
            hand_over=self._arena.hand_over,
        )
        self._policy = Policy(
            self.config,
            environment,
            shm_dir=self._shm_dir,
            outstanding=self._publisher.outstanding,
            proofs=self._prover,
        )
        self._dispatch = Dispatch(
            self._publisher, self._arena, self._policy, num_threads=self._num_threads, metrics=self.metrics
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

    def send(self, array: object, *, dtype: str | None = None, worker: Target = None, consumers: int = 1) -> TensorData:
        """Publish ``array`` for ``worker`` and return what goes into its message.

        ``worker``: one, several that all read this very tensor, or a decision of :meth:`route`.

        ``consumers``: how many receivers read it, each in its own time and on its own. A lease serves all of
        ``worker``'s by one handle; where fewer than ``consumers`` have the arena it is a segment. A segment gets a name
        for each: number ``n`` receives ``mmcopy.fanout.for_consumer(data, n)``. A group of ranks that receives together
        is one consumer of a segment.

        ``array``: numpy, a torch CPU tensor, DLPack or the buffer protocol, any strides; it arrives C-contiguous in
        its shape, 0-d and empty included. ``dtype`` casts on the way (the pairs in ``mmcopy.tensors.CASTS``). Blocks
        until all bytes are copied: the source may be reused at once.

        Raises :class:`ArrayTypeError`, :class:`UnknownDtypeError`, :class:`CastError`,
        :class:`InlineTooLargeError`, :class:`ClosedError`, :class:`ConfigError` (``worker`` is none).
        """
        delivery, consumers = self._delivery(worker, consumers, "send")
        return self._dispatch.send(parcel_of(array, dtype), delivery, consumers=consumers)

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
        one cannot be sent, none is: those sent before are taken back. Blocks and raises as :meth:`send`.
        """
        delivery, consumers = self._delivery(worker, consumers, "send_many")
        if not hasattr(arrays, "__len__") or not hasattr(arrays, "__getitem__"):
            raise ArrayTypeError(f"arrays is {type(arrays).__name__}, want a mapping or a sequence of arrays")
        keys = list(arrays) if isinstance(arrays, Mapping) else list(range(len(arrays)))
        parcels = [parcel_of(arrays[key], dtype_of(dtype, key)) for key in keys]
        sent = self._dispatch.send_all(parcels, delivery, consumers=consumers)
        return dict(zip(keys, sent, strict=True)) if isinstance(arrays, Mapping) else sent

    def send_streaming(
        self, array: object, *, dtype: str | None = None, worker: Target = None, consumers: int = 1
    ) -> StreamingSend:
        """:meth:`send`, but as a lease it returns at once and is written meanwhile by a thread of this sender.

        Send ``.data`` on: every consumer follows the writing. ``array`` must stay as it is until ``.wait()`` has
        returned. Where there is no lease this blocks as :meth:`send`, and all is written when it returns.
        """
        delivery, consumers = self._delivery(worker, consumers, "send_streaming")
        parcel = parcel_of(array, dtype)
        may_lease = self._policy.choose(delivery, parcel.nbytes).path == "lease"
        if may_lease:
            writers = self._dispatch.lease([parcel.nbytes], delivery, consumers=consumers)
            if writers is not None:
                data = self._dispatch.sent(parcel, handle_of(writers[0]), delivery)
                return StreamingSend(data, self._write_later(writers[0], parcel))
        # What found no room does not wait for it again.
        data = self._dispatch.send(parcel, delivery, consumers=consumers, may_lease=not may_lease)
        return StreamingSend(data, None)

    def reserve(self, shape: Sequence[int], dtype: str, *, worker: Target = None, consumers: int = 1) -> Reservation:
        """Memory for a tensor, to write into: where it is a lease, the receivers' GPUs read what is written there.

        ``.array`` is a numpy array (bfloat16 and float8 as ml_dtypes' types, or as unsigned integers of the same width
        without that package). ``.commit()`` returns what goes into the message; a reservation that is dropped is given
        back. Where there is no lease it is ordinary memory, sent by ``commit`` as by :meth:`send`. ``consumers`` as
        there. Blocks while the arena is full, ``arena_wait_s`` at most. Raises as :meth:`send`, and
        :class:`PayloadError` for what is no shape.
        """
        delivery, consumers = self._delivery(worker, consumers, "reserve")
        shape = shape_of(shape)
        nbytes = nbytes_of(dtype, shape)
        writers = None
        if self._policy.choose(delivery, nbytes).path == "lease":
            writers = self._dispatch.lease([nbytes], delivery, consumers=consumers)
        if writers is None:
            memory = np.empty(shape, numpy_dtype(dtype))
            bytes_of = memory.reshape(-1).view(np.uint8)

            def send() -> TensorData:
                self._publisher.check_open()
                parcel = Parcel(FlatArray(dtype, shape, bytes_of), dtype, nbytes)
                return self._dispatch.send(parcel, delivery, consumers=consumers)

            return Reservation(memory, send, lambda: None)
        (writer,) = writers
        array = np.frombuffer(writer, numpy_dtype(dtype), math.prod(shape)).reshape(shape)

        def commit() -> TensorData:
            writer.commit()
            parcel = Parcel(FlatArray(dtype, shape, np.empty(0, np.uint8)), dtype, nbytes)
            return self._dispatch.sent(parcel, handle_of(writer), delivery)

        return Reservation(array, commit, writer.abort)

    def cancel(self, data: TensorData) -> bool:
        """Take ``data`` back: its segment is removed, its lease can be claimed no more. True when it was still there.

        For a message that was not handed over. Harmless for inline data, and for what is gone already.
        """
        return self._dispatch.cancel(data)

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
        return self._publisher.take_back(self._publisher.outstanding.lose(url))

    def worker_back(self, worker: WorkerSpec | str) -> bool:
        """Use shared memory for ``worker`` (or its url) again; True when it was gone before."""
        return self._publisher.outstanding.find(worker.url if isinstance(worker, WorkerSpec) else worker)

    def prove(self, worker: WorkerSpec, *, timeout_s: float = 1.0) -> Sharing:
        """Find out now whether ``worker`` can read our segments, and block for the answer, ``timeout_s`` at most.

        Without it the first :meth:`send` under ``auto`` finds out, and waits a quarter of a second at most. A worker
        with the label ``mmcopy_endpoint`` is asked; of others the labels tell. Raises :class:`ClosedError`.
        """
        self._publisher.check_open()
        if worker.labels.get(ENDPOINT_LABEL):
            return self._prover.prove(worker, timeout_s=timeout_s)
        return self._policy.by_labels(worker)

    def distrust(self, worker: WorkerSpec) -> None:
        """Let what ``worker`` has proved count no more: it answered that it cannot read a segment. It is asked again.

        Makes no difference for a worker without the label ``mmcopy_endpoint``.
        """
        if worker.labels.get(ENDPOINT_LABEL):
            self._prover.distrust(worker)

    @property
    def leases_out(self) -> int:
        """Leases that receivers have not given back, and those that are being written."""
        arena = self._arena.native
        return 0 if arena is None else int(arena.statistics()["leases_out"])

    def close(self, *, linger_s: float = 5.0) -> None:
        """Give up this sender's name on the host. Idempotent. Segments that were handed over are left alone.

        Leases that are out can be received for ``linger_s`` seconds more: blocks until all are, at most so long.
        """
        self._publisher.close()  # first: from here on nothing makes threads anew
        with self._lock:
            writers, self._writers = self._writers, None
        if writers is not None:
            writers.shutdown(wait=True)
        self._arena.close(linger_s=linger_s)
        self._prover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _delivery(self, worker: Target, consumers: int, method: str) -> tuple[Delivery, int]:
        self._publisher.check_open()
        return self._policy.delivery(worker), parse_count(consumers, setting=f"Sender.{method} consumers")

    def _write_later(self, writer: LeaseWriter, parcel: Parcel) -> Future[None]:
        with self._lock:
            self._publisher.check_open()
            if self._writers is None:
                self._writers = ThreadPoolExecutor(2, thread_name_prefix="mmcopy-send")
            return self._writers.submit(self._dispatch.write, writer, parcel)

    def _socket_closed(self, url: str, socket: str) -> None:
        self._publisher.take_back(self._publisher.outstanding.take(url, socket=socket))

    def _disown(self) -> None:
        self._lock = threading.Lock()
        self._writers = None
        self._publisher.forget()
        self._arena.forget()
        self._prover.forget()


def _disown_all() -> None:
    for sender in list(_live):
        sender._disown()
