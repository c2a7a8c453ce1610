"""Tensors that one rank each wants: what it cannot open comes from a rank that can, over the CPU group.

The pure half says who sends what to whom: one packed message for each pair of source and owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmcopy._native import Extents
from mmcopy.config import default_num_threads
from mmcopy.errors import DeviceMemoryError
from mmcopy.receive.plan import Extent, pack
from mmcopy.receive.request import Request
from mmcopy.tensors import Inline, TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["Transfer", "arrived", "host_buffer", "nothing", "plan_transfers", "read_for"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of ``nbytes`` from rank ``source`` to rank ``owner``; ``starts`` are those of the ``items`` in it."""

    source: int
    owner: int
    items: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


def plan_transfers(sizes: Sequence[int], owners: Sequence[int], reachable: Sequence[Sequence[bool]]) -> list[Transfer]:
    """The messages, in the order of pairs, for items whose owner cannot reach them; empty items need none.

    The lowest rank that reaches an item (``reachable[rank][item]``) is its source. Each is reached by one at least.
    """
    pairs: dict[tuple[int, int], list[int]] = {}
    for item, owner in enumerate(owners):
        if sizes[item] and not reachable[owner][item]:
            source = next(rank for rank, row in enumerate(reachable) if row[item])
            pairs.setdefault((source, owner), []).append(item)
    transfers = []
    for (source, owner), items in sorted(pairs.items()):
        layout = pack(tuple(sizes[item] for item in items))
        transfers.append(Transfer(source, owner, tuple(items), layout.starts, layout.nbytes))
    return transfers


def host_buffer(nbytes: int) -> torch.Tensor:
    """Flat uint8 host memory for one message. Not pinned: a GPU's copies go through the receiver's own pinned slots, so
    that no request pins memory. Raises :class:`DeviceMemoryError`."""
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise DeviceMemoryError(f"the host has no room for a message: wanted {nbytes} bytes") from error


def nothing(data: TensorData) -> TensorData:
    """An empty tensor whose segment is elsewhere."""
    return TensorData(data.dtype, data.shape, Inline(b""))


def read_for(transfer: Transfer, request: Request, buffer: torch.Tensor) -> None:
    """Fill the message's ``buffer`` on its source. Blocks; raises what reading raises."""
    here = request.by_item()
    wanted = [(here[item], start) for item, start in zip(transfer.items, transfer.starts, strict=True)]
    extents = Extents([Extent(index, 0, 0, 0, start, request.sizes[index]) for index, start in wanted])
    request.native.read(extents, [buffer.numpy()], num_threads=default_num_threads())


def arrived(transfer: Transfer, items: Sequence[TensorData], buffer: torch.Tensor) -> dict[int, TensorData]:
    """What the owner reads in place of the segments that it cannot reach, by item: parts of the message."""
    flat = memoryview(buffer.numpy())
    parts: dict[int, TensorData] = {}
    for item, start in zip(transfer.items, transfer.starts, strict=True):
        data = items[item]
        parts[item] = TensorData(data.dtype, data.shape, Inline(flat[start : start + data.nbytes]))
    return parts
