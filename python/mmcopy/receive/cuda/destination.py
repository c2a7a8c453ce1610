"""One GPU, through torch (allocation, streams) and cupy (raw calls that cost about 2 us each).

Everything is given its device index; no other device is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mmcopy._native import CopyPool
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import DeviceError, DeviceMemoryError
from mmcopy.metrics import Metrics
from mmcopy.receive.in_place import DirectCopies, Reading
from mmcopy.receive.plan import (
    ALIGN_BYTES,
    chunk_bytes_for,
    layout,
    parts_in,
    plan_packed,
    plan_scattered,
    plan_windows,
    views_into,
)
from mmcopy.receive.request import Described, LeaseSource, Source
from mmcopy.receive.staging import Filling, Pipeline, Slot, StagingRing, wait_for_event

from .pinned import allocate_slots
from .registration import ArenaRegistry
from .stream import CopyStream, Event, find_current_stream, find_runtime

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDestination"]


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class CudaDestination:
    """Puts sources into tensors on one GPU, through a ring of pinned slots, copy threads and a copy stream.

    The pinned memory (``staging_bytes``, in slots of ``slot_bytes``) and the threads are made here, once.
    """

    def __init__(
        self,
        device_index: int,
        *,
        staging_bytes: int,
        slot_bytes: int,
        num_threads: int,
        timeout_s: float,
        metrics: Metrics,
        endpoint: WorkerEndpoint | None = None,
    ) -> None:
        torch, runtime = find_runtime(device_index)
        self._torch = torch
        self._current_stream = find_current_stream(torch)
        self._runtime = runtime
        self._index = device_index
        self._device = torch.device("cuda", device_index)
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        with torch.cuda.device(device_index):
            self._copy_stream = CopyStream(torch, runtime, device_index)
            memory = allocate_slots(max(2, math.ceil(staging_bytes / slot_bytes)), slot_bytes)
            self._ring = StagingRing([Slot(buffer, Event(runtime)) for buffer in memory])
        self._pool = CopyPool(num_threads)
        name = str(self._device)
        self._pipeline = Pipeline(self._copy_stream, self._ring, self._pool, device=name, metrics=metrics)
        self._direct = DirectCopies(self._copy_stream, timeout_s=timeout_s, metrics=metrics)
        self._arenas: ArenaRegistry | None = None
        if endpoint is not None:
            self._arenas = ArenaRegistry(
                runtime,
                endpoint,
                on_device=lambda: torch.cuda.device(device_index),
                new_event=self._copy_stream.new_event,
                device=name,
            )

    def move(
        self, sources: Sequence[Source], *, out: Sequence[torch.Tensor] | None, while_copying: Callable[[], None]
    ) -> list[torch.Tensor]:
        """The sources' bytes in new tensors on the device, or in ``out``; safe on the caller's current stream.

        New tensors are views into one allocation. Blocks until every byte has left the sources, not for the GPU: the
        last copies may still run when this returns. ``out`` must have been checked by :meth:`check_out`.
        """
        direct = self._in_place(sources)
        if direct:
            return self._move_direct(direct, sources, out, while_copying)
        deadline = time.monotonic() + self._timeout_s
        sizes = tuple(source.data.nbytes for source in sources)
        total = sum(sizes)
        chunk_bytes = chunk_bytes_for(total, num_threads=self._num_threads, slot_bytes=self._ring.slot_bytes)
        if total > chunk_bytes:
            self._pool.rouse(-(-total // chunk_bytes) - 1)  # they wake while the rest is made ready
        plan = (plan_packed if out is None else plan_scattered)(sizes, chunk_bytes=chunk_bytes)
        if not plan.num_chunks:
            with self._on_device():
                while_copying()
                if out is not None:
                    return list(out)
                return _tensors(self._allocate(plan.dest_nbytes, sources), plan.starts, sources)
        with self._on_device(), self._pipeline.begin(plan, sources, deadline=deadline) as filling:
            if out is None:
                base = self._allocate(plan.dest_nbytes, sources)
                tensors, addresses = _tensors(base, plan.starts, sources), [base.data_ptr()]
            else:
                tensors, addresses = list(out), [tensor.data_ptr() for tensor in out]
            self._between(lambda: filling.send(addresses, while_copying=while_copying))
        return tensors

    def _in_place(self, sources: Sequence[Source]) -> dict[int, LeaseSource]:
        """Those of the sources that the GPU can read where they are, by their number, in order."""
        if self._arenas is None:
            return {}
        found = {}
        arena, is_registered = None, False
        for n, source in enumerate(sources):
            if isinstance(source, LeaseSource):
                if source.arena is not arena:  # mostly one for all leases of a request
                    arena = source.arena
                    is_registered = self._arenas.is_registered(arena)
                if is_registered:
                    found[n] = source
        return found

    def _move_direct(
        self,
        direct: Mapping[int, LeaseSource],
        sources: Sequence[Source],
        out: Sequence[torch.Tensor] | None,
        while_copying: Callable[[], None],
    ) -> list[torch.Tensor]:
        """:meth:`move` where some sources are copied straight from their arena."""
        if len(direct) < len(sources):
            return self._move_some_direct(direct, sources, out, while_copying)
        sizes = [source.data.nbytes for source in sources]
        starts, nbytes = layout(sizes)
        with self._on_device():
            if out is None:
                base = self._allocate(nbytes, sources)
                first = base.data_ptr()
                addresses = [first + start for start in starts]
            else:
                addresses = [tensor.data_ptr() for tensor in out]
            readings = zip(direct.values(), itertools.repeat(0), sizes, addresses, strict=False)
            self._between(lambda: self._direct.run(readings, is_packed=out is None, when_queued=while_copying))
            # The views are made under the copies.
            return _tensors(base, starts, sources) if out is None else list(out)

    def _move_some_direct(
        self,
        direct: Mapping[int, LeaseSource],
        sources: Sequence[Source],
        out: Sequence[torch.Tensor] | None,
        while_copying: Callable[[], None],
    ) -> list[torch.Tensor]:
        """The same where the rest is staged. In a shared destination the direct ones come first, side by side as their
        sender laid them."""
        staged = [n for n in range(len(sources)) if n not in direct]
        lease_sizes = [source.data.nbytes for source in direct.values()]
        starts, direct_nbytes = layout(lease_sizes)
        sizes = tuple(sources[n].data.nbytes for n in staged)
        chunk_bytes = chunk_bytes_for(sum(sizes), num_threads=self._num_threads, slot_bytes=self._ring.slot_bytes)
        plan = (plan_packed if out is None else plan_scattered)(sizes, chunk_bytes=chunk_bytes)
        deadline = time.monotonic() + self._timeout_s
        rest = [sources[n] for n in staged]
        with (
            self._on_device(),
            self._pipeline.begin(plan, rest, deadline=deadline) if plan.num_chunks else _NOTHING as filling,
        ):
            if out is None:
                order = dict(zip(direct, starts, strict=True))
                order.update((n, direct_nbytes + start) for n, start in zip(staged, plan.starts, strict=True))
                base = self._allocate(direct_nbytes + plan.dest_nbytes, sources)
                tensors = _tensors(base, [order[n] for n in range(len(sources))], sources)
                first = base.data_ptr()
                lease_addresses, staged_addresses = [first + start for start in starts], [first + direct_nbytes]
            else:
                tensors = list(out)
                lease_addresses = [out[n].data_ptr() for n in direct]
                staged_addresses = [out[n].data_ptr() for n in staged]

            readings = zip(direct.values(), itertools.repeat(0), lease_sizes, lease_addresses, strict=False)
            self._send(filling, staged_addresses, readings, is_packed=out is None, while_copying=while_copying)
        return tensors

    def allocate_packed(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device, for :meth:`read_windows`. Raises :class:`DeviceMemoryError`."""
        try:
            base: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
            return base
        except self._torch.cuda.OutOfMemoryError as error:
            raise self._no_room(nbytes, "a packed buffer") from error

    def read_windows(
        self,
        sources: Sequence[Source],
        starts: Sequence[int],
        base: torch.Tensor,
        windows: Sequence[tuple[int, int]],
        *,
        while_copying: Callable[[], None],
    ) -> None:
        """Fill the windows of ``base``, each a start and a stop in bytes, with what the sources, which begin at
        ``starts`` in it, have there. Blocks and orders streams as :meth:`move`; what lies between the sources gets
        anything. Leases that the GPU reads in place go back behind the last copy out of them; those of which nothing is
        in a window are the caller's to release."""
        whole = tuple(windows)
        parts = parts_in(tuple(source.data.nbytes for source in sources), tuple(starts), windows=whole)
        used = sorted({part.source for part in parts})
        direct = {used[n]: lease for n, lease in self._in_place([sources[n] for n in used]).items()}
        base_address = base.data_ptr()
        readings = [
            (direct[part.source], part.source_start, part.nbytes, base_address + part.dest_start)
            for part in parts
            if part.source in direct
        ]
        staged = [n for n in used if n not in direct]
        total = sum(part.nbytes for part in parts if part.source not in direct)
        chunk_bytes = chunk_bytes_for(total, num_threads=self._num_threads, slot_bytes=self._ring.slot_bytes)
        if total > chunk_bytes:
            self._pool.rouse(-(-total // chunk_bytes) - 1)
        plan = plan_windows(
            tuple(sources[n].data.nbytes for n in staged),
            tuple(starts[n] for n in staged),
            windows=whole,
            chunk_bytes=chunk_bytes,
        )
        if not parts:
            while_copying()
            return
        deadline = time.monotonic() + self._timeout_s
        with (
            self._on_device(),
            self._pipeline.begin(plan, [sources[n] for n in staged], deadline=deadline)
            if plan.num_chunks
            else _NOTHING as filling,
        ):
            self._send(filling, [base_address], readings, is_packed=True, while_copying=while_copying)

    def check_out(self, sources: Sequence[Described], out: Sequence[object]) -> None:
        """Raise :class:`DeviceError` unless each of ``out`` can take its source's bytes as it is."""
        for n, (source, tensor) in enumerate(zip(sources, out, strict=True)):
            data = source.data
            if not isinstance(tensor, self._torch.Tensor):
                raise DeviceError(f"out {n} is {type(tensor).__name__}, want a torch tensor")
            found = (str(tensor.device), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            wanted = (str(self._device), data.dtype, data.shape)
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
        """Wait until no copy reads pinned memory, then let it go. Raises :class:`ReceiveTimeoutError`."""
        deadline = time.monotonic() + self._timeout_s
        self._ring.close(deadline)
        if self._arenas is not None:
            with self._torch.cuda.device(self._index):
                wait_for_event(self._copy_stream.new_event(), deadline, what="copies out of arenas")
            self._direct.close(deadline)
            self._arenas.close(deadline)
        self._pool.close(max(0.0, deadline - time.monotonic()))

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The device first: leaving a stream for one of another device makes that one current, with a context on it.
        with self._torch.cuda.device(self._index), self._torch.cuda.stream(stream):
            yield

    def _send(
        self,
        filling: Filling | None,
        addresses: Sequence[int],
        readings: Iterable[Reading],
        *,
        is_packed: bool,
        while_copying: Callable[[], None],
    ) -> None:
        """Queue what is read in place, and then, while that is copied, what is staged."""

        def staged_too() -> None:
            if filling is None:
                while_copying()
            else:
                filling.send(addresses, while_copying=while_copying)

        self._between(lambda: self._direct.run(readings, is_packed=is_packed, when_queued=staged_too))

    def _between(self, send: Callable[[], None]) -> None:
        """Queue copies between what is on the caller's current stream and what comes there next."""
        caller = self._current_stream(self._index)
        # The allocator may hand out memory that earlier work on the caller's stream still uses, and `out` may
        # still be read there.
        self._copy_stream.wait_for(caller)
        try:
            send()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"cuda:{self._index} refused a copy: {error}") from error
        finally:
            # On success this orders the caller's work after the copies; on failure it keeps the tensors' memory
            # from being handed out while a copy still writes to it.
            self._copy_stream.release(caller)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device the calling thread's current one, as it mostly is."""
        if self._runtime.getDevice() == self._index:
            return _NOTHING
        return self._torch.cuda.device(self._index)  # type: ignore[no-any-return]

    def _allocate(self, dest_nbytes: int, sources: Sequence[Source]) -> torch.Tensor:
        """One allocation on the caller's stream: the one source's tensor, or bytes for all."""
        shape: tuple[int, ...] = (-(-dest_nbytes // ALIGN_BYTES) * ALIGN_BYTES,)  # whole elements of every dtype
        dtype = "uint8"
        if len(sources) == 1:
            shape, dtype = sources[0].data.shape, sources[0].data.dtype
        try:
            base: torch.Tensor = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)
            return base
        except self._torch.cuda.OutOfMemoryError as error:
            raise self._no_room(dest_nbytes, f"{len(sources)} tensors") from error

    def _no_room(self, nbytes: int, what: str) -> DeviceMemoryError:
        free, total = self._torch.cuda.mem_get_info(self._index)
        return DeviceMemoryError(
            f"cuda:{self._index} has no room for {what}: wanted {nbytes} bytes, {free} of {total} free"
        )


def _tensors(base: torch.Tensor, starts: Sequence[int], sources: Sequence[Source]) -> list[torch.Tensor]:
    """What was allocated, as the sources' tensors."""
    return [base] if len(sources) == 1 else views_into(base, starts, sources)
