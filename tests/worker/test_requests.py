"""Requests that succeed: what a handler is given, what the client is answered, and nothing left in shared memory."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline
from tests.rigs.smg_messages import ENGINES, EXPECTED, engine_of, load, recorded_label
from tests.rigs.smg_rig import (
    ENGINE_MODULES,
    SegmentMaker,
    Worker,
    cpu_receiver,
    request_with,
    run,
    serving,
    tensor_of,
)

pytestmark = pytest.mark.usefixtures("nothing_left_open")

RPCS = [("tokenspeed", "generate"), ("tokenspeed", "encode"), ("vllm", "generate")]


@pytest.mark.parametrize("file", EXPECTED)
def test_recorded_request(shm_dir: pathlib.Path, file: str) -> None:
    engine, expected, request = engine_of(file), EXPECTED[file], load(file)
    contents = SegmentMaker(shm_dir).refill(ENGINES[engine].tensors_of(request))

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            answer = await client.call(request)
        seen = worker.requests[0]
        assert (seen.engine, seen.rpc) == (engine, "encode" if "encode" in file else "generate")
        assert seen.request_id == expected["request_id"]
        assert seen.bootstrap_rooms == tuple(expected.get("rooms", ()))
        assert seen.max_new_tokens == expected.get("max_new_tokens", None if seen.rpc == "encode" else 8)
        assert len(seen.input_ids) == expected.get("prompt_tokens", 0)
        assert seen.receive_s > 0
        assert seen.message == request
        for index, (item, want) in enumerate(zip(seen.items, expected["items"], strict=True)):
            assert item.modality == want["modality"]
            assert [h.hex() for h in item.content_hashes] == want["content_hashes"]
            assert [list(p) for p in item.placeholders] == want["placeholders"]
            assert item.placeholder_token_id == want["placeholder_token_id"]
            assert item.data.keys() == item.tensors.keys()
            for name, tensor in item.tensors.items():
                label = recorded_label(engine, (index, name))
                assert list(tensor.shape) == expected["tensors"][label]["shape"]
                assert tensor.dtype.name == expected["tensors"][label]["dtype"]
                assert tensor.tobytes() == contents.pop((index, name))
        assert not contents
        if seen.rpc == "encode":
            assert answer.accepted
        else:
            assert [list(response.complete.output_ids) for response in answer] == [[1, 2, 3]]

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
def test_streamed_answer(shm_dir: pathlib.Path, engine: str) -> None:
    request = request_with(engine, stream=True)
    SegmentMaker(shm_dir).fill(tensor_of(request))

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            responses = await client.generate(request)
        *chunks, final = responses
        assert [(list(r.chunk.token_ids), r.chunk.completion_tokens) for r in chunks] == [([1, 2], 2), ([3], 3)]
        assert all(r.chunk.prompt_tokens == 3 for r in chunks)
        complete = final.complete
        assert list(complete.output_ids) == [1, 2, 3]
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 3)
        assert complete.finish_reason == "stop"
        if engine == "tokenspeed":
            assert {r.request_id for r in responses} == {"r1"}

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_no_tokens(shm_dir: pathlib.Path, engine: str, stream: bool) -> None:
    async def test(worker: Worker) -> None:
        worker.batches = ()
        async with serving(worker) as client:
            *chunks, final = await client.generate(request_with(engine, stream=stream))
        assert [list(r.chunk.token_ids) for r in chunks] == ([[]] if stream else [])
        assert (list(final.complete.output_ids), final.complete.finish_reason) == ([], "stop")

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("limit", "reason"), [(2, "length"), (3, "length"), (4, "stop"), (None, "stop")])
def test_finish_reason(shm_dir: pathlib.Path, engine: str, limit: int | None, reason: str) -> None:
    request = request_with(engine)
    if limit is not None:
        setattr(request.sampling_params, "max_new_tokens" if engine == "tokenspeed" else "max_tokens", limit)

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            (response,) = await client.generate(request)
        assert response.complete.finish_reason == reason
        assert worker.requests[0].max_new_tokens == limit

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
def test_text_alone_takes_no_receive(shm_dir: pathlib.Path, engine: str) -> None:
    request = ENGINE_MODULES[engine].GenerateRequest(request_id="text")

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            (response,) = await client.generate(request)
        assert list(response.complete.output_ids) == [1, 2, 3]
        assert (worker.receives, worker.requests[0].items, worker.requests[0].receive_s) == ([], (), 0.0)

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
def test_inline_of_16_mib(shm_dir: pathlib.Path, engine: str, rpc: str) -> None:
    content = np.random.default_rng(1).bytes(16 << 20)
    request = request_with(engine, rpc=rpc)
    tensor_of(request).MergeFrom(type(tensor_of(request))(dtype="bfloat16", shape=[2048, 4096], inline=content))

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await client.call(request)
        (tensor,) = worker.requests[0].items[0].tensors.values()
        assert tensor.shape == (2048, 4096)
        assert tensor.tobytes() == content

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
def test_eight_requests_at_once(shm_dir: pathlib.Path, engine: str, rpc: str) -> None:
    maker, contents = SegmentMaker(shm_dir), {}
    requests = []
    for i in range(8):
        request = request_with(engine, rpc=rpc, request_id=f"r{i}")
        sides = [maker.fill(tensor_of(request, f"side{k}"), shape=[1 + k], nbytes=1 + k) for k in range(3)]
        pixels = maker.fill(tensor_of(request), dtype="float32", shape=[100, 256], nbytes=102400)
        contents[f"r{i}"] = [pixels, *sides]
        requests.append(request)

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await asyncio.gather(*map(client.call, requests))
        assert len(worker.requests) == 8
        for seen in worker.requests:
            assert [t.tobytes() for t in seen.items[0].tensors.values()] == contents.pop(seen.request_id)
        assert not contents

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
def test_nothing_is_in_shared_memory_when_the_handler_is_called(shm_dir: pathlib.Path, engine: str, rpc: str) -> None:
    """The gateway removes an Encode's segments when the call ends: they must have been read by then."""
    maker, request, seen = SegmentMaker(shm_dir), request_with(engine, rpc=rpc), []
    content = maker.fill(tensor_of(request))

    class Looking(Worker):
        async def encode(self, request: Any) -> None:
            seen.append(maker.names())
            await super().encode(request)

        async def generate(self, request: Any) -> Any:
            seen.append(maker.names())
            async for batch in super().generate(request):
                yield batch

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            assert len(maker.names()) == 1
            await client.call(request)
        assert seen == [[]]
        (tensor,) = worker.requests[0].items[0].tensors.values()
        assert tensor.tobytes() == content

    with cpu_receiver(shm_dir) as receiver:
        run(test(Looking(receiver, engine=engine)))


def test_vllm_modalities_come_as_items_of_their_own(shm_dir: pathlib.Path) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("vllm")
    image = maker.fill(tensor_of(request))
    extra: Any = request.extra_mm_inputs.add(modality=3, mm_hashes=["00ff", "not hex"], im_token_id=9)
    extra.mm_placeholders.add(offset=4, length=2)
    video = maker.fill(extra.pixel_values, shape=[4], nbytes=4)
    request.extra_mm_inputs.add()

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await client.generate(request)
        first, second, third = worker.requests[0].items
        assert (first.modality, first.tensors["pixel_values"].tobytes()) == ("image", image)
        assert first.placeholder_token_id is None
        assert (second.modality, second.tensors["pixel_values"].tobytes()) == ("video", video)
        assert second.content_hashes == (b"\x00\xff", b"not hex")
        assert (second.placeholders, second.placeholder_token_id) == (((4, 2),), 9)
        assert (third.modality, third.tensors) == ("image", {})

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine="vllm")))


@pytest.mark.parametrize("engine", ENGINES)
def test_zero_byte_segment_and_scalar(shm_dir: pathlib.Path, engine: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine)
    maker.fill(tensor_of(request), dtype="bfloat16", shape=[0, 1536], nbytes=0)
    scalar = maker.fill(tensor_of(request, "scalar"), dtype="int64", shape=[], nbytes=8)

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await client.generate(request)
        empty, zero_d = worker.requests[0].items[0].tensors.values()
        assert (empty.shape, zero_d.shape, zero_d.tobytes()) == ((0, 1536), (), scalar)

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
def test_finish_adds_to_the_final_message_alone(shm_dir: pathlib.Path, engine: str) -> None:
    class Finishing(Worker):
        def finish(self, request: Any, message: Any) -> None:
            message.complete.cached_tokens = len(request.input_ids) + 10

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            *chunks, final = await client.generate(request_with(engine, stream=True))
        assert final.complete.cached_tokens == 13
        assert [r.chunk.cached_tokens for r in chunks] == [0, 0]

    with cpu_receiver(shm_dir) as receiver:
        run(test(Finishing(receiver, engine=engine)))


def test_torch_tensors(shm_dir: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    from mmcopy import Receiver

    request = request_with("tokenspeed")
    content = SegmentMaker(shm_dir).fill(tensor_of(request), dtype="bfloat16", shape=[3, 5], nbytes=30)
    tensor_of(request, "grid").MergeFrom(
        type(tensor_of(request))(dtype="int64", shape=[1], inline=bytes([9] + [0] * 7))
    )

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await client.generate(request)
        item = worker.requests[0].items[0]
        pixels = item.tensors["encoder_input"]
        assert (pixels.dtype, tuple(pixels.shape)) == (torch.bfloat16, (3, 5))
        assert pixels.view(torch.uint8).numpy().tobytes() == content
        assert item.tensors["grid"].tolist() == [9]
        assert isinstance(item.data["grid"].payload, Inline)

    with Receiver("cpu", shm_dir=shm_dir) as receiver:
        run(test(Worker(receiver)))
