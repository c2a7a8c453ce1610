"""A real worker behind a real gRPC channel, with no gateway: what the worker tests stand on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np
from smg_grpc_proto.generated import (
    tokenspeed_encoder_pb2_grpc,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from mmcopy import Receiver, TensorData
from mmcopy.integrations.smg import ModelInfo, SmgWorker, WorkerRequest
from mmcopy.wire.payload import Key

MODEL = ModelInfo(
    model_path="/models/tiny",
    served_model_name="tiny",
    model_type="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    vocab_size=300,
    eos_token_ids=(258,),
)

ENGINE_MODULES = {"tokenspeed": tokenspeed_scheduler_pb2, "vllm": vllm_engine_pb2}

LIMIT_S = 30.0
"""How long any test on the event loop may take."""

Result = TypeVar("Result")

_sequence = itertools.count()


def run(test: Awaitable[Result]) -> Result:
    """Run an async test body on a loop of its own, with a limit."""

    async def limited() -> Result:
        return await asyncio.wait_for(test, LIMIT_S)

    return asyncio.run(limited())


async def until(condition: Callable[[], bool], *, limit_s: float = 10.0) -> None:
    """Return when ``condition`` holds; fail when it does not within the limit."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


class Worker(SmgWorker):
    """Keeps the requests that reach its handlers and the receives that begin; answers with ``batches``."""

    def __init__(self, receiver: Receiver, **options: Any) -> None:
        super().__init__(MODEL, receiver, **options)
        self.requests: list[WorkerRequest] = []
        self.receives: list[dict[Key, TensorData]] = []
        self.released: list[str] = []
        self.batches: Sequence[Sequence[int]] = ([1, 2], [3])

    def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
        self.receives.append(dict(tensors))
        return super().receive(tensors)

    def release(self, handles: Sequence[Any]) -> None:
        self.released += [handle.name for handle in handles]
        super().release(handles)

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        self.requests.append(request)
        for batch in self.batches:
            yield batch

    async def encode(self, request: WorkerRequest) -> None:
        self.requests.append(request)


class Gate:
    """Holds a thread until it is opened, and says when one has arrived."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        self.arrived.set()
        assert self._open.wait(LIMIT_S), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


class GatedWorker(Worker):
    """Its receives wait at a gate, on their thread, before they begin."""

    def __init__(self, receiver: Receiver, **options: Any) -> None:
        super().__init__(receiver, **options)
        self.gate = Gate()

    def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
        self.gate.pass_through()
        return super().receive(tensors)


class Client:
    """Calls one worker as the gateway does."""

    def __init__(self, engine: str, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.channel = channel
        self.pb = ENGINE_MODULES[engine]
        if engine == "tokenspeed":
            self.stub: Any = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(channel)
            self.encoder: Any = tokenspeed_encoder_pb2_grpc.TokenSpeedEncoderStub(channel)
        else:
            self.stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    async def generate(self, request: Any) -> list[Any]:
        return [response async for response in self.stub.Generate(request, timeout=LIMIT_S)]

    async def call(self, request: Any) -> Any:
        """Encode or Generate, whichever the request is for; its responses or its response."""
        if type(request).__name__ == "EncodeRequest":
            return await self.encoder.Encode(request, timeout=LIMIT_S)
        return await self.generate(request)

    async def refused(self, request: Any) -> tuple[str, str]:
        """The status code and message that the call must end with instead of an answer."""
        try:
            answer = await self.call(request)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        raise AssertionError(f"answered {answer}")


@contextlib.asynccontextmanager
async def serving(worker: SmgWorker, *, grace_s: float = 1.0) -> AsyncIterator[Client]:
    """A client of the worker, which is stopped at the end."""
    port = await worker.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(worker.engine, channel)
    finally:
        await worker.stop(grace_s)


class SegmentMaker:
    """Writes segments as the gateway does: its names, 0600, exactly as long as the tensor."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._random = np.random.default_rng(7)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def new(self, nbytes: int) -> tuple[str, bytes]:
        name, content = self.unused(), self._random.bytes(nbytes)
        descriptor = os.open(self.directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return name, content

    def unused(self) -> str:
        return f"smg-tokenspeed-{os.getpid()}-1796045570386846883-{next(_sequence)}"

    def fill(self, message: Any, *, dtype: str = "uint8", shape: Sequence[int] = (16,), nbytes: int = 16) -> bytes:
        """Make ``message`` a tensor in a new segment; its bytes."""
        message.Clear()
        message.dtype = dtype
        message.shape.extend(shape)
        message.shm.name, content = self.new(nbytes)
        message.shm.nbytes = nbytes
        message.shm.owner_id = f"smg:{os.getpid()}"
        return content

    def refill(self, tensors: Mapping[Key, Any]) -> dict[Key, bytes]:
        """Give every shm tensor of a recorded request a segment of its own; all bytes by key, inline ones too."""
        contents = {}
        for key, message in tensors.items():
            if message.WhichOneof("payload") == "shm":
                message.shm.name, contents[key] = self.new(message.shm.nbytes)
            else:
                contents[key] = message.inline
        return contents


def request_with(engine: str, *, rpc: str = "generate", request_id: str = "r1", stream: bool = False) -> Any:
    """A request of one item with no tensors yet; see :func:`tensor_of`."""
    if rpc == "encode":
        from smg_grpc_proto.generated import tokenspeed_encoder_pb2

        encode = tokenspeed_encoder_pb2.EncodeRequest(request_id=request_id)
        encode.mm_inputs.items.add().modality = 1
        encode.items.add().bootstrap_room = 77
        return encode
    request: Any = ENGINE_MODULES[engine].GenerateRequest(request_id=request_id, stream=stream)
    request.tokenized.input_ids.extend([5, 6, 7])
    if engine == "tokenspeed":
        request.mm_inputs.items.add().modality = 1
    else:
        request.mm_inputs.modality = 1
    return request


def tensor_of(request: Any, name: str = "") -> Any:
    """The message of the first item's encoder input, or of its side tensor ``name``."""
    item = request.mm_inputs.items[0] if hasattr(request.mm_inputs, "items") else request.mm_inputs
    if name:
        return item.model_specific_tensors[name]
    return item.encoder_input if hasattr(item, "encoder_input") else item.pixel_values


@contextlib.contextmanager
def cpu_receiver(directory: str | pathlib.Path) -> Iterator[Receiver]:
    with Receiver("cpu", framework="numpy", shm_dir=directory) as receiver:
        yield receiver
