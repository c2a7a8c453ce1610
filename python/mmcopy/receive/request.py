"""What one receive has open: the segments, leases and inline bytes of its items.

Opening, claiming, reading and giving back is native (rust/request.rs), one call for all items. Here it is counted and
logged.

A segment was handed over, so it is the receiver's to unlink, on success and on error alike. The order is: open (all
items, or none), unlink the names behind the first copy, close. A lease is claimed, read where its sender wrote it, and
released, by the host or by a release flag behind the last copy out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mmcopy._native import ArenaMap
from mmcopy._native import Request as NativeRequest
from mmcopy._native import RequestOpener as NativeOpener
from mmcopy.errors import DeviceError, MmcopyError, PayloadError
from mmcopy.metrics import Counter, Metrics
from mmcopy.tensors import ShmHandle, TensorData

if TYPE_CHECKING:
    from mmcopy.endpoint import WorkerEndpoint

__all__ = ["ByteArray", "GivenBack", "Request", "RequestOpener", "count_given_back", "flatten", "values_of"]

_log = logging.getLogger(__name__)

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

GivenBack: TypeAlias = "tuple[int, int, int, list[tuple[str, MmcopyError]]]"
"""What giving back came to: items, segments unlinked, leases released, and what could not be given back and why."""


class RequestOpener:
    """Opens requests: segments in ``shm_dir`` by name, leases of the arenas that came to ``endpoint``.

    Only names that begin with one of ``accept_prefixes`` are opened, and so unlinked: a handle is a peer's word, and
    other programs keep files in the same directory. ``timeout_s`` limits how long a request waits for senders that
    are still writing.
    """

    def __init__(
        self,
        shm_dir: str,
        accept_prefixes: Sequence[str],
        metrics: Metrics,
        *,
        endpoint: WorkerEndpoint | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.shm_dir = shm_dir
        self.metrics = metrics
        self.native = NativeOpener(
            shm_dir, list(accept_prefixes), None if endpoint is None else endpoint.native, timeout_s=timeout_s
        )

    def request(self, items: Sequence[TensorData]) -> Request:
        """A request with nothing open yet."""
        return Request(self.native.request(items), items, self.metrics)

    def release(self, items: Iterable[TensorData | ShmHandle]) -> int:
        """Unlink the segments and release the leases that ``items`` name, unread; return how many. Never raises for a
        bad handle."""
        named = [item for item in items if isinstance(item, (TensorData, ShmHandle))]
        return count_given_back(self.metrics, self.native.release(named), "released")

    def join(self, timeout_s: float) -> bool:
        """Wait until all that was closed is freed; False when the limit comes first."""
        return self.native.join(timeout_s)


class Request:
    """The items of one receive, and what is open of them in ``native``.

    ``sizes`` has the bytes of each item that is open, in order; after :meth:`open_all` that is every item. ``leases``
    are the indices of those that are leases. Call :meth:`close` in any case.
    """

    __slots__ = ("items", "leases", "metrics", "missing", "native", "sizes")

    def __init__(self, native: NativeRequest, items: Sequence[TensorData], metrics: Metrics) -> None:
        self.native = native
        self.items = items
        self.metrics = metrics
        self.sizes: tuple[int, ...] = ()
        self.leases: tuple[int, ...] = ()
        self.missing: dict[int, MmcopyError] = {}

    def open_all(self) -> None:
        """Open every item: all segments exist and are long enough, all leases are claimed. Does not block for senders.

        Raises the error of the first item that cannot be opened.
        """
        self.sizes, self.leases = self.native.open_all()

    def open_reachable(self) -> None:
        """Open what can be opened here. ``missing`` gets the index and the error of each item whose segment is not
        here or may not be opened, whose arena is not mapped here, or whose lease is not for this consumer.

        Unlinks nothing, not on an error either: other ranks may still want to open it. Any other error is raised.
        """
        self.missing = dict(self.native.open_reachable())
        self.sizes, self.leases = self.native.opened()

    def select(self, parts: Sequence[int | TensorData], items: Sequence[TensorData]) -> Request:
        """A request of these alone: open items by their indices, and tensors whose bytes came from elsewhere. ``items``
        describe them. What is open stays this request's to close."""
        part = Request(self.native.select(parts), items, self.metrics)
        part.sizes, part.leases = part.native.opened()
        return part

    def by_item(self) -> dict[int, int]:
        """The indices of what is open by the indices of the items."""
        here = (n for n in range(len(self.items)) if n not in self.missing)
        return {n: index for index, n in enumerate(here)}

    def readable_in_place(self, is_registered: Callable[[ArenaMap], bool]) -> tuple[int, ...]:
        """The indices of the leases whose arena ``is_registered``."""
        arenas = self.native.arenas()
        works = [arena for arena in arenas if is_registered(arena)]
        return self.leases if len(works) == len(arenas) else self.native.leases_in(works)

    def unlink(self, why: str = "received") -> None:
        """Remove the names of the segments; what is open stays readable. Once; never raises."""
        if self.native.has_names:
            count_given_back(self.metrics, self.native.unlink(), why)

    def close(self, why: str) -> None:
        """Unlink what still has a name, release the leases and close the segments; for ``why="released"`` also release
        the items that are not open. Never raises.

        Leases of which copies are queued stay, and are released behind those. The pages of large segments are freed on
        another thread.
        """
        count_given_back(self.metrics, self.native.close(why == "released"), why)
        self.missing = {}


def count_given_back(metrics: Metrics, given_back: GivenBack, why: str) -> int:
    """Count and log what was given back; return how many items."""
    num_items, num_removed, num_released, failures = given_back
    if num_removed:
        metrics.count(Counter.SEGMENTS_REMOVED, why, num_removed)
    if num_released:
        metrics.count(Counter.LEASES_RELEASED, why, num_released)
    for what, error in failures:
        metrics.count(Counter.REMOVE_FAILURES, type(error).__name__)
        _log.warning("could not give back %s: %s", what, error)
    return num_items


def flatten(
    items: TensorData | Mapping[Any, TensorData] | Sequence[TensorData], out: Any
) -> tuple[list[TensorData], list[Any] | None, Callable[[list[Any]], Any]]:
    """The items as a list, ``out`` in the same order, and what gives a list of results the form of ``items``.

    Raises :class:`PayloadError` for an item that is not a :class:`TensorData`, and :class:`DeviceError` for an ``out``
    of another form.
    """
    if isinstance(items, TensorData):
        return [items], None if out is None else [out], lambda results: results[0]
    flat = values_of(items)
    for n, item in enumerate(flat):
        if not isinstance(item, TensorData):
            raise PayloadError(f"item {n} of {len(flat)} is {type(item).__name__}, want a TensorData")
    if isinstance(items, Mapping):
        keys = list(items)
        if out is not None and (not isinstance(out, Mapping) or set(out) != set(keys)):
            given = sorted(map(str, out)) if isinstance(out, Mapping) else type(out).__name__
            raise DeviceError(f"out has the keys {given}, items has {sorted(map(str, keys))}")
        flat_out = None if out is None else [out[key] for key in keys]
        return flat, flat_out, lambda results: dict(zip(keys, results, strict=True))
    if out is not None and not isinstance(out, Sequence):
        raise DeviceError(f"out is {type(out).__name__}, want a sequence of {len(items)} tensors as items is one")
    if out is not None and len(out) != len(items):
        raise DeviceError(f"out has {len(out)} tensors, items has {len(items)}")
    return flat, None if out is None else list(out), lambda results: results


def values_of(items: Mapping[Any, Any] | Sequence[Any]) -> list[Any]:
    """What a mapping or a sequence holds, in order. Raises :class:`PayloadError` for what is neither."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise PayloadError(f"items is {type(items).__name__}, want a TensorData, or a mapping or a sequence of them")
    return list(items.values() if isinstance(items, Mapping) else items)
