"""Client, gateway or worker is gone in the middle of a request: nothing of it is left, and the others go on."""

from __future__ import annotations

import http.client

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as scheduler_pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as scheduler_grpc

from mmcopy.tools.demo.chat import chat_body
from tests.rigs.gateway_pictures import expected, picture, png
from tests.rigs.gateway_stack import GONE, Leg, Stack, WorkerProcess, only, without_path
from tests.rigs.waiting import settle

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

ENGINES = ("tokenspeed", "vllm")
HELD = [
    pytest.param("hold", "generate", id="tensors-received"),
    pytest.param("hold-receive", "receiving", id="receive-begun"),
]
"""How a worker is told to hold a request, and the event that it has written down when it does."""


def segments_of(worker: WorkerProcess) -> list[str]:
    return [name for row in worker.rows("receiving") for name in row["segments"]]


def active_requests(worker: WorkerProcess) -> int:
    """How many calls a TokenSpeed worker serves, by its own account."""
    with grpc.insecure_channel(worker.address.removeprefix("grpc://")) as channel:
        stub = scheduler_grpc.TokenSpeedSchedulerStub(channel)
        return int(stub.GetServerInfo(scheduler_pb.GetServerInfoRequest(), timeout=10).active_requests)


def assert_serves(stack: Stack, pixels: np.ndarray) -> None:
    worker = next(worker for worker in stack.workers if worker.process.running)
    worker.behave("ok")
    reply = stack.ask(pixels)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    assert without_path(worker.rows("generate")[-1]["tensors"]) == expected([pixels], engine=worker.leg.engine)
    stack.assert_nothing_left()


# ---- the client --------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("behaviour", "event"), HELD)
def test_the_client_leaves_before_the_first_response(
    start: StackMaker, engine: str, stream: bool, behaviour: str, event: str
) -> None:
    stack = start(Leg(engine=engine, behaviour=behaviour), transport="shm")
    worker = stack["regular"]
    client = http.client.HTTPConnection(stack.gateway.url.removeprefix("http://"), timeout=10)
    body = chat_body(stack.gateway.model, images=[png(picture(41))], text="What is this?", stream=stream)
    client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    worker.wait_for(event)
    assert stack.segments() == ([] if event == "generate" else segments_of(worker))
    client.close()
    if event == "generate":
        worker.wait_for("cancelled")
    else:
        worker.behave("ok")  # a copy that has begun can't be interrupted: it goes on to its end, which removes
    stack.assert_nothing_left()
    assert_serves(stack, picture(42))


# ---- the gateway -------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("behaviour", "event"), HELD)
def test_the_gateway_is_killed_while_the_worker_holds_requests(
    start: StackMaker, engine: str, behaviour: str, event: str
) -> None:
    stack = start(Leg(engine=engine, behaviour=behaviour), transport="shm")
    worker = stack["regular"]
    replies = [stack.ask_soon(picture(43 + i)) for i in range(2)]
    worker.wait_for(event, count=2)
    stack.gateway.kill()
    assert [reply.result().status for reply in replies] == [None, None]
    assert stack.segments() == ([] if event == "generate" else sorted(segments_of(worker)))
    if event == "generate":
        worker.wait_for("cancelled", count=2)
    else:
        worker.behave("ok")
    stack.assert_nothing_left()

    stack.start_gateway()
    assert_serves(stack, picture(45))


def test_the_gateway_is_killed_while_a_request_waits_for_a_receiving_thread(start: StackMaker) -> None:
    stack = start(Leg(behaviour="hold-receive", receive_threads=1), transport="shm")
    worker = stack["regular"]
    replies = [stack.ask_soon(picture(46 + i)) for i in range(3)]
    assert settle(lambda: active_requests(worker) == 3), "a segment that is written may not be sent yet"
    worker.wait_for("receiving")
    assert len(stack.segments()) == 3
    stack.gateway.kill()
    assert [reply.result().status for reply in replies] == [None] * 3
    # Those that wait are never read; the one that is held keeps its segment until it may go on.
    assert settle(lambda: stack.segments() == segments_of(worker)), (stack.segments(), worker.rows())
    assert len(worker.rows("receiving")) == 1
    worker.behave("ok")
    stack.assert_nothing_left()


# ---- the worker --------------------------------------------------------------


@pytest.mark.parametrize(("behaviour", "event"), HELD)
def test_the_worker_is_killed_in_the_middle(start: StackMaker, behaviour: str, event: str) -> None:
    stack = start(Leg(behaviour=behaviour), transport="shm")
    reply = stack.ask_soon(picture(51))
    stack["regular"].wait_for(event)
    stack["regular"].kill()
    answer = reply.result()
    assert answer.status == 503, answer.text
    stack.assert_nothing_left()


@pytest.mark.parametrize(("behaviour", "event"), HELD)
def test_a_second_worker_is_named_a_segment_that_is_gone(start: StackMaker, behaviour: str, event: str) -> None:
    """The gateway tries the next worker with the same handle, after it has removed the segment itself."""
    stack = start(Leg(behaviour=behaviour), Leg(behaviour=behaviour), transport="shm")
    reply = stack.ask_soon(picture(52))
    assert settle(lambda: any(worker.rows(event) for worker in stack.workers))
    killed, other = sorted(stack.workers, key=lambda worker: not worker.rows(event))
    other.behave("ok")
    killed.kill()
    answer = reply.result()
    assert segments_of(other) == segments_of(killed)
    assert only(other.rows("refused"))["error"] == "SegmentNotFoundError"
    assert answer.status == GONE, answer.text
    assert "SegmentNotFoundError: [Errno 2] no such segment" in answer.text
    assert segments_of(other)[0] in answer.text
    stack.assert_nothing_left()
