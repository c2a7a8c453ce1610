"""What a rank does with mmcopy's stand-in for TokenSpeed's receiving side; commands of tests/rank_process.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mmcopy import MmcopyError, ParallelOptions
from mmcopy.integrations.tokenspeed import EncoderFeatureTransport, ShmTensorHandle, prepare_shm_features

from .ranks import told

transports: list[EncoderFeatureTransport] = []


def items_of(command: dict[str, Any]) -> list[Any]:
    """Items with a handle each, or a tensor of ones where there is no name."""
    items = []
    for name, shape, dtype in command["features"]:
        kind = getattr(torch, dtype)
        handle = None if name is None else ShmTensorHandle(name, tuple(shape), kind)
        feature = torch.ones(shape, dtype=kind) if name is None else None
        items.append(SimpleNamespace(feature=feature, feature_shm=handle))
    return items


def ts_publish(command: dict[str, Any]) -> dict[str, Any]:
    """Publish float32 tensors of random numbers, of these shapes."""
    tensors = [torch.rand(shape) for shape in command["shapes"]]
    handles = [ShmTensorHandle.publish(tensor) for tensor in tensors]
    return {
        "features": [[handle.shm_name, list(handle.shape), "float32"] for handle in handles],
        "told": [told(tensor) for tensor in tensors],
    }


def ts_prepare(command: dict[str, Any]) -> dict[str, Any]:
    """Prepare, and release."""
    items = items_of(command)
    try:
        prepare_shm_features([request_of(items), SimpleNamespace()], dist.group.WORLD, timeout_s=5)
    except MmcopyError as error:
        return {"error": type(error).__name__, "message": str(error)}
    handles = [item.feature_shm for item in items]
    answer = {
        "cross": [handle.is_cross_node for handle in handles],
        "source": [handle.source_rank for handle in handles],
        "reachable": [[handle.is_reachable_from(rank) for rank in range(2)] for handle in handles],
    }
    dist.barrier()
    for handle in handles:
        handle.release()
    return answer


def ts_move(command: dict[str, Any]) -> dict[str, Any]:
    """Prepare, and move to the device as one of the ranks of a tensor-parallel encoder."""
    items = items_of(command)
    transport = EncoderFeatureTransport(
        tp_group=dist.group.WORLD, parallel=ParallelOptions(**command.get("parallel", {})), timeout_s=5
    )
    transports.append(transport)
    prepare_shm_features([request_of(items)], dist.group.WORLD)
    for item in items:
        if command.get("detached") == dist.get_rank() and item.feature_shm is not None:
            item.feature_shm.detach().close()
    try:
        transport.move_to_device(items, "cpu" if command.get("device") is None else command["device"])
    except (MmcopyError, RuntimeError) as error:
        assert all(item.feature_shm is None for item in items)
        return {"error": type(error).__name__, "message": str(error)}
    assert all(item.feature_shm is None for item in items)
    return {"tensors": [told(item.feature) for item in items], "metrics": transport.metrics.snapshot()}


def ts_route(command: dict[str, Any]) -> dict[str, Any]:
    """Prepare, route to the owners, and consume what this rank owns."""
    items = items_of(command)
    transport = EncoderFeatureTransport(dp_cpu_group=dist.group.WORLD, timeout_s=5)
    transports.append(transport)
    prepare_shm_features([request_of(items)], dist.group.WORLD)
    try:
        transport.route_to_item_owners(items, command["owned"])
    except (MmcopyError, ValueError, RuntimeError) as error:
        for item in items:
            item.feature_shm.release()
        return {"error": type(error).__name__, "message": str(error)}
    own = set(command["owned"][dist.get_rank()])
    answer = {
        "remote": [item.feature_shm.remote is not None for item in items],
        "tensors": [told(item.feature_shm.consume()) if n in own else None for n, item in enumerate(items)],
    }
    dist.barrier()
    for item in items:
        item.feature_shm.release()
    return answer


def request_of(items: list[Any]) -> Any:
    return SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=items))
