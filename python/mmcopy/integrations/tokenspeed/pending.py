"""Items under way: where the bytes of each are, and how the engine gets at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mmcopy.errors import SegmentNotFoundError
from mmcopy.receive.group import ItemFacts
from mmcopy.receive.request import Request, RequestOpener
from mmcopy.tensors import Inline, ShmHandle, TensorData

from .handle import ShmTensorHandle

if TYPE_CHECKING:
    import torch

__all__ = ["AttachedRequest", "DeviceFeatureItem", "Pending"]


class DeviceFeatureItem(Protocol):
    """What is moved: an item with a tensor, with a handle, or with neither."""

    feature: torch.Tensor | None
    feature_shm: ShmTensorHandle | None


class Pending:
    """One item whose bytes are not on the device yet: in shared memory, or in host memory, as in a message."""

    def __init__(self, item: DeviceFeatureItem) -> None:
        self.item = item
        self.handle = item.feature_shm
        if self.handle is None:
            assert item.feature is not None
            self.data = _inline(item.feature.dtype, tuple(item.feature.shape), item.feature)
        elif self.handle.remote is not None:
            self.data = _inline(self.handle.dtype, self.handle.shape, self.handle.remote)
        else:
            self.data = self.handle.data

    @property
    def facts(self) -> ItemFacts:
        """What the choice of a strategy needs to know."""
        return ItemFacts(self.data.nbytes, self.data.dtype, isinstance(self.data.payload, ShmHandle))


def _inline(dtype: torch.dtype, shape: tuple[int, ...], tensor: torch.Tensor) -> TensorData:
    import torch

    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TensorData(str(dtype).removeprefix("torch."), shape, Inline(memoryview(flat)))


class AttachedRequest(Request):
    """Takes the segments that handles have open; by name they could be gone, because another rank was faster."""

    __slots__ = ("_pending",)

    def __init__(self, opener: RequestOpener, pending: Sequence[Pending]) -> None:
        items = [each.data for each in pending]
        super().__init__(opener.native.request(items), items, opener.metrics)
        self._pending = pending

    def open_reachable(self) -> None:
        segments = [
            each.handle.detach() if each.handle is not None and isinstance(each.data.payload, ShmHandle) else None
            for each in self._pending
        ]
        for n in self.native.open_attached(segments):
            handle = self._pending[n].handle
            assert handle is not None
            self.missing[n] = SegmentNotFoundError(f"segment {handle.shm_name!r} is not attached on this rank")
        self.sizes, self.leases = self.native.opened()
