"""Typing tests of the sending side. mypy reads this file, nobody runs it: see `make typecheck`.

A line with ``type: ignore`` must be refused by mypy, for that reason: an ignore that is not needed is an error.
"""

from __future__ import annotations

from typing import assert_type

import numpy as np
import torch

import mmcopy
from mmcopy import Inline, Sender, ShmHandle, TensorData, TransportConfig, TransportMode, WorkerSpec
from mmcopy.send.routing import Route


def every_kind_of_array(sender: Sender, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    assert_type(sender.send(array), TensorData)
    assert_type(sender.send(torch.zeros(2, 3), dtype="bfloat16"), TensorData)
    assert_type(sender.send(b"bytes", worker=WorkerSpec("grpc://127.0.0.1:9000")), TensorData)
    sender.send(array, "bfloat16")  # type: ignore[call-arg]
    sender.send(array, dtype=torch.bfloat16)  # type: ignore[arg-type]
    sender.send(array, worker="grpc://127.0.0.1:9000")  # type: ignore[arg-type]


def a_request(sender: Sender, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    assert_type(sender.send_many({"pixels": array}, consumers=2), dict[str, TensorData])
    assert_type(sender.send_many([array, b"bytes"], dtype=["bfloat16", None], consumers=2), list[TensorData])
    sender.send_many([array], consumers="2")  # type: ignore[call-overload]
    assert_type(sender.send_streaming(array, consumers=2).data, TensorData)
    assert_type(sender.reserve((2, 3), "uint8", consumers=2).commit(), TensorData)


def options_are_keywords() -> None:
    Sender()
    Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir="/dev/shm", num_threads=4, inline_max_bytes=1 << 22)
    Sender(TransportConfig(mode=TransportMode.AUTO))
    Sender(TransportConfig(), "/dev/shm")  # type: ignore[call-arg]
    Sender(num_threads="4")  # type: ignore[arg-type]
    Sender("shm")  # type: ignore[arg-type]


def lifetime(data: TensorData) -> None:
    with Sender() as sender:
        assert_type(sender, Sender)
        assert_type(sender.cancel(data), bool)
        with sender.guard(data, data):
            pass


def what_travels(data: TensorData) -> None:
    assert_type(data.dtype, str)
    assert_type(data.shape, tuple[int, ...])
    assert_type(data.nbytes, int)
    if isinstance(data.payload, ShmHandle):
        assert_type(data.payload.name, str)
    else:
        assert_type(data.payload, Inline)
    data.dtype = "uint8"  # type: ignore[misc]


def policy(sender: Sender, workers: list[WorkerSpec]) -> None:
    route = sender.route(workers)
    assert_type(route, Route)
    sender.send(b"a", worker=route.pixels.to(workers[0]))
    sender.send(b"a", worker=route.side_tensors)
    sender.send(b"a", worker=workers)
    sender.send(b"a", worker=["grpc://127.0.0.1:9000"])  # type: ignore[list-item]
    assert_type(sender.mark_down("grpc://127.0.0.1:9000"), int)
    assert_type(sender.mark_up(workers[0]), bool)
    assert_type(mmcopy.config.wire_dtype("image", worker=workers[0], environ={}).dtype, str)
    assert_type(mmcopy.config.load_config("router.yaml").workers, tuple[WorkerSpec, ...])


def settings() -> None:
    TransportConfig(shm_min_bytes="64KiB")
    assert_type(TransportConfig().resolve(WorkerSpec("w"), environ={}).mode_source, str)
    resolved = TransportConfig().resolve()
    assert_type(resolved.mode, TransportMode)
    assert_type(resolved.shm_min_bytes, int)
    assert_type(mmcopy.shm_namespace_id(), str)
    assert_type(mmcopy.__version__, str)
    assert_type(mmcopy.tensors.DTYPES["bfloat16"], int)
