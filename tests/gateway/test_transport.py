"""One worker behind the gateway: by which way tensors come, in which dtype, and that every byte is right."""

from __future__ import annotations

import pytest

from tests.rigs.gateway_pictures import Tensor, expected, picture
from tests.rigs.gateway_stack import FOREIGN, Leg, Stack, by_path, only, without_path

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

ENGINES = ("tokenspeed", "vllm")
GRPC_DEFAULT_LIMIT = 4 << 20


def ask_one(stack: Stack, seed: int, *, width: int = 256, height: int = 256) -> dict[str, Tensor]:
    """The tensors that reached the worker with a picture, checked byte for byte against a dtype of the leg's."""
    worker = stack["regular"]
    pixels = picture(seed, width, height)
    reply = stack.ask(pixels)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    row = only(worker.rows("generate"))
    assert row["request_id"] == reply.id
    assert row["segments_on_disk"] == []
    dtype = worker.leg.encoder_dtype or {"tokenspeed": "bfloat16", "vllm": "float32"}[worker.leg.engine]
    assert without_path(row["tensors"]) == expected([pixels], engine=worker.leg.engine, dtype=dtype)
    stack.assert_nothing_left()
    return row["tensors"]


def pixels_of(engine: str) -> str:
    return {"tokenspeed": "item0.encoder_input", "vllm": "item0.pixel_values"}[engine]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("transport", "namespace", "path"),
    [
        pytest.param("inline", "own", "inline", id="inline"),
        pytest.param("shm", "own", "segment", id="shm"),
        pytest.param("shm", FOREIGN, "segment", id="shm-compares-no-namespace"),
        pytest.param("auto", "own", "segment", id="auto-same-namespace"),
        pytest.param("auto", FOREIGN, "inline", id="auto-foreign-namespace"),
        pytest.param("auto", None, "inline", id="auto-none-advertised"),
    ],
)
def test_pixels_come_by_the_transport_and_side_tensors_inline(
    start: StackMaker, engine: str, transport: str, namespace: str | None, path: str
) -> None:
    stack = start(Leg(engine=engine, namespace=namespace), transport=transport)
    pictures = [picture(1), picture(2, width=352, height=288)]
    reply = stack.ask(*pictures)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    row = only(stack["regular"].rows("generate"))
    assert without_path(row["tensors"]) == expected(pictures, engine=engine)
    pixels = [label for label in row["tensors"] if label.endswith(("encoder_input", "pixel_values"))]
    assert {row["tensors"][label]["path"] for label in pixels} == {path}
    assert {row["tensors"][label]["path"] for label in row["tensors"].keys() - set(pixels)} == {"inline"}
    assert len(row["segments"]) == (len(pixels) if path == "segment" else 0)
    assert row["segments_on_disk"] == []
    stack.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", ""])
def test_pixels_come_in_the_dtype_that_the_worker_advertises(start: StackMaker, engine: str, dtype: str) -> None:
    stack = start(Leg(engine=engine, encoder_dtype=dtype), transport="shm")
    assert ask_one(stack, 3)[pixels_of(engine)]["path"] == "segment"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("one_over", "path"), [(0, "segment"), (1, "inline")], ids=["exactly", "one-over"])
def test_a_threshold_at_the_size_of_the_pixels(start: StackMaker, engine: str, one_over: int, path: str) -> None:
    nbytes = expected([picture(4)], engine=engine)[pixels_of(engine)]["nbytes"]
    stack = start(Leg(engine=engine), transport="shm", shm_min_bytes=nbytes + one_over)
    assert by_path(ask_one(stack, 4)).get("segment", []) == ([pixels_of(engine)] if path == "segment" else [])


@pytest.mark.parametrize("engine", ENGINES)
def test_pixels_beyond_the_message_limit_of_grpc_come_inline(start: StackMaker, engine: str) -> None:
    stack = start(Leg(engine=engine), transport="inline")
    pixels = ask_one(stack, 5, width=1600, height=1600)[pixels_of(engine)]
    assert pixels["path"] == "inline"
    assert pixels["nbytes"] == 10_000 * 1536 * 2 > GRPC_DEFAULT_LIMIT


def test_pixels_as_torch_tensors(start: StackMaker) -> None:
    stack = start(Leg(framework="torch"), transport="shm")
    assert by_path(ask_one(stack, 6))["segment"] == ["item0.encoder_input"]
