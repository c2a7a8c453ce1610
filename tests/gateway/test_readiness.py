"""A worker that is still warming is not advertised and gets nothing; once it is ready the gateway finds it."""

from __future__ import annotations

import pytest

from tests.rigs.gateway_pictures import expected, picture
from tests.rigs.gateway_stack import Leg, Stack, only, without_path
from tests.rigs.waiting import settle

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

FLAGS = ("--worker-startup-check-interval", "1")
"""How often the gateway asks a worker that was not ready: every 30 s by default."""

NOT_READY = "not ready: warming image 1024x1024 (2 of 7 done)"


def known(stack: Stack) -> set[str]:
    """Addresses of the workers that the gateway has taken into its service."""
    return {each["url"] for each in stack.gateway.workers()}


def asked(stack: Stack) -> bool:
    """Whether the gateway has heard from a worker that it is not ready."""
    return bool(stack.gateway.log_lines(NOT_READY.replace("(", r"\(").replace(")", r"\)")))


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
def test_a_warming_worker_is_not_advertised_until_it_is_ready(start: StackMaker, engine: str) -> None:
    leg = Leg(engine=engine, behaviour="warming")
    stack = start(leg, transport="shm", flags=FLAGS, wait_until_serving=False)
    worker = stack["regular"]
    assert settle(lambda: asked(stack), limit_s=10)
    assert known(stack) == set()
    reply = stack.ask(picture(51))
    assert reply.status == 404, reply.text
    assert "No worker available" in reply.text
    assert worker.rows() == []

    worker.behave("ok")
    worker.wait_for("warm")
    assert settle(lambda: known(stack) == {worker.address}, limit_s=10), stack.gateway.log_text()
    assert settle(lambda: stack.ask(picture(51)).status == 200, limit_s=10)
    row = worker.rows("generate")[-1]
    assert without_path(row["tensors"]) == expected([picture(51)], engine=engine)
    stack.assert_nothing_left()


def test_requests_go_past_a_warming_worker_to_one_that_is_ready(start: StackMaker) -> None:
    legs = Leg(), Leg(behaviour="warming")
    stack = start(*legs, transport="shm", flags=FLAGS, wait_until_serving=False)
    ready, warming = stack.workers
    assert settle(lambda: known(stack) == {ready.address} and asked(stack), limit_s=10)
    assert settle(lambda: stack.ask(picture(52)).status == 200, limit_s=10)
    for seed in range(53, 59):
        assert stack.ask(picture(seed)).status == 200
    assert warming.rows() == []
    warming.behave("ok")
    assert settle(lambda: len(known(stack)) == 2, limit_s=10)
    stack.assert_nothing_left()


def test_an_encode_worker_that_is_warming_holds_requests_back(start: StackMaker) -> None:
    legs = Leg("encode", behaviour="warming"), Leg("prefill"), Leg("decode")
    stack = start(*legs, topology="epd", transport="shm", flags=FLAGS, wait_until_serving=False)
    encode = stack["encode"]
    assert settle(lambda: len(known(stack)) == 2 and asked(stack), limit_s=10)
    assert stack.ask(picture(60)).status != 200
    assert encode.rows() == []
    encode.behave("ok")
    assert settle(lambda: len(known(stack)) == 3, limit_s=10)
    assert settle(lambda: stack.ask(picture(60)).status == 200, limit_s=10)
    encode.wait_for("answered")
    assert without_path(only(encode.rows("encode"))["tensors"]) == expected([picture(60)])
    stack.assert_nothing_left()
