"""What a request costs on the event loop grows with its size and no faster: counted in Python's own instructions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from mmcopy import TensorData
from mmcopy.integrations.smg import tokenspeed, vllm
from mmcopy.integrations.smg.intake import Received
from mmcopy.integrations.smg.running import RunningCalls
from mmcopy.tensors import ShmHandle
from mmcopy.wire.payload import Key
from tests.rigs.smg_rig import ENGINE_MODULES, MODEL

SERVICES: dict[str, Any] = {"tokenspeed": tokenspeed.TokenSpeedService, "vllm": vllm.VllmService}


class AtOnce:
    """An intake that receives without a thread."""

    async def receive(
        self, request_id: str, handles: Sequence[ShmHandle], read: Callable[[], dict[Key, TensorData]]
    ) -> Received:
        data = read()
        return Received(data, dict.fromkeys(data), 0.0)

    async def release(self, handles: Sequence[ShmHandle]) -> None:
        pass


class Handler:
    async def generate(self, request: Any) -> Any:
        self.items = request.items
        yield [1]

    def finish(self, request: Any, message: Any) -> None:
        pass


class Context:
    async def write(self, message: Any) -> None:
        pass


def many_items(engine: str, number: int) -> Any:
    """So many items of one byte each."""
    request = ENGINE_MODULES[engine].GenerateRequest(request_id="many")
    items = request.mm_inputs.items if engine == "tokenspeed" else request.extra_mm_inputs
    for _ in range(number):
        item = items.add()
        fill(item.encoder_input if engine == "tokenspeed" else item.pixel_values)
    return request


def many_names(engine: str, number: int) -> Any:
    """One item with so many side tensors."""
    request = ENGINE_MODULES[engine].GenerateRequest(request_id="many")
    item = request.mm_inputs.items.add() if engine == "tokenspeed" else request.mm_inputs
    for n in range(number):
        fill(item.model_specific_tensors[f"t{n}"])
    return request


def fill(tensor: Any) -> None:
    tensor.dtype = "uint8"
    tensor.shape.append(1)
    tensor.inline = b"x"


def instructions_of(engine: str, request: Any, number: int) -> int:
    handler = Handler()
    service = SERVICES[engine](handler, AtOnce(), RunningCalls(), MODEL, SimpleNamespace())
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    async def serve() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert await service.generate(request, Context()) is None
        finally:
            sys.settrace(before)

    asyncio.run(serve())
    assert sum(len(item.tensors) for item in handler.items) == number
    return count


@pytest.mark.parametrize("engine", SERVICES)
@pytest.mark.parametrize("request_of", [many_items, many_names])
def test_four_times_the_tensors_take_four_times_the_instructions(
    engine: str, request_of: Callable[[str, int], Any]
) -> None:
    few, many = (instructions_of(engine, request_of(engine, n), n) for n in (200, 800))
    assert many < 4.5 * few
