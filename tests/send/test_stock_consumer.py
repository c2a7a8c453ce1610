"""Our sender's segments read by SMG's own consumer, ``smg_grpc_servicer.mm_shm``, over the real messages."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

from mmcopy import Sender, TransportConfig, shm_namespace_id
from mmcopy.wire import tokenspeed, vllm

mm_shm = pytest.importorskip("smg_grpc_servicer.mm_shm")


@pytest.mark.parametrize("engine", [tokenspeed, vllm], ids=["tokenspeed", "vllm"])
@pytest.mark.parametrize("min_bytes", [0, 2**62], ids=["segment", "inline"])
def test_the_stock_consumer_reads_and_removes(
    segments: Callable[[], list[str]], engine: ModuleType, min_bytes: int
) -> None:
    arrays = [
        np.random.default_rng(1).standard_normal((300, 1176), np.float32).astype(ml_dtypes.bfloat16),
        np.array([[1, 20, 15]], np.int64),
        np.zeros((0, 3), np.float32),
        np.array(7, np.uint32),
    ]
    with Sender(TransportConfig(mode="shm", shm_min_bytes=min_bytes)) as sender:
        for array in arrays:
            message = engine.to_proto(sender.send(array))
            wanted = "shm" if min_bytes == 0 and array.size else "inline"
            assert message.WhichOneof("payload") == wanted
            assert (message.dtype, tuple(message.shape)) == (array.dtype.name, array.shape)
            assert mm_shm.tensor_payload_bytes(message) == array.tobytes()
        assert [name for name in segments() if not name.endswith(".lock")] == []


def test_both_name_the_same_namespace() -> None:
    assert shm_namespace_id() == mm_shm.shm_namespace_id() != ""
