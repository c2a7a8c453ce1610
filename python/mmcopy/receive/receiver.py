"""The receiving side: items that a message describes become tensors on the worker's device."""

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

from mmcopy._native import Process
from mmcopy.arrays import numpy_dtype
from mmcopy.config import ACCEPT_PREFIXES, default_num_threads, parse_count, parse_prefixes, parse_seconds
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    MissingDependencyError,
    MmcopyError,
    MmcopyTimeoutError,
    PayloadError,
)
from mmcopy.metrics import Counter, Metrics, Stage
from mmcopy.tensors import ShmHandle, TensorData

from .cpu import NumpyDestination, TorchDestination
from .group import ParallelOptions
from .pending import PendingReceive
from .request import Request, RequestOpener, flatten, values_of
from .staging import StagingOptions

if TYPE_CHECKING:
    from .group.collective import CollectiveReceive, PackedDestination

__all__ = ["Receiver"]

Key = TypeVar("Key")


class _Destination(Protocol):
    def receive(self, request: Request, out: Sequence[Any] | None = None) -> list[Any]: ...

    def check_out(self, items: Sequence[TensorData], out: Sequence[object]) -> None: ...

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]: ...

    def close(self) -> None: ...


class Receiver:
    """Receives tensors onto ``device`` and leaves nothing in shared memory.

    On CUDA the pinned memory and the copy threads are made here, once. Arenas that come to ``endpoint`` are registered
    with CUDA, and their leases are copied from where they are, with no copy on the host.

    Methods may be called from several threads; on a group the order of calls must be the same on every rank. After
    ``fork`` the child's copy refuses to work.

    Args:
        device: ``"cpu"``, ``"cuda:N"`` (the index is required) or a ``torch.device``. CUDA needs torch and cupy.
        framework: What is returned on the CPU: ``"torch"`` or ``"numpy"`` (bfloat16 and float8 as ml_dtypes' types, or
            as unsigned integers of the same width without that package). CUDA returns torch tensors.
        shm_dir: Where segments are.
        num_threads: Copy threads for large tensors. None: as many as :func:`mmcopy.config.default_num_threads` says.
        accept_prefixes: Only segments whose names begin with one of these are opened and unlinked.
        staging: The pinned memory of a receiver on CUDA.
        timeout_s: Limit of one receive's waiting for copy threads, senders and the GPU.
        metrics: Counts, and measures the stages when it was made with ``timings``.
        nvtx: Mark the stages for a profiler.
        endpoint: The worker's socket, where senders hand arenas over; without it leases are refused. It stays the
            caller's: close it after the receiver.
        group: A process group of ``torch.distributed`` whose ranks receive together (NCCL for CUDA, gloo for the CPU).
            Every rank makes its receiver with it, and every receive is collective then: the same items in the same
            order on every rank, and every rank gets all tensors. Collectives run on the stream that is current.
        cpu_group: A gloo group of the same ranks in the same order, on which they agree. None: ``group``, when it
            moves host memory.
        parallel: Which rank reads what, see :class:`ParallelOptions`.

    Raises:
        ConfigError: An option that cannot be used, with its name and value.
        DeviceError: A device that does not exist.
        MissingDependencyError: torch, or cupy for CUDA, is not installed.
    """

    def __init__(
        self,
        device: object,
        *,
        framework: Literal["torch", "numpy"] = "torch",
        shm_dir: str | os.PathLike[str] = "/dev/shm",
        num_threads: int | None = None,
        accept_prefixes: Sequence[str] = ACCEPT_PREFIXES,
        staging: StagingOptions | None = None,
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
        self._process = Process.current()
        self._lock = threading.Lock()
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None
        self._pending: set[PendingReceive] = set()
        self._timeout_s = parse_seconds(timeout_s, setting="Receiver.timeout_s")
        self.endpoint = endpoint
        self.group = group
        self._opener = RequestOpener(
            self.shm_dir,
            parse_prefixes(accept_prefixes, setting="Receiver.accept_prefixes"),
            self.metrics,
            endpoint=endpoint,
            timeout_s=self._timeout_s,
        )
        threads = parse_count(
            default_num_threads() if num_threads is None else num_threads, setting="Receiver.num_threads"
        )
        index = _cuda_index(self.device)
        self._nvtx_range = _nvtx_range() if nvtx else None
        if framework not in ("torch", "numpy"):
            raise ConfigError(f"framework is {framework!r}, want 'torch' or 'numpy'")
        if index is not None:
            from .cuda import CudaDestination

            if framework != "torch":
                raise ConfigError(f"{self.device} gives torch tensors, framework {framework!r} is for the CPU")
            self.destination: _Destination = CudaDestination(
                index,
                staging=staging or StagingOptions(),
                num_threads=threads,
                timeout_s=self._timeout_s,
                metrics=self.metrics,
                endpoint=endpoint,
            )
        elif framework == "torch":
            self.destination = TorchDestination(num_threads=threads)
        else:
            self.destination = NumpyDestination(num_threads=threads)
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
        """Receive the tensors of one request, in the form of ``items``: one tensor, a dict with its keys, or a list.

        All segments of the request are opened before the first is read, and all are unlinked, on success and on error
        alike. The first bad item fails the request, with nothing delivered.

        On a group an error is the same on every rank, that of the lowest rank that failed. Two cases are one rank's
        alone: a segment that a peer cut short while all ranks read it for themselves, and a rank that comes when the
        others have given up and needs nothing from them. A segment that only some ranks can open, on another host or
        in another container, is read by one of those and broadcast.

        Args:
            items: What :meth:`Sender.send` and its kin returned, or a message carried.
            out: The caller's tensors to fill, in the form of ``items``: contiguous, and of exactly the device, dtype
                and shape. After an error in the middle of a receive they hold anything.

        Returns:
            New C-contiguous tensors of each item's dtype and shape, or ``out``. On CUDA and on a group the new tensors
            are views into one allocation, which lives as long as any of them.

        Raises:
            SegmentNotFoundError, SegmentPermissionError, SegmentSizeError, SegmentError: A segment that cannot be read.
            LeaseError: A lease that cannot be read.
            PayloadError: An item that is not a :class:`TensorData`, or a segment's name that is invalid, not accepted,
                or there twice.
            DeviceError: An ``out`` of the wrong kind; nothing is written to it.
            DeviceMemoryError, MemoryError: No room on the device or the host.
            MmcopyTimeoutError: The limit has come. On a group only this receive has failed, the next may work.
            ClosedError: The receiver is closed.
            ParallelMismatchError, PeerFailedError: On a group.
            PeerLostError: A rank has died: make new groups and a new receiver.

        Blocking: until every byte has left shared memory and the message, and on a group until every rank has come;
        call it off an event loop. It does not wait for the GPU. Inline payloads may be reused at once.
        Stream: the tensors are safe on the caller's current stream.
        """
        flat, flat_out, form = self._flatten(items, out)
        return form(self._receive(flat, flat_out))

    @overload
    def receive_owned(self, items: Mapping[Key, TensorData], owners: Mapping[Key, int]) -> dict[Key, Any]: ...
    @overload
    def receive_owned(self, items: Sequence[TensorData], owners: Sequence[int]) -> list[Any]: ...
    def receive_owned(self, items: Mapping[Any, TensorData] | Sequence[TensorData], owners: Any) -> Any:
        """Receive the items that this rank owns, for data-parallel ranks that share out the items of a request.

        Each rank reads its own items. Those whose segment it cannot open, because it is on another host, come from the
        lowest rank that can, in one message per pair of ranks over the CPU group, and go to that owner alone.

        Args:
            items: The same on every rank.
            owners: For each item its owner's rank in the group, in the form of ``items``.

        Returns:
            The tensors in the form of ``items``; None in the place of those of other owners.

        Raises:
            ConfigError: Without a group, or for owners in another form.

        Collective, with the errors, blocking and stream order of :meth:`receive`.
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
        """Start a :meth:`receive` on a thread of this receiver, two at a time.

        Returns:
            A result that can be waited for or awaited.

        Raises:
            ConfigError: On a group. There every rank has to make its collectives in the order of the calls, which a
                thread cannot promise. The segments are unlinked.

        Blocking: returns at once.
        Stream: the tensors are safe on the stream that is current in this call.
        """
        self._check_process()  # its threads are not in a forked child: nothing would ever run there
        flat, flat_out, form = self._flatten(items, out)
        if self._collective is not None:
            self._opener.release(flat)
            raise ConfigError("receive_async is not there on a group of ranks: call receive, in the same order on all")
        stream = self.destination.on_current_stream()

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

        The lease is held until the array, and every array made from it, is gone. The sender waits for its memory, so
        copy what is kept for long. In a forked child the array holds zeros.

        Raises:
            PayloadError: The item is not a lease; it is left as it is.
            DeviceError: The receiver is on another device.

        Otherwise raises as :meth:`receive`.

        Blocking: until the sender has written all of it, at most ``timeout_s``.
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
        request = self._opener.request([item])
        try:
            request.open_all()
            lease = request.native.take_lease(0)
        except MmcopyError as error:
            self.metrics.count(Counter.RECEIVE_FAILURES, type(error).__name__)
            raise
        finally:
            request.close("released")
        self._count(request)
        return np.frombuffer(lease, numpy_dtype(item.dtype)).reshape(item.shape)

    def release(
        self,
        items: TensorData | ShmHandle | Mapping[Any, TensorData | ShmHandle] | Sequence[TensorData | ShmHandle],
    ) -> int:
        """Give back what ``items`` hold in shared memory without reading it, for a request that is refused or cancelled
        before it is received. Works on a closed receiver too.

        Returns:
            How many segments were unlinked and leases released. One that is gone, or whose handle is not acceptable, is
            left alone.

        Raises:
            PayloadError: ``items`` is neither an item nor a collection.
            ClosedError: in a forked child, whose parent's they are.
        """
        return self._opener.release([items] if isinstance(items, (TensorData, ShmHandle)) else values_of(items))

    def close(self) -> None:
        """Let running receives end, wait until no copy reads pinned memory, and free it. Idempotent.

        Tensors that were received stay valid.

        Raises:
            MmcopyTimeoutError: Running receives, or copies, did not end in time. Asynchronous receives that had not
                begun are cancelled, and their segments unlinked.

        Blocking: at most ``timeout_s`` for receives, and as long for copies.
        """
        if not self._process.is_current():
            return  # without the lock, which may have been held at the fork
        with self._lock:
            was_closed, self._closed = self._closed, True
            threads, self._threads = self._threads, None
        if was_closed:
            return
        try:
            if threads is not None:
                self._finish(threads)
            self.destination.close()
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
            destination=cast("PackedDestination", self.destination),
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
            raise MmcopyTimeoutError(
                "receive",
                f"{begun} asynchronous receives did not end within {self._timeout_s:g} s, "
                f"{len(late) - begun} more had not begun and are cancelled",
            )

    def _check_process(self) -> None:
        if not self._process.is_current():
            raise ClosedError(
                f"the receiver belongs to process {self._process.pid}, this is {os.getpid()}, forked from it: "
                "make a new one"
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
        request = self._opener.request(items)
        why = "released"
        try:
            if self._closed:
                raise ClosedError("the receiver is closed")
            if self._collective is not None:
                tensors = self._collective.receive(request, out, owners)
            else:
                with self._stage(Stage.OPEN):
                    request.open_all()
                if out is not None:
                    self.destination.check_out(items, out)
                with self._stage(Stage.MOVE):
                    tensors = self.destination.receive(request, out)
            why = "received"
        except (MmcopyError, MemoryError) as error:
            self.metrics.count(Counter.RECEIVE_FAILURES, type(error).__name__)
            raise
        finally:
            with self._stage(Stage.CLOSE):
                request.close(why)
        self._count(request, None if owners is None else [n for n, t in enumerate(tensors) if t is not None])
        return tensors

    def _count(self, request: Request, received: list[int] | None = None) -> None:
        for path, count, nbytes in request.native.totals(received):
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
