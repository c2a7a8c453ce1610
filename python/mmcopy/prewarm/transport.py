"""The transport's first time: pinned slots, copy threads, the copy stream, segments, an arena and collectives."""

from __future__ import annotations

import contextlib
from typing import Any

from mmcopy.config import ENDPOINT_LABEL, TransportConfig, WorkerSpec
from mmcopy.errors import MmcopyError
from mmcopy.receive.receiver import Receiver
from mmcopy.send.sender import Sender

__all__ = ["warm_collectives", "warm_receiver"]

_SIZES = (64 << 10, 4 << 20)
"""One chunk that the caller copies by itself, and several that the copy threads share."""

_ARENA_BYTES = 16 << 20
_PROBE_LIMIT_S = 5.0


def warm_receiver(receiver: Receiver) -> None:
    """Receive two tensors from segments, two from messages and, where the receiver has an endpoint, some from an arena,
    as a request's would be, and drop them.

    Blocks until the bytes are on the device. A segment that cannot be written is received inline instead, and so is a
    lease whose arena is not there within 5 s. On a group, where all ranks have to be given the same, only messages.
    """
    import numpy as np

    arrays = [np.ones(size, np.uint8) for size in _SIZES]
    with Sender(TransportConfig(mode="inline")) as sender:
        receiver.receive([sender.send(array) for array in arrays])
    if receiver.group is not None:
        return
    if receiver.endpoint is not None:
        _warm_leases(receiver, receiver.endpoint.path, arrays)
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=receiver.shm_dir) as sender:
        for data in (sender.send(array) for array in arrays):
            with sender.guard(data):
                receiver.receive(data)


def _warm_leases(receiver: Receiver, socket: str, arrays: list[Any]) -> None:
    """Leases of an arena of our own, which is handed over, registered and closed as each sender's is: side by side, and
    scattered."""
    worker = WorkerSpec("grpc://prewarm.invalid", labels={ENDPOINT_LABEL: socket})
    with Sender(TransportConfig(mode="auto", shm_min_bytes=0), arena_bytes=_ARENA_BYTES) as sender:
        with contextlib.suppress(MmcopyError):
            sender.connect(worker, timeout_s=_PROBE_LIMIT_S)
        together = sender.send_many(arrays, worker=worker)
        with sender.guard(*together):
            receiver.receive(together)
        scattered = [sender.send(arrays[0], worker=worker) for _ in range(6)]
        with sender.guard(*scattered):
            receiver.receive(scattered[::-1])


def warm_collectives(group: Any, device: Any) -> None:
    """One small broadcast, on the caller's current stream: a group's first collective makes its connections."""
    import torch
    import torch.distributed as dist

    source = dist.get_global_rank(group, 0)
    dist.broadcast(torch.ones(1, device=device), src=source, group=group)
