"""One GPU, through torch (allocation, streams) and cupy (raw calls that cost about 2 us each).

Every call names its device index; no other device is touched.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mmcopy._native import CopyPool
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import DeviceError, DeviceMemoryError
from mmcopy.metrics import Metrics
from mmcopy.receive.in_place import DirectCopies, Growing
from mmcopy.receive.plan import CopyPlan, Layout, Windows, pack, plan_copies, scatter, views_into
from mmcopy.receive.request import Request
from mmcopy.receive.staging import Filling, Pipeline, Slot, StagingOptions, StagingRing, wait_for_event
from mmcopy.tensors import TensorData

from .pinned import allocate_slots
from .registration import ArenaRegistry
from .stream import CopyStream, CudaInterfaces, Event, find_cuda

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDestination"]


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class CudaDestination:
    """Puts requests into tensors on one GPU, through a ring of pinned slots, copy threads and a copy stream.

    The pinned memory and the threads are made here, once. ``cuda`` is for tests; None finds the real interfaces.
    """

    def __init__(
        self,
        device_index: int,
        *,
        staging: StagingOptions,
        num_threads: int,
        timeout_s: float,
        metrics: Metrics,
        endpoint: WorkerEndpoint | None = None,
        cuda: CudaInterfaces | None = None,
    ) -> None:
        self._cuda = cuda = cuda or find_cuda(device_index)
        self._torch = torch = cuda.torch
        self._index = device_index
        self._device = torch.device("cuda", device_index)
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        with torch.cuda.device(device_index):
            self.copy_stream = CopyStream(cuda, device_index)
            num_slots = max(2, math.ceil(staging.staging_bytes / staging.slot_bytes))
            memory = allocate_slots(cuda, num_slots, staging.slot_bytes)
            self.ring = StagingRing([Slot(buffer, Event(cuda.runtime)) for buffer in memory])
        self._pool = CopyPool(num_threads)
        name = str(self._device)
        self._pipeline = Pipeline(self.copy_stream, self.ring, self._pool, device=name, metrics=metrics)
        self._direct = DirectCopies(self.copy_stream, timeout_s=timeout_s, metrics=metrics)
        self.arenas: ArenaRegistry | None = None
        if endpoint is not None:
            self.arenas = ArenaRegistry(
                cuda.runtime,
                endpoint,
                on_device=lambda: torch.cuda.device(device_index),
                new_event=self.copy_stream.new_event,
                device=name,
            )

    def receive(self, request: Request, out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The request's tensors on the device: views into one allocation, or ``out``, which :meth:`check_out` has
        checked.

        Blocking: until every byte has left the sources; the last copies may still run.
        Stream: safe on the caller's current stream.
        """
        sizes = request.sizes
        if out is not None:
            self.fill(request, scatter(sizes), out)
            return list(out)
        # Leases first, side by side as their sender laid them: they stay one copy.
        layout = pack(sizes, () if len(request.leases) in (0, len(sizes)) else request.leases)
        plan = self._plan(request, layout, None)
        with self._on_device(), self._filling(plan, request) as filling:
            base = self._allocate(layout.nbytes, request.items)
            # The views are made while other threads fill slots, or while the device copies.
            tensors = None if filling is None else self._views(base, layout, request.items)
            self._send(request, plan, filling, [base.data_ptr()], is_packed=True)
            return self._views(base, layout, request.items) if tensors is None else tensors

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device: the base of a packed layout. Raises :class:`DeviceMemoryError`."""
        return self._empty((nbytes,), "uint8", nbytes, "a packed buffer")

    def fill(
        self, request: Request, layout: Layout, bases: Sequence[torch.Tensor], windows: Windows | None = None
    ) -> None:
        """Put the bytes of the open items where ``layout`` says: all, or those in the windows of one packed base.

        Blocks and orders streams as :meth:`receive`. The bytes between tensors of a packed base may change. The
        segments are unlinked behind the first copy. Leases that the GPU reads in place are released behind the last
        copy out of them; those of which nothing is in a window are released when the request is closed.
        """
        plan = self._plan(request, layout, windows)
        with self._on_device(), self._filling(plan, request) as filling:
            addresses = [base.data_ptr() for base in bases]
            self._send(request, plan, filling, addresses, is_packed=layout.is_packed)

    def check_out(self, items: Sequence[TensorData], out: Sequence[object]) -> None:
        """Raise :class:`DeviceError` unless each of ``out`` can take its item's bytes as it is."""
        for n, (item, tensor) in enumerate(zip(items, out, strict=True)):
            if not isinstance(tensor, self._torch.Tensor):
                raise DeviceError(f"out {n} is {type(tensor).__name__}, want a torch tensor")
            found = (str(tensor.device), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            wanted = (str(self._device), item.dtype, item.shape)
            if found != wanted or not tensor.is_contiguous():
                layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
                raise DeviceError(
                    f"out {n} is {found[1]} {list(found[2])} on {found[0]}, {layout}; "
                    f"want {wanted[1]} {list(wanted[2])} on {wanted[0]}, contiguous"
                )

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]:
        """A context, for another thread, in which the stream that is current here and now is the current one."""
        return self._on(self._torch.cuda.current_stream(self._index))

    def close(self) -> None:
        """Wait until no copy reads pinned memory, then free it. Raises :class:`MmcopyTimeoutError`."""
        deadline = time.monotonic() + self._timeout_s
        self.ring.close(deadline)
        if self.arenas is not None:
            with self._torch.cuda.device(self._index):
                wait_for_event(self.copy_stream.new_event(), deadline, what="copies out of arenas")
            self._direct.close(deadline)
            self.arenas.close(deadline)
        self._pool.close(max(0.0, deadline - time.monotonic()))

    def _plan(self, request: Request, layout: Layout, windows: Windows | None) -> CopyPlan:
        in_place: tuple[int, ...] = ()
        if self.arenas is not None and request.leases:
            in_place = request.readable_in_place(self.arenas.is_registered)
        return plan_copies(
            layout, windows, in_place, num_threads=self._num_threads, slot_bytes=self.ring.slot_bytes
        )  # fmt: skip

    def _filling(self, plan: CopyPlan, request: Request) -> contextlib.AbstractContextManager[Filling | None]:
        """Starts filling slots, where anything is staged."""
        if not plan.copies:
            return _NOTHING
        if len(plan.copies) > 1:
            self._pool.wake(len(plan.copies) - 1)  # they wake while the rest is made ready
        return self._pipeline.begin(plan, request, deadline=time.monotonic() + self._timeout_s)

    def _send(
        self, request: Request, plan: CopyPlan, filling: Filling | None, addresses: Sequence[int], *, is_packed: bool
    ) -> None:
        """Queue what is read in place, while that is copied what is staged, and then what is still being written:
        between what is on the caller's current stream and what comes there next."""
        caller = self._cuda.current_stream(self._index)
        # The allocator may hand out memory that earlier work on the caller's stream still uses, and `out` may
        # still be read there.
        self.copy_stream.wait_for(caller)
        growing: list[Growing] = []
        try:
            try:
                if plan.in_place:
                    growing = self._direct.copy(request, plan.direct, addresses, is_packed=is_packed)
                if filling is not None:
                    filling.send(addresses)
                request.unlink()
                if growing:
                    self._direct.follow(request, growing)
            finally:
                if plan.in_place:
                    self._direct.release_behind(request)
        except self._cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"cuda:{self._index} refused a copy: {error}") from error
        finally:
            # On success this orders the caller's work after the copies; on failure it keeps the tensors' memory
            # from being handed out while a copy still writes to it.
            self.copy_stream.release(caller)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The device first: leaving a stream for one of another device makes that one current, with a context on it.
        with self._torch.cuda.device(self._index), self._torch.cuda.stream(stream):
            yield

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device the calling thread's current one, as it mostly is."""
        if self._cuda.runtime.getDevice() == self._index:
            return _NOTHING
        return self._torch.cuda.device(self._index)  # type: ignore[no-any-return]

    def _allocate(self, nbytes: int, items: Sequence[TensorData]) -> torch.Tensor:
        """One allocation on the caller's stream: the one item's tensor, or bytes for all."""
        if len(items) == 1:
            return self._empty(items[0].shape, items[0].dtype, nbytes, "1 tensors")
        return self._empty((nbytes,), "uint8", nbytes, f"{len(items)} tensors")

    def _views(self, base: torch.Tensor, layout: Layout, items: Sequence[TensorData]) -> list[torch.Tensor]:
        return [base] if len(items) == 1 else views_into(base, layout.starts, items)

    def _empty(self, shape: tuple[int, ...], dtype: str, nbytes: int, what: str) -> torch.Tensor:
        try:
            base: torch.Tensor = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)
            return base
        except self._torch.cuda.OutOfMemoryError as error:
            free, total = self._torch.cuda.mem_get_info(self._index)
            raise DeviceMemoryError(
                f"cuda:{self._index} has no room for {what}: wanted {nbytes} bytes, {free} of {total} free"
            ) from error
