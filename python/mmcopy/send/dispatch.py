"""Puts parcels on their way: a lease, a segment or the message; the parcels of one request all, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mmcopy._native import LeaseWriter, write_leases
from mmcopy.errors import MmcopyError
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import Inline, ShmHandle, TensorData

from .arena import SenderArena
from .delivery import Delivery
from .parcel import Parcel
from .policy import Policy
from .publishing import Publisher
from .reason import Reason

__all__ = ["Dispatch", "handle_of"]


class Dispatch:
    """A sender's ways, in the order in which they are tried. Thread-safe."""

    def __init__(
        self, publisher: Publisher, arena: SenderArena, policy: Policy, *, num_threads: int, metrics: Metrics
    ) -> None:
        self._publisher = publisher
        self._arena = arena
        self._policy = policy
        self._num_threads = num_threads
        self._metrics = metrics

    def send(self, parcel: Parcel, delivery: Delivery, *, consumers: int = 1, may_lease: bool = True) -> TensorData:
        """One parcel, for so many consumers. Blocks as :meth:`mmcopy.Sender.send`, and raises as that."""
        choice = self._policy.choose(delivery, parcel.nbytes)
        if choice.path == "lease" and may_lease:
            writers = self.lease([parcel.nbytes], delivery, consumers=consumers)
            if writers is not None:
                self.write(writers[0], parcel)
                return self.sent(parcel, handle_of(writers[0]), delivery)
        payload: Inline | ShmHandle | None = None
        reason = delivery.reason if choice.path == "lease" else choice.reason
        if reason is Reason.SEVERAL_READERS and delivery.several_readers and consumers == len(delivery.receivers):
            reason = self._policy.against_names(delivery)
        if reason is None:
            payload, reason = self._publisher.segment(
                parcel.flat, parcel.dtype, delivery, is_gone=self._policy.is_gone, consumers=consumers
            )
        if reason is not None and reason.is_fallback:
            self._metrics.count(Counter.INLINE_FALLBACKS, reason, runtime=delivery.runtime)
        payload = payload or self._publisher.inline(parcel.flat, parcel.dtype, parcel.nbytes)
        return self.sent(parcel, payload, delivery)

    def send_all(self, parcels: Sequence[Parcel], delivery: Delivery, *, consumers: int = 1) -> list[TensorData]:
        """Those that can be leases as one group, the others one by one. An error takes back what was sent before."""
        sent: dict[int, TensorData] = {}
        choices = self._policy.choose_each(delivery, [parcel.nbytes for parcel in parcels])
        grouped = [n for n, choice in enumerate(choices) if choice.path == "lease"]
        writers: list[LeaseWriter] | None = None
        try:
            if grouped:
                writers = self.lease([parcels[n].nbytes for n in grouped], delivery, consumers=consumers)
            if writers is not None:
                self._write_all(writers, [parcels[n] for n in grouped])
                for n, writer in zip(grouped, writers, strict=True):
                    sent[n] = self.sent(parcels[n], handle_of(writer), delivery)
            for n, parcel in enumerate(parcels):
                if n not in sent:
                    # Where the group found no room in time, its members do not wait again, each by itself.
                    sent[n] = self.send(parcel, delivery, consumers=consumers, may_lease=n not in grouped)
        except BaseException:
            for writer in writers or ():
                with contextlib.suppress(MmcopyError):  # one that is not committed is given up, one that is taken back
                    writer.abort()
                    self._cancel_lease(handle_of(writer))
            for data in sent.values():
                with contextlib.suppress(MmcopyError):
                    self.cancel(data)
            raise
        return [sent[n] for n in range(len(parcels))]

    def lease(self, sizes: Sequence[int], delivery: Delivery, *, consumers: int = 1) -> list[LeaseWriter] | None:
        """Leases side by side, each with a mark for every receiver; None when there are none, or too few receivers have
        the arena: to more consumers than it has marks for a lease would be gone before the last has come."""
        numbers = self._policy.consumers(delivery)
        return self._arena.take(sizes, numbers) if consumers <= max(1, len(numbers)) else None

    def write(self, writer: LeaseWriter, parcel: Parcel) -> None:
        """Blocks until all is written and committed; gives the lease up on an error."""
        try:
            writer.write(
                parcel.flat.data, src_dtype=parcel.flat.dtype, dst_dtype=parcel.dtype, num_threads=self._num_threads
            )
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def _write_all(self, writers: Sequence[LeaseWriter], parcels: Sequence[Parcel]) -> None:
        """The same for a request's; on an error the caller gives them up."""
        parts = [
            (writer, parcel.flat.data, parcel.flat.dtype, parcel.dtype)
            for writer, parcel in zip(writers, parcels, strict=True)
        ]
        write_leases(parts, num_threads=self._num_threads)

    def sent(self, parcel: Parcel, payload: Inline | ShmHandle, delivery: Delivery) -> TensorData:
        """What goes into the message, counted."""
        data = TensorData(parcel.dtype, parcel.flat.shape, payload)
        self._metrics.count(Counter.TENSORS_SENT, data.path, runtime=delivery.runtime)
        self._metrics.count(Counter.BYTES_SENT, data.path, parcel.nbytes, runtime=delivery.runtime)
        return data

    def cancel(self, data: TensorData) -> bool:
        """As :meth:`mmcopy.Sender.cancel`."""
        handle = data.payload
        if not isinstance(handle, ShmHandle):
            return False
        return self._cancel_lease(handle) if handle.is_lease else self._publisher.cancel(handle)

    def _cancel_lease(self, handle: ShmHandle) -> bool:
        return self._arena.cancel(handle.name, handle.offset, handle.nbytes, handle.owner_id)


def handle_of(writer: LeaseWriter) -> ShmHandle:
    """The lease's handle, which may be sent before it is written."""
    return ShmHandle(writer.name, writer.offset, writer.nbytes, writer.owner_id)
