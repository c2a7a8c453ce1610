"""Typing tests of the receiving side and of a worker. mypy reads this file, nobody runs it: see `make typecheck`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, assert_type

import mmcopy
from mmcopy import Metrics, ParallelOptions, Receiver, TensorData
from mmcopy.integrations.smg import ModelInfo, MultimodalItem, SmgWorker, WorkerRequest
from mmcopy.wire import tokenspeed, vllm


def the_result_has_the_form_of_the_items(
    receiver: Receiver, one: TensorData, some: list[TensorData], named: dict[str, TensorData]
) -> None:
    assert_type(receiver.receive(one), Any)
    assert_type(receiver.receive(some), list[Any])
    assert_type(receiver.receive((one, one)), list[Any])
    assert_type(receiver.receive(named), dict[str, Any])
    assert_type(receiver.receive({(0, "grid"): one}), dict[tuple[int, str], Any])
    receiver.receive({"pixels": b"bytes"})  # type: ignore[dict-item]
    receiver.receive(b"bytes")  # type: ignore[arg-type]


def a_group(receiver: Receiver, some: list[TensorData], named: dict[str, TensorData]) -> None:
    Receiver("cuda:0", group=object(), cpu_group=object(), parallel=ParallelOptions(strategy="scatter"))
    Receiver("cuda:0", group=object(), parallel={"strategy": "scatter"})  # type: ignore[arg-type]
    assert_type(receiver.receive_owned(some, [0, 1]), list[Any])
    assert_type(receiver.receive_owned(named, {"pixels": 0}), dict[str, Any])


def options_are_keywords() -> None:
    Receiver("cuda:0", num_threads=4, timeout_s=10, metrics=Metrics())
    Receiver("cpu", framework="numpy")
    Receiver("cpu", framework="jax")  # type: ignore[arg-type]
    Receiver("cpu", "numpy")  # type: ignore[call-arg]
    with Receiver("cpu") as receiver:
        assert_type(receiver, Receiver)


def the_wire(data: TensorData) -> None:
    assert_type(tokenspeed.from_proto(tokenspeed.to_proto(data)), TensorData)
    assert_type(vllm.from_proto(vllm.to_proto(data)), TensorData)


def errors_are_standard_ones_too() -> None:
    missing: type[FileNotFoundError] = mmcopy.errors.SegmentNotFoundError
    refused: type[PermissionError] = mmcopy.errors.SegmentPermissionError
    wrong: type[ValueError] = mmcopy.errors.PayloadError
    late: type[TimeoutError] = mmcopy.errors.MmcopyTimeoutError
    tree: list[type[mmcopy.MmcopyError]] = [mmcopy.errors.SegmentNotFoundError, mmcopy.errors.PayloadError]
    other: type[KeyError] = mmcopy.errors.PayloadError  # type: ignore[assignment]
    print(missing, refused, wrong, late, tree, other)


class Worker(SmgWorker):
    """What a user writes."""

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        for item in request.items:
            assert_type(item, MultimodalItem)
            assert_type(item.tensors, dict[str, Any])
            assert_type(item.content_hashes, tuple[bytes, ...])
            assert_type(item.placeholders, tuple[tuple[int, int], ...])
        assert_type(request.max_new_tokens, int | None)
        yield [1, 2]

    async def encode(self, request: WorkerRequest) -> None:
        assert_type(request.bootstrap_rooms, tuple[int, ...])


async def serving(model: ModelInfo) -> None:
    worker = Worker(model, Receiver("cpu"), engine="vllm", port=0)
    assert_type(await worker.start(), int)
    assert_type(worker.address, str)
    await worker.stop(grace_s=1.0)
    Worker(model, Receiver("cpu"), engine="sglang")  # type: ignore[arg-type]
