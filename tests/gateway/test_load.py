"""Many requests: nothing is mixed up, and the worker ends where it began."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rigs.gateway_pictures import expected, picture
from tests.rigs.gateway_stack import Leg, Stack, without_path
from tests.rigs.waiting import settle

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

REQUESTS, PICTURES = 8, 3


def pictures_of(request: int) -> list[np.ndarray]:
    """Three pictures that no other request has; sizes differ too, but not from request to request."""
    sizes = ((256, 256), (320, 256), (256, 288))
    return [picture(100 * request + i, *size) for i, size in enumerate(sizes[:PICTURES])]


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_concurrent_requests_with_several_pictures_each(start: StackMaker, engine: str, transport: str) -> None:
    stack = start(Leg(engine=engine), transport=transport)
    asked = [pictures_of(request) for request in range(1, 1 + REQUESTS)]
    replies = [future.result() for future in [stack.ask_soon(*pictures) for pictures in asked]]
    assert [(reply.status, reply.content) for reply in replies] == [(200, "seen")] * REQUESTS
    rows = {row["request_id"]: row for row in stack["regular"].rows("generate")}
    assert len(rows) == REQUESTS
    for pictures, reply in zip(asked, replies, strict=True):
        assert without_path(rows[reply.id]["tensors"]) == expected(pictures, engine=engine)
    segments = [name for row in rows.values() for name in row["segments"]]
    pixel_tensors = REQUESTS * (PICTURES if engine == "tokenspeed" else 1)
    assert len(set(segments)) == len(segments) == (pixel_tensors if transport == "shm" else 0)
    stack.assert_nothing_left()


def test_concurrent_requests_in_epd(start: StackMaker) -> None:
    legs = Leg("encode"), Leg("encode"), Leg("prefill"), Leg("decode")
    stack = start(*legs, topology="epd", transport="shm")
    asked = [pictures_of(request) for request in range(11, 11 + REQUESTS)]
    replies = [future.result() for future in [stack.ask_soon(*pictures) for pictures in asked]]
    assert [(reply.status, reply.content) for reply in replies] == [(200, "seen")] * REQUESTS
    encoders = stack.of("encode")
    assert settle(lambda: sum(len(worker.rows("answered")) for worker in encoders) == REQUESTS * PICTURES)
    encodes = {row["rooms"][0]: row["tensors"] for worker in encoders for row in worker.rows("encode")}
    assert len(encodes) == REQUESTS * PICTURES
    prefills = {row["request_id"]: row for row in stack["prefill"].rows("generate")}
    for pictures, reply in zip(asked, replies, strict=True):
        for pixels, room in zip(pictures, prefills[reply.id]["rooms"], strict=True):
            assert without_path(encodes[room]) == expected([pixels])
    stack.assert_nothing_left()


def test_descriptors_and_threads_return_to_where_they_were(start: StackMaker) -> None:
    stack = start(transport="shm")
    worker = stack["regular"]
    ask_in_every_way(stack, seed=1000)  # the first round starts threads and opens a connection, which stay
    descriptors, threads = worker.count_descriptors(), worker.count_threads()
    for round_ in range(1, 4):
        ask_in_every_way(stack, seed=1000 + round_)
    assert len(worker.rows("receiving")) == 4 * 7 > 20
    stack.assert_nothing_left()
    assert settle(lambda: worker.count_descriptors() <= descriptors), (descriptors, worker.count_descriptors())
    assert settle(lambda: worker.count_threads() <= threads), (threads, worker.count_threads())


def ask_in_every_way(stack: Stack, *, seed: int) -> None:
    """Four requests at once that are answered, a streamed one, and two that fail, before and in the middle."""
    worker = stack["regular"]
    worker.behave("hold-receive")
    begun = len(worker.rows("receiving"))
    replies = [stack.ask_soon(picture(seed)) for _ in range(4)]
    worker.wait_for("receiving", count=begun + worker.leg.receive_threads)  # so every receiving thread has started
    worker.behave("ok")
    assert [reply.result().status for reply in replies] == [200] * 4
    assert stack.ask(picture(seed), stream=True).content == "seen"
    worker.behave("fail-first")
    assert stack.ask(picture(seed)).status == 500
    worker.behave("fail-later")
    assert stack.ask(picture(seed), stream=True).content == "s"
    worker.behave("ok")
