"""A worker's handler fails: the client gets that error, once, and nothing is left."""

from __future__ import annotations

import json

import pytest

from tests.rigs.gateway_pictures import expected, picture
from tests.rigs.gateway_stack import Leg, Stack, only, without_path

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

ENGINES = ("tokenspeed", "vllm")
ATTEMPTS = 5
"""How often the gateway tries when a worker is unavailable."""


def assert_serves(stack: Stack, seed: int) -> None:
    """The next request is served as if nothing had been."""
    worker = stack["regular"]
    worker.behave("ok")
    reply = stack.ask(picture(seed))
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    assert without_path(worker.rows("generate")[-1]["tensors"]) == expected([picture(seed)], engine=worker.leg.engine)
    stack.assert_nothing_left()


def error_of(text: str) -> dict[str, str]:
    return json.loads(text)["error"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_handler_fails_before_the_first_chunk(start: StackMaker, engine: str) -> None:
    stack = start(Leg(engine=engine, behaviour="fail-first"), transport="shm")
    for count, stream in enumerate((False, True), start=1):
        reply = stack.ask(picture(31), stream=stream)
        assert reply.status == 500, reply.text
        assert "the handler raised RuntimeError: told to fail before it answers" in error_of(reply.text)["message"]
        rows = stack["regular"].rows("generate")
        assert len(rows) == count, "one attempt each"
        assert without_path(rows[-1]["tensors"]) == expected([picture(31)], engine=engine)
        stack.assert_nothing_left()
    assert_serves(stack, 32)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_handler_fails_after_the_first_chunk(start: StackMaker, engine: str) -> None:
    stack = start(Leg(engine=engine, behaviour="fail-later"), transport="shm")
    streamed = stack.ask(picture(33), stream=True)
    assert (streamed.status, streamed.content) == (200, "s"), streamed.text
    errors = [line for line in streamed.text.splitlines() if line.startswith('data: {"error"')]
    message = error_of(only(errors).removeprefix("data: "))["message"]
    assert "the handler raised RuntimeError: told to fail in the middle" in message
    stack.assert_nothing_left()

    whole = stack.ask(picture(33))
    assert whole.status == 500, whole.text
    assert "told to fail in the middle" in error_of(whole.text)["message"]
    assert len(stack["regular"].rows("generate")) == 2, "one attempt each"
    stack.assert_nothing_left()
    assert_serves(stack, 34)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unavailable_handler_is_tried_again_with_the_same_inline_bytes(start: StackMaker, engine: str) -> None:
    stack = start(Leg(engine=engine, behaviour="answer UNAVAILABLE"), transport="inline")
    reply = stack.ask(picture(35))
    assert reply.status == 503, reply.text
    assert "told to answer UNAVAILABLE" in error_of(reply.text)["message"]
    rows = stack["regular"].rows("generate")
    assert len(rows) == ATTEMPTS
    for row in rows:
        assert without_path(row["tensors"]) == expected([picture(35)], engine=engine)
    assert_serves(stack, 36)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_the_client_learns_why_though_the_segment_was_consumed_before(
    start: StackMaker, engine: str, code: str
) -> None:
    """A repeated attempt can only find the segment gone, so the reason of the first must reach the client."""
    stack = start(Leg(engine=engine, behaviour=f"answer {code}"), transport="shm")
    reply = stack.ask(picture(37))
    assert reply.status is not None
    assert reply.status >= 500, reply.text  # not the client's fault
    assert f"told to answer {code}" in error_of(reply.text)["message"]
    row = only(stack["regular"].rows("generate"))
    assert without_path(row["tensors"]) == expected([picture(37)], engine=engine)
    stack.assert_nothing_left()
    assert_serves(stack, 38)
