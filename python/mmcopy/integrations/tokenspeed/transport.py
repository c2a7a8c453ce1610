"""A batch's features onto the device: TokenSpeed's steps, each on mmcopy's engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmcopy.config import default_num_threads, parse_seconds
from mmcopy.metrics import Counter, Metrics
from mmcopy.receive.group import ParallelOptions, Strategy, choose_strategy
from mmcopy.receive.group.collective import CollectiveReceive, PackedDestination
from mmcopy.receive.group.group import RankGroup
from mmcopy.receive.request import RequestOpener
from mmcopy.receive.staging import StagingOptions

from .handle import SHM_DIR, ShmTensorHandle
from .pending import AttachedRequest, DeviceFeatureItem, Pending
from .routing import route

if TYPE_CHECKING:
    import torch

__all__ = ["EncoderFeatureTransport"]


class EncoderFeatureTransport:
    """Puts the features of encoder batches onto devices.

    ``tp_group`` and ``tp_cpu_group``: the process groups (NCCL and gloo) of the ranks that share one encoder, all of
    which call :meth:`move_to_device` with the same items. ``dp_cpu_group``: the gloo group of the ranks that share out
    items, for :meth:`route_to_item_owners`. ``parallel`` decides as for :class:`mmcopy.Receiver`; its default is
    TokenSpeed's rule and, for large batches, scatter.

    On a GPU the memory of ``staging`` is pinned with the first call for that device, and none later. ``timeout_s``
    bounds each call's waiting. One thread at a time.
    """

    def __init__(
        self,
        *,
        tp_group: Any = None,
        tp_cpu_group: Any = None,
        dp_cpu_group: Any = None,
        parallel: ParallelOptions | None = None,
        num_threads: int | None = None,
        staging: StagingOptions | None = None,
        timeout_s: float = 60.0,
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._tp_groups = (tp_group, tp_cpu_group)
        self._dp_group = None if dp_cpu_group is None else RankGroup(dp_cpu_group, None, device_type="cpu")
        self._options = parallel or ParallelOptions()
        self._num_threads = num_threads or default_num_threads()
        self._staging = staging or StagingOptions()
        self._timeout_s = parse_seconds(timeout_s, setting="EncoderFeatureTransport.timeout_s")
        self._opener = RequestOpener(SHM_DIR, ShmTensorHandle.accept_prefixes, self.metrics)
        self._lock = threading.Lock()
        self._engines: dict[str, tuple[PackedDestination, CollectiveReceive | None]] = {}

    def move_to_device(self, items: Sequence[DeviceFeatureItem], device: torch.device | str) -> None:
        """Put every feature that is in shared memory, or on another device, onto ``device``.

        Handles have been attached. Blocks until the bytes have left shared memory and host memory, not for the GPU: the
        tensors are safe on the current stream, on which the collectives run, too. Small and large ones, also those that
        came inside a message, go through one pipeline in which copying and H2D overlap, and are views into one
        allocation. Whatever happens, every ``feature_shm`` is None afterwards, and its segment is released.

        Raises what :meth:`mmcopy.Receiver.receive` raises; RuntimeError for a handle that no rank has attached.
        """
        handles = [item.feature_shm for item in items]
        try:
            where = _indexed(device)
            pending: list[Pending] = []
            for item in items:
                feature = item.feature
                if item.feature_shm is not None:
                    pending.append(Pending(item))
                elif feature is not None and feature.device != where:
                    if feature.device.type == "cpu":
                        pending.append(Pending(item))
                    else:
                        item.feature = feature.to(where, non_blocking=True)
            if pending:
                for each, tensor in zip(pending, self._move(pending, where), strict=True):
                    each.item.feature = tensor
                    self.metrics.count(Counter.TENSORS_RECEIVED, each.data.path)
                    self.metrics.count(Counter.BYTES_RECEIVED, each.data.path, each.data.nbytes)
        finally:
            for item, handle in zip(items, handles, strict=True):
                if handle is not None:
                    handle.release()
                    item.feature_shm = None

    def strategy_for(self, items: Sequence[DeviceFeatureItem], group_size: int) -> Strategy:
        """How :meth:`move_to_device` has ``group_size`` ranks share the reading of these items, all of one host."""
        facts = [Pending(item).facts for item in items if item.feature_shm is not None or item.feature is not None]
        return choose_strategy(facts, size=group_size, options=self._options)

    def route_to_item_owners(
        self, items: Sequence[DeviceFeatureItem], item_indices_by_rank: Sequence[Sequence[int]]
    ) -> None:
        """Send what an item's owner cannot open to that owner, over ``dp_cpu_group``; its handle has the bytes then.

        ``item_indices_by_rank[n]`` are the items that rank ``n`` of the group owns. Handles have been through
        :func:`prepare_shm_features`. Every rank of the group calls this with the same arguments; when every rank can
        open all, nothing happens and no rank waits. Otherwise blocks until all is there, in pinned memory on a machine
        with a GPU. The segments stay as they are.

        Raises ValueError for a list of another length than the group, or an index of no item, RuntimeError without a
        group, and, on every rank alike, :class:`SegmentNotFoundError` for a segment that no rank of the group
        has, and the error of a segment that cannot be read.
        """
        handles = [item.feature_shm for item in items]
        if not any(handle is not None and handle.is_cross_node for handle in handles):
            return
        group = self._dp_group
        if group is None:
            raise RuntimeError("routing to item owners needs dp_cpu_group")
        if len(item_indices_by_rank) != group.size:
            raise ValueError(f"items are assigned to {len(item_indices_by_rank)} ranks, the group has {group.size}")
        for owner, indices in enumerate(item_indices_by_rank):
            if not all(n in range(len(items)) for n in indices):
                raise ValueError(f"rank {owner} owns the items {list(indices)}, want some of 0 to {len(items) - 1}")
        owned = [(n, owner) for owner, indices in enumerate(item_indices_by_rank) for n in indices]
        apart = [(handle, owner) for n, owner in owned if (handle := handles[n]) is not None and handle.is_cross_node]
        route(group, [handle for handle, _ in apart], [owner for _, owner in apart], timeout_s=self._timeout_s)

    def close(self) -> None:
        """Wait until no copy reads pinned memory, and free it. Idempotent. Tensors stay valid."""
        with self._lock:
            engines, self._engines = self._engines, {}
        for destination, _ in engines.values():
            destination.close()
        self._opener.join(self._timeout_s)

    def _move(self, pending: Sequence[Pending], device: torch.device) -> list[torch.Tensor]:
        destination, collective = self._engine(device)
        request = AttachedRequest(self._opener, pending)
        why = "released"
        try:
            tensors = self._receive(request, pending, destination, collective)
            why = "received"
            return tensors
        finally:
            request.close(why)

    def _receive(
        self,
        request: AttachedRequest,
        pending: Sequence[Pending],
        destination: PackedDestination,
        collective: CollectiveReceive | None,
    ) -> list[torch.Tensor]:
        if collective is not None:
            is_apart = any(each.handle is not None and each.handle.is_cross_node for each in pending)
            facts = [each.facts for each in pending]
            how = choose_strategy(facts, size=collective.group.size, options=self._options)
            if is_apart or how is not Strategy.EACH:
                return collective.receive(request)
        request.open_reachable()
        for error in request.missing.values():
            raise RuntimeError(f"{error}: call attach() on every rank first") from error
        return destination.receive(request)

    def _engine(self, device: torch.device) -> tuple[PackedDestination, CollectiveReceive | None]:
        with self._lock:
            if str(device) not in self._engines:
                self._engines[str(device)] = self._make(device)
            return self._engines[str(device)]

    def _make(self, device: torch.device) -> tuple[PackedDestination, CollectiveReceive | None]:
        destination: PackedDestination
        if device.type == "cuda":
            from mmcopy.receive.cuda import CudaDestination

            destination = CudaDestination(
                device.index,
                staging=self._staging,
                num_threads=self._num_threads,
                timeout_s=self._timeout_s,
                metrics=self.metrics,
            )
        else:
            from mmcopy.receive.cpu import TorchDestination

            destination = TorchDestination(num_threads=self._num_threads)
        if self._tp_groups[0] is None:
            return destination, None
        group = RankGroup(*self._tp_groups, device_type=device.type)
        collective = CollectiveReceive(
            group,
            self._options,
            destination=destination,
            timeout_s=self._timeout_s,
            metrics=self.metrics,
        )
        return destination, collective if group.size > 1 else None


def _indexed(device: torch.device | str) -> torch.device:
    import torch

    found = torch.device(device)
    is_any_gpu = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_any_gpu else found
