"""The transport's first time: pinned slots, copy threads, the copy stream, segments and collectives."""

from __future__ import annotations

from typing import Any

from mmcopy.config import TransportConfig
from mmcopy.receiver import Receiver
from mmcopy.sender import Sender

__all__ = ["warm_collectives", "warm_receiver"]

_SIZES = (64 << 10, 4 << 20)
"""One chunk that the caller copies by itself, and several that the copy threads share."""


def warm_receiver(receiver: Receiver) -> None:
    """Receive two tensors from segments and two from messages, as a request's would be, and drop them.

    Blocks until the bytes are on the device. A segment that cannot be written is received inline instead.
    """
    import numpy as np

    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=receiver.shm_dir) as sender:
        arrays = [np.ones(size, np.uint8) for size in _SIZES]
        for data in (sender.send(array) for array in arrays):
            with sender.guard(data):
                receiver.receive(data)
    with Sender(TransportConfig(mode="inline")) as sender:
        receiver.receive([sender.send(np.ones(size, np.uint8)) for size in _SIZES])


def warm_collectives(group: Any, device: Any) -> None:
    """One small broadcast, on the caller's current stream: a group's first collective makes its connections."""
    import torch
    import torch.distributed as dist

    source = dist.get_global_rank(group, 0)
    dist.broadcast(torch.ones(1, device=device), src=source, group=group)
