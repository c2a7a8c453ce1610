"""What a worker tells about its encoder, and what the gateway makes of it: the label, and the dtype that it sends."""

from __future__ import annotations

import pytest

from tests.rigs.gateway_pictures import expected, picture
from tests.rigs.gateway_stack import Leg, Stack, only, without_path

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

DTYPES = ("float32", "float16", "bfloat16")


def labels(stack: Stack, role: str) -> list[str | None]:
    """The label of every worker of the role, as the gateway has it."""
    addresses = {worker.address for worker in stack.of(role)}
    found = [each["labels"] for each in stack.gateway.workers() if each["url"] in addresses]
    assert len(found) == len(addresses)
    return [each.get("multimodal_encoder_dtype") for each in found]


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_towers_dtype_is_the_label_and_what_comes(start: StackMaker, engine: str, dtype: str) -> None:
    stack = start(Leg(engine=engine, encoder_dtype=dtype, encoder=True), transport="shm")
    assert labels(stack, "regular") == [dtype]
    reply = stack.ask(picture(41))
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    row = only(stack["regular"].rows("generate"))
    assert without_path(row["tensors"]) == expected([picture(41)], engine=engine, dtype=dtype)
    stack.assert_nothing_left()


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_workers_advertise_and_get_their_dtype(start: StackMaker, dtype: str) -> None:
    """EPD: the encode worker's label counts, whatever prefill and decode say."""
    encode = Leg("encode", encoder_dtype=dtype, encoder=True)
    other = "float16" if dtype != "float16" else "float32"
    legs = encode, Leg("prefill", encoder_dtype=other), Leg("decode", encoder_dtype=other)
    stack = start(*legs, topology="epd", transport="shm")
    assert labels(stack, "encode") == [dtype]
    assert labels(stack, "prefill") == labels(stack, "decode") == [other]
    assert stack.ask(picture(42)).status == 200
    stack["encode"].wait_for("answered")
    row = only(stack["encode"].rows("encode"))
    assert without_path(row["tensors"]) == expected([picture(42)], dtype=dtype)
    stack.assert_nothing_left()


def test_prefill_workers_of_pd_advertise_and_get_theirs(start: StackMaker) -> None:
    legs = Leg("prefill", encoder_dtype="float16", encoder=True), Leg("decode")
    stack = start(*legs, topology="pd", transport="shm")
    assert labels(stack, "prefill") == ["float16"]
    reply = stack.ask(picture(43))
    assert reply.status == 200, reply.text
    row = only(stack["prefill"].wait_for("generate"))
    assert without_path(row["tensors"]) == expected([picture(43)], dtype="float16")
    stack.assert_nothing_left()
