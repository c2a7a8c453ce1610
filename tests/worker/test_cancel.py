"""Requests that are given up: by the client, by Abort, by their limit or by the worker's own stop, at each stage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from mmcopy.integrations.smg import WorkerRequest
from tests.rigs.smg_rig import (
    Client,
    GatedWorker,
    SegmentMaker,
    Worker,
    cpu_receiver,
    request_with,
    run,
    serving,
    tensor_of,
    until,
)

pytestmark = pytest.mark.usefixtures("nothing_left_open")

RPCS = [("tokenspeed", "generate"), ("tokenspeed", "encode"), ("vllm", "generate")]

GiveUp = Callable[[Client, Any], Awaitable[None]]


async def cancel(_: Client, call: Any) -> None:
    call.cancel()


async def abort(client: Client, _: Any) -> None:
    if client.engine == "tokenspeed":
        assert (await client.stub.Abort(client.pb.AbortRequest(request_id="second"))).success
    else:
        await client.stub.Abort(client.pb.AbortRequest(request_ids=["ghost", "second"]))


WAYS = {"CANCELLED": cancel, "ABORTED": abort}
"""What the client sees, and what brings it about."""

ways = pytest.mark.parametrize("code", WAYS)
rpcs = pytest.mark.parametrize(("engine", "rpc"), RPCS)


class Waiting(GatedWorker):
    """Its handlers never end by themselves."""

    ended: asyncio.Event

    async def forever(self, request: WorkerRequest) -> None:
        self.requests.append(request)
        self.ended = asyncio.Event()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        yield [1]
        await self.forever(request)

    async def encode(self, request: WorkerRequest) -> None:
        await self.forever(request)


def begin(client: Client, request: Any) -> Any:
    """The call, under way."""
    if type(request).__name__ == "EncodeRequest":
        return client.encoder.Encode(request, timeout=30)
    return client.stub.Generate(request, timeout=30)


async def code_of(call: Any) -> str:
    """The name of the status that the call ends with, what it answers before that aside."""
    if hasattr(call, "read"):
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await call.read() is not grpc.aio.EOF:
                pass
    return str((await call.code()).name)


async def running(client: Client, count: int) -> None:
    """Return when the worker serves ``count`` calls."""
    async with asyncio.timeout(10):
        while (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads[0].num_running_reqs != count:
            await asyncio.sleep(0.005)


def serve(shm_dir: pathlib.Path, body: Any, kind: type[Worker] = GatedWorker, **options: Any) -> None:
    async def test(worker: Any) -> None:
        async with serving(worker, grace_s=0.1) as client:
            await body(client, worker)

    with cpu_receiver(shm_dir) as receiver:
        run(test(kind(receiver, **options)))
    gc.collect()  # gRPC's client keeps a call that it cancelled, and with it its descriptors, in a cycle


def two_requests(maker: SegmentMaker, engine: str, rpc: str) -> tuple[Any, Any, list[str]]:
    """Two requests of two segments each, and the names of the first one's."""
    requests = []
    for request_id in ("first", "second"):
        request = request_with(engine, rpc=rpc, request_id=request_id)
        maker.fill(tensor_of(request))
        maker.fill(tensor_of(request, "grid"))
        requests.append(request)
    return requests[0], requests[1], sorted([tensor_of(requests[0]).shm.name, tensor_of(requests[0], "grid").shm.name])


@rpcs
@ways
def test_while_the_receive_is_queued(shm_dir: pathlib.Path, engine: str, rpc: str, code: str) -> None:
    maker = SegmentMaker(shm_dir)
    first, second, names = two_requests(maker, engine, rpc)

    async def body(client: Client, worker: GatedWorker) -> None:
        holding = begin(client, first)
        await until(worker.gate.arrived.is_set)
        queued = begin(client, second)
        await running(client, 2)
        await WAYS[code](client, queued)
        assert await code_of(queued) == code
        # Released at once, although the only thread is still busy.
        await until(lambda: maker.names() == names)
        await running(client, 1)
        worker.gate.open()
        assert await code_of(holding) == "OK"
        assert maker.names() == []
        assert [r.request_id for r in worker.requests] == ["first"]
        assert len(worker.receives) == 1

    serve(shm_dir, body, engine=engine, receive_threads=1)


@rpcs
@ways
def test_while_the_receive_runs(shm_dir: pathlib.Path, engine: str, rpc: str, code: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine, rpc=rpc, request_id="second")
    maker.fill(tensor_of(request))

    async def body(client: Client, worker: GatedWorker) -> None:
        call = begin(client, request)
        await until(worker.gate.arrived.is_set)
        await WAYS[code](client, call)
        assert await code_of(call) == code
        await running(client, 0)
        assert len(maker.names()) == 1
        worker.gate.open()
        await until(lambda: maker.names() == [])
        assert worker.requests == []

    serve(shm_dir, body, engine=engine)


@rpcs
@ways
def test_in_the_handler(shm_dir: pathlib.Path, engine: str, rpc: str, code: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine, rpc=rpc, request_id="second", stream=True)
    maker.fill(tensor_of(request))

    async def body(client: Client, worker: Waiting) -> None:
        worker.gate.open()
        call = begin(client, request)
        await until(lambda: worker.requests != [])
        assert maker.names() == []
        await WAYS[code](client, call)
        await asyncio.wait_for(worker.ended.wait(), 10)
        assert await code_of(call) == code
        await running(client, 0)

    serve(shm_dir, body, Waiting, engine=engine)


def test_abort_says_so(shm_dir: pathlib.Path) -> None:
    request = request_with("tokenspeed", request_id="second")

    async def body(client: Client, worker: Waiting) -> None:
        call = begin(client, request)
        await until(lambda: worker.requests != [])
        await abort(client, call)
        assert await code_of(call) == "ABORTED"
        assert await call.details() == "request 'second' was aborted"

    serve(shm_dir, body, Waiting)


def test_abort_ends_every_call_of_the_id(shm_dir: pathlib.Path) -> None:
    async def body(client: Client, worker: Waiting) -> None:
        calls = [begin(client, request_with("tokenspeed", request_id=i)) for i in ("second", "second", "third")]
        await until(lambda: len(worker.requests) == 3)
        await abort(client, None)
        assert [await code_of(call) for call in calls[:2]] == ["ABORTED", "ABORTED"]
        await running(client, 1)
        calls[2].cancel()

    serve(shm_dir, body, Waiting)


class Flooding(Worker):
    """Streams more than a client that does not read can take."""

    sent = 0

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        while True:
            self.sent += 1
            yield range(100_000)


@ways
def test_while_a_slow_client_blocks_the_answer(shm_dir: pathlib.Path, code: str) -> None:
    request = request_with("tokenspeed", request_id="second", stream=True)

    async def body(client: Client, worker: Flooding) -> None:
        call = begin(client, request)
        await call.read()
        sent = 0
        while sent != worker.sent:  # until flow control holds it
            sent = worker.sent
            await asyncio.sleep(0.2)
        await WAYS[code](client, call)
        await running(client, 0)
        assert await code_of(call) == code

    serve(shm_dir, body, Flooding)


def test_the_clients_deadline(shm_dir: pathlib.Path) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed")
    maker.fill(tensor_of(request))

    async def body(client: Client, worker: Waiting) -> None:
        worker.gate.open()
        call = client.stub.Generate(request, timeout=0.5)
        assert await code_of(call) == "DEADLINE_EXCEEDED"
        await running(client, 0)
        assert maker.names() == []

    serve(shm_dir, body, Waiting)


def test_a_client_that_vanishes(shm_dir: pathlib.Path) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed")
    maker.fill(tensor_of(request))

    async def body(client: Client, worker: GatedWorker) -> None:
        async with grpc.aio.insecure_channel(worker.address.removeprefix("grpc://")) as channel:
            call = begin(Client("tokenspeed", channel), request)
            await until(worker.gate.arrived.is_set)
        assert call.done()
        await running(client, 0)
        worker.gate.open()
        await until(lambda: maker.names() == [])
        assert worker.requests == []

    serve(shm_dir, body)


@rpcs
def test_over_the_limit_while_queued(shm_dir: pathlib.Path, engine: str, rpc: str) -> None:
    maker = SegmentMaker(shm_dir)
    first, second, names = two_requests(maker, engine, rpc)

    async def body(client: Client, worker: GatedWorker) -> None:
        holding = begin(client, first)
        await until(worker.gate.arrived.is_set)
        code, details = await client.refused(second)
        assert (code, details) == (
            "INTERNAL",
            "MmcopyTimeoutError: receive: 2 segments were not received within 0.3 s: "
            "the receive was still waiting for a thread",
        )
        assert await code_of(holding) == "INTERNAL"
        assert await holding.details() == (
            "MmcopyTimeoutError: receive: 2 segments were not received within 0.3 s: the receive still runs"
        )
        await until(lambda: maker.names() == names)
        worker.gate.open()
        await until(lambda: maker.names() == [])
        assert worker.requests == []

    serve(shm_dir, body, engine=engine, receive_threads=1, receive_timeout_s=0.3)


def test_over_the_limit_inline_may_be_tried_again(shm_dir: pathlib.Path) -> None:
    request = request_with("tokenspeed")
    tensor_of(request).MergeFrom(type(tensor_of(request))(dtype="uint8", shape=[1], inline=b"x"))

    async def body(client: Client, worker: GatedWorker) -> None:
        code, details = await client.refused(request)
        assert (code, "0 segments were not received within 0.2 s" in details) == ("DEADLINE_EXCEEDED", True)
        worker.gate.open()

    serve(shm_dir, body, receive_timeout_s=0.2)


def test_a_late_receive_that_fails_is_logged(shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed", request_id="late")
    maker.fill(tensor_of(request))
    maker.fill(tensor_of(request, "grid"))

    async def body(client: Client, worker: GatedWorker) -> None:
        await client.refused(request)
        (shm_dir / tensor_of(request).shm.name).unlink()
        worker.gate.open()
        await until(lambda: maker.names() == [])
        await until(lambda: "'late': the receive that was given up failed" in caplog.text)

    serve(shm_dir, body, receive_timeout_s=0.2)


@rpcs
@pytest.mark.parametrize("stage", ["queued", "receiving"])
def test_stop_cancels_what_does_not_end(shm_dir: pathlib.Path, engine: str, rpc: str, stage: str) -> None:
    maker = SegmentMaker(shm_dir)
    first, second, names = two_requests(maker, engine, rpc)

    async def body(client: Client, worker: GatedWorker) -> None:
        calls = [begin(client, first)]
        await until(worker.gate.arrived.is_set)
        calls.append(begin(client, second))
        await running(client, 2)
        stopping = asyncio.create_task(worker.stop(0.0))
        assert {await code_of(call) for call in calls} <= {"CANCELLED", "UNAVAILABLE"}
        # What was queued is released at once; a copy that runs keeps its segments until it ends.
        await until(lambda: len(maker.names()) == (2 if stage == "queued" else 4))
        assert set(names) <= set(maker.names())
        assert not stopping.done()
        worker.gate.open()
        await stopping
        assert maker.names() == []
        assert worker.requests == []

    serve(shm_dir, body, engine=engine, receive_threads=1 if stage == "queued" else 2)


@rpcs
def test_stop_lets_calls_end_within_its_grace(shm_dir: pathlib.Path, engine: str, rpc: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine, rpc=rpc)
    maker.fill(tensor_of(request))

    async def body(client: Client, worker: GatedWorker) -> None:
        call = begin(client, request)
        await until(worker.gate.arrived.is_set)
        stopping = asyncio.create_task(worker.stop(20.0))
        await asyncio.sleep(0.05)
        worker.gate.open()
        assert await code_of(call) == "OK"
        await stopping
        assert len(worker.requests) == 1

    serve(shm_dir, body, engine=engine)
