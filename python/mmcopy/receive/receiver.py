"""The receiving side: described tensors become tensors on the worker's device."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, overload

import numpy as np

from mmcopy.arrays import numpy_dtype
from mmcopy.config import default_num_threads, parse_count, parse_seconds
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    MissingDependencyError,
    MmcopyError,
    PayloadError,
    ReceiveTimeoutError,
)
from mmcopy.metrics import Counter, Metrics, Stage
from mmcopy.tensors import ShmHandle, TensorData

from .cpu import NumpyDestination, TorchDestination
from .group import ParallelOptions
from .pending import PendingReceive
from .request import LeaseOpener, LeaseSource, Source, SourceOpener, flatten, values_of

if TYPE_CHECKING:
    from .group.collective import CollectiveReceive, PackedDestination

__all__ = ["ACCEPT_PREFIXES", "Receiver"]

ACCEPT_PREFIXES = ("smg-tokenspeed-", "mmcopy-")
"""How the names of segments begin that SMG's gateway and mmcopy's own sender make."""

Key = TypeVar("Key")


class _Destination(Protocol):
    def move(
        self, sources: Sequence[Source], *, out: Sequence[Any] | None, while_copying: Callable[[], None]
    ) -> list[Any]: ...

    def check_out(self, sources: Sequence[Source], out: Sequence[object]) -> None: ...

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]: ...

    def close(self) -> None: ...


class Receiver:
    """Puts tensors on ``device`` and leaves nothing in shared memory.

    ``device``: ``"cpu"``, ``"cuda:N"`` (the index is required) or a ``torch.device``. On the CPU ``framework`` picks
    what comes back: ``"torch"`` or ``"numpy"`` (bfloat16 and float8 as ml_dtypes' types, or as unsigned integers of
    the same width without that package). On CUDA always torch; cupy is needed too.

    ``accept_prefixes``: only segments whose names begin so are opened and removed. ``num_threads`` copy threads are
    used for large tensors (None: one a core, 8 at most). On CUDA ``staging_bytes`` of pinned memory, in slots of
    ``slot_bytes``, and the threads are made here; no receive allocates any. ``timeout_s`` bounds one
    receive's waiting for copy threads and the GPU.

    ``endpoint``: the worker's socket, at which senders hand arenas over; without it leases are refused. On CUDA each
    arena is registered when it comes, and its leases are copied to the GPU from where they are, with no copy on the
    host; the endpoint stays the caller's: close it after the receiver.

    ``metrics`` counts, and measures the stages when it was made with ``timings``; ``nvtx`` marks them for a profiler.

    ``group``: a process group of ``torch.distributed`` whose ranks receive together (NCCL for CUDA, gloo for the CPU),
    with ``cpu_group``, a gloo group of the same ranks in the same order, to agree on (None: ``group`` itself, when it
    moves host memory). Every rank makes its receiver so, and every receive is collective then: the same items in the
    same order on every rank, and every rank gets all tensors. Who reads what is decided by ``parallel``; see
    :class:`ParallelOptions`. Collectives run on the stream that is current in the call.

    Methods may be called from several threads; on a group the order of calls must be the same on every rank. After
    ``fork`` the child's copy refuses to work.
    """

    def __init__(
        self,
        device: object,
        *,
        framework: Literal["torch", "numpy"] = "torch",
        shm_dir: str | os.PathLike[str] = "/dev/shm",
        num_threads: int | None = None,
        accept_prefixes: Sequence[str] = ACCEPT_PREFIXES,
        staging_bytes: int = 64 << 20,
        slot_bytes: int = 1 << 20,
        timeout_s: float = 60.0,
        metrics: Metrics | None = None,
        nvtx: bool = False,
        endpoint: WorkerEndpoint | None = None,
        group: Any = None,
        cpu_group: Any = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        self.device = str(device)
        self.shm_dir = os.fspath(shm_dir)
        self.metrics = metrics or Metrics()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None
        self._pending: set[PendingReceive] = set()
        self._timeout_s = parse_seconds(timeout_s, setting="Receiver.timeout_s")
        self.endpoint = endpoint
        self.group = group
        leases = LeaseOpener(endpoint, self.metrics, timeout_s=self._timeout_s)
        self._opener = SourceOpener(self.shm_dir, accept_prefixes, self.metrics, leases=leases)
        threads = parse_count(
            default_num_threads() if num_threads is None else num_threads, setting="Receiver.num_threads"
        )
        staging_bytes = parse_count(staging_bytes, setting="Receiver.staging_bytes")
        slot_bytes = parse_count(slot_bytes, setting="Receiver.slot_bytes", least=4096)
        index = _cuda_index(self.device)
        self._nvtx_range = _nvtx_range() if nvtx else None
        if framework not in ("torch", "numpy"):
            raise ConfigError(f"framework is {framework!r}, want 'torch' or 'numpy'")
        if index is not None:
            from .cuda import CudaDestination

            if framework != "torch":
                raise ConfigError(f"{self.device} gives torch tensors, framework {framework!r} is for the CPU")
            self._destination: _Destination = CudaDestination(
                index,
                staging_bytes=staging_bytes,
                slot_bytes=slot_bytes,
                num_threads=threads,
                timeout_s=self._timeout_s,
                metrics=self.metrics,
                endpoint=endpoint,
            )
        elif framework == "torch":
            self._destination = TorchDestination(num_threads=threads)
        else:
            self._destination = NumpyDestination(num_threads=threads)
        self._collective = None if group is None else self._join(group, cpu_group, framework, parallel)
        if group is None and (cpu_group is not None or parallel is not None):
            raise ConfigError("cpu_group and parallel are for a receiver on a group: give group, too")

    @overload
    def receive(self, items: TensorData, *, out: Any = None) -> Any: ...
    @overload
    def receive(self, items: Mapping[Key, TensorData], *, out: Mapping[Key, Any] | None = None) -> dict[Key, Any]: ...
    @overload
    def receive(self, items: Sequence[TensorData], *, out: Sequence[Any] | None = None) -> list[Any]: ...
    def receive(self, items: TensorData | Mapping[Key, TensorData] | Sequence[TensorData], *, out: Any = None) -> Any:
        """The tensors of one request, in the form of ``items``: one tensor, a dict with its keys, or a list.

        New C-contiguous tensors of each item's dtype and shape (on CUDA views into one allocation, which lives as long
        as any of them), or ``out``, tensors of the caller in the form of ``items`` that have exactly the device, dtype
        and shape, and are contiguous. Blocks the calling thread until every byte has left shared memory and the message
        (call it off an event loop); on CUDA it does not wait for the GPU, and the tensors are safe on the caller's
        current stream. Inline payloads may be reused at once.

        All segments of the request are opened before the first is read, and all are removed, on success and on
        error alike. Raises the error of the first bad item, with nothing delivered: :class:`SegmentNotFoundError`,
        :class:`SegmentPermissionError`, :class:`SegmentSizeError`, :class:`SegmentKindError`,
        :class:`SegmentNameError`, :class:`RepeatedHandleError`, :class:`DeviceMemoryError`,
        :class:`DeviceError` (an ``out`` of the wrong kind: none is written to), :class:`PayloadError` (an item that is
        no :class:`TensorData`), :class:`ReceiveTimeoutError`,
        :class:`ClosedError`; MemoryError when the host has no room. After an error in the middle of a receive ``out``
        holds anything.

        On a group it also blocks until every rank has come, ``timeout_s`` at most, and an error is the same on every
        rank, the lowest failing rank's: also :class:`ParallelMismatchError`, :class:`PeerTimeoutError` (that receive
        failed, the next may work), :class:`PeerLostError` (a rank is gone: make new groups and a new receiver) and
        :class:`PeerFailedError`. Two cases are one rank's alone: a segment that a peer cut short while all ranks read
        it for themselves, and a rank that comes when the others have given up and needs nothing of them. On the CPU,
        too, the tensors are views into one allocation. A segment that only some ranks can open, on another host or in
        another container, is read by one of those and broadcast.
        """
        flat, flat_out, form = self._flatten(items, out)
        return form(self._receive(flat, flat_out))

    @overload
    def receive_owned(self, items: Mapping[Key, TensorData], owners: Mapping[Key, int]) -> dict[Key, Any]: ...
    @overload
    def receive_owned(self, items: Sequence[TensorData], owners: Sequence[int]) -> list[Any]: ...
    def receive_owned(self, items: Mapping[Any, TensorData] | Sequence[TensorData], owners: Any) -> Any:
        """The tensors of the items that this rank owns, and None in the place of those of others.

        For data-parallel ranks that share out the items of a request: ``owners``, in the form of ``items``, has the
        owner's rank in the group. Collective like :meth:`receive` on a group, which it needs, and with its errors. Each
        rank reads its own items. Those whose segment it cannot open, because it is on another host, come from the
        lowest rank that can, in one message a pair of ranks over the CPU group, and go to that owner alone.
        """
        if self._collective is None:
            self.release(items)
            raise ConfigError("receive_owned needs a group: Receiver(..., group=...)")
        is_mapping = isinstance(items, Mapping)
        if is_mapping != isinstance(owners, Mapping) or not isinstance(owners, Iterable):
            self.release(items)
            wanted = "a mapping" if is_mapping else "a sequence"
            raise ConfigError(f"owners is {type(owners).__name__}, want {wanted} of ranks as items is one")
        # A missing owner is found on every rank alike, by the collective.
        by_item = [owners.get(key, -1) for key in items] if isinstance(owners, Mapping) else list(owners)
        flat, _, form = self._flatten(items, None)
        return form(self._receive(flat, None, by_item))

    def receive_async(
        self, items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], *, out: Any = None
    ) -> PendingReceive:
        """:meth:`receive` on a thread of this receiver (two at a time); returns at once.

        The result can be waited for or awaited. Its tensors are safe on the stream that is current now. Not on a group
        (:class:`ConfigError`, and the segments are removed): there every rank has to make its collectives in the order
        of the calls, and beside the caller's own, which a thread cannot promise.
        """
        self._check_process()  # its threads are not in a forked child: nothing would ever run there
        flat, flat_out, form = self._flatten(items, out)
        if self._collective is not None:
            self._opener.release(flat)
            raise ConfigError("receive_async is not there on a group of ranks: call receive, in the same order on all")
        stream = self._destination.on_current_stream()

        def run() -> Any:
            with stream:
                return form(self._receive(flat, flat_out))

        with self._lock:  # so that a close either sees this one or refuses it
            if not self._closed:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(2, thread_name_prefix="mmcopy-receive")
                future = self._threads.submit(run)
                pending = PendingReceive(future, lambda: self._opener.release(flat))
                self._pending.add(pending)
                future.add_done_callback(lambda _: self._pending.discard(pending))
                return pending
        self._opener.release(flat)
        raise ClosedError("the receiver is closed")

    def view(self, item: TensorData) -> np.ndarray[Any, Any]:
        """A lease's own memory as a read-only numpy array, on device ``"cpu"``: nothing is copied.

        The lease is held until the array, and every array made from it, is gone; copy what is to be kept for long, the
        sender waits for its memory. Blocks until the sender has written all, ``timeout_s`` at most. What is no lease is
        refused and left as it is (:class:`PayloadError`), as on another device (:class:`DeviceError`); otherwise raises
        as :meth:`receive`.
        """
        self._check_process()
        if self.device != "cpu":
            raise DeviceError(f"a view is in host memory, this receiver's device is {self.device}: receive it")
        if not isinstance(item, TensorData):
            raise PayloadError(f"item is {type(item).__name__}, want a TensorData")
        if item.path != "lease":
            raise PayloadError(f"{item.dtype} {list(item.shape)} is {item.path}, a view needs a lease: receive it")
        if self._closed:
            self._opener.release([item])
            raise ClosedError("the receiver is closed")
        sources = self._opener.open_all([item])
        try:
            (source,) = sources
            assert isinstance(source, LeaseSource)
            memory = source.native
            source.lease.release_when_dropped()
            source.is_kept = True
        except MmcopyError as error:
            self.metrics.count(Counter.RECEIVE_FAILURES, type(error).__name__)
            raise
        finally:
            self._opener.close(sources, "released")
        self._count([item])
        return np.frombuffer(memory, numpy_dtype(item.dtype)).reshape(item.shape)

    def release(
        self,
        items: TensorData | ShmHandle | Mapping[Any, TensorData | ShmHandle] | Sequence[TensorData | ShmHandle],
    ) -> int:
        """Remove what ``items`` hold in shared memory without reading it; how many segments were removed.

        For a request that is refused or cancelled before it is received. Never raises for a segment that is gone,
        or for a handle that is not acceptable: that one is left alone. Works on a closed receiver too.
        :class:`PayloadError` for what is neither an item nor a collection.
        """
        return self._opener.release([items] if isinstance(items, (TensorData, ShmHandle)) else values_of(items))

    def close(self) -> None:
        """Let receives that were begun end, wait until no copy reads pinned memory, and free it. Idempotent.

        Waits ``timeout_s`` at most for each of the two; then :class:`ReceiveTimeoutError` is raised, and asynchronous
        receives that had not begun are cancelled, their segments removed. Tensors that were received stay valid.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
            threads, self._threads = self._threads, None
        if was_closed or self._pid != os.getpid():
            return
        try:
            if threads is not None:
                self._finish(threads)
            self._destination.close()
        finally:
            self._opener.join(self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, group: Any, cpu_group: Any, framework: str, options: ParallelOptions | None) -> CollectiveReceive:
        from .group.collective import CollectiveReceive
        from .group.group import RankGroup

        if framework != "torch":
            raise ConfigError(f"a group gives torch tensors, framework is {framework!r}")
        return CollectiveReceive(
            RankGroup(group, cpu_group, device_type=self.device.partition(":")[0]),
            options or ParallelOptions(),
            opener=self._opener,
            destination=cast("PackedDestination", self._destination),
            timeout_s=self._timeout_s,
            metrics=self.metrics,
        )

    def _finish(self, threads: ThreadPoolExecutor) -> None:
        """Wait for the asynchronous receives, and end their threads."""
        deadline = time.monotonic() + self._timeout_s
        late = [each for each in list(self._pending) if not each.settle(max(0.0, deadline - time.monotonic()))]
        threads.shutdown(wait=not late)
        if late:
            begun = sum(not each.cancel() for each in late)
            raise ReceiveTimeoutError(
                f"{begun} asynchronous receives did not end within {self._timeout_s:g} s, "
                f"{len(late) - begun} more had not begun and are cancelled"
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the receiver belongs to process {self._pid}, this is {os.getpid()} forked from it: make a new one"
            )

    def _stage(self, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Around a part of a receive: its seconds, and a range for a profiler, each where it was asked for."""
        timer = self.metrics.timer(stage)
        return timer if self._nvtx_range is None else _both(timer, self._nvtx_range(f"mmcopy {stage}"))

    def _receive(self, items: list[TensorData], out: list[Any] | None, owners: list[int] | None = None) -> list[Any]:
        with self._stage(Stage.RECEIVE):
            return self._receive_stages(items, out, owners)

    def _receive_stages(self, items: list[TensorData], out: list[Any] | None, owners: list[int] | None) -> list[Any]:
        self._check_process()
        sources: list[Source] = []
        why = "released"
        try:
            if self._closed:
                self._opener.release(items)
                raise ClosedError("the receiver is closed")
            if self._collective is not None:
                tensors = self._collective.receive(items, out, owners)
            else:
                with self._stage(Stage.OPEN):
                    sources = self._opener.open_all(items)
                if out is not None:
                    self._destination.check_out(sources, out)

                def while_copying() -> None:
                    for source in sources:
                        source.remove("received")

                with self._stage(Stage.MOVE):
                    tensors = self._destination.move(sources, out=out, while_copying=while_copying)
            why = "received"
        except (MmcopyError, MemoryError) as error:
            self.metrics.count(Counter.RECEIVE_FAILURES, type(error).__name__)
            raise
        finally:
            with self._stage(Stage.CLOSE):
                self._opener.close(sources, why)
        self._count(item for item, tensor in zip(items, tensors, strict=True) if tensor is not None)
        return tensors

    def _count(self, received: Iterable[TensorData]) -> None:
        totals: dict[str, tuple[int, int]] = {}
        for item in received:
            path = item.path
            count, nbytes = totals.get(path, (0, 0))
            totals[path] = count + 1, nbytes + item.nbytes
        for path, (count, nbytes) in totals.items():
            self.metrics.count(Counter.TENSORS_RECEIVED, path, count)
            self.metrics.count(Counter.BYTES_RECEIVED, path, nbytes)

    def _flatten(
        self, items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], out: Any
    ) -> tuple[list[TensorData], list[Any] | None, Callable[[list[Any]], Any]]:
        try:
            return flatten(items, out)
        except DeviceError:
            self.release(items)
            raise
        except PayloadError:
            if isinstance(items, Iterable):
                self.release(items)
            raise


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[None], inner: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


def _nvtx_range() -> Callable[[str], contextlib.AbstractContextManager[None]]:
    try:
        from torch.cuda import nvtx
    except ImportError as error:
        raise MissingDependencyError("nvtx=True needs torch: pip install 'mmcopy[torch]'") from error
    marked: Callable[[str], contextlib.AbstractContextManager[None]] = nvtx.range
    return marked


def _cuda_index(device: str) -> int | None:
    """The GPU's index, None for the CPU. Raises :class:`DeviceError` for anything else."""
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match is None:
        hint = "; give the index, for example 'cuda:0'" if device == "cuda" else ""
        raise DeviceError(f"device is {device!r}, want 'cpu' or 'cuda:N'{hint}")
    return int(match[1])
