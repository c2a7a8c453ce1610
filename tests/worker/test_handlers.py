"""Handlers that fail, and what the client is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from mmcopy.integrations.smg import StatusError, WorkerRequest
from tests.rigs.smg_rig import Client, SegmentMaker, Worker, cpu_receiver, request_with, run, serving, tensor_of

pytestmark = pytest.mark.usefixtures("nothing_left_open")

RPCS = [("tokenspeed", "generate"), ("tokenspeed", "encode"), ("vllm", "generate")]


class Failing(Worker):
    """Raises what ``error`` makes when it has given ``batches``."""

    error: Callable[[], BaseException]
    closed = 0

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        try:
            async for batch in super().generate(request):
                yield batch
            raise self.error()
        finally:
            self.closed += 1

    async def encode(self, request: WorkerRequest) -> None:
        await super().encode(request)
        self.closed += 1
        raise self.error()


@pytest.fixture
def serve(shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Runs a test body against a worker that fails."""

    def start(body: Any, error: Callable[[], BaseException], *, kind: type[Failing] = Failing, **options: Any) -> None:
        async def test(worker: Failing) -> None:
            worker.error = error
            async with serving(worker) as client:
                await body(client, worker)

        with caplog.at_level(logging.DEBUG), cpu_receiver(shm_dir) as receiver:
            run(test(kind(receiver, **options)))
        caplog.clear()  # its records hold tracebacks, and so the calls

    return start


def request_with_segment(shm_dir: pathlib.Path, engine: str, **options: Any) -> Any:
    request = request_with(engine, **options)
    SegmentMaker(shm_dir).fill(tensor_of(request))
    return request


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
def test_an_exception_is_internal_and_logged(
    serve: Any, shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture, engine: str, rpc: str
) -> None:
    async def body(client: Client, worker: Failing) -> None:
        request = request_with_segment(shm_dir, engine, rpc=rpc)
        assert await client.refused(request) == ("INTERNAL", "the handler raised ZeroDivisionError: by nought")
        assert worker.closed == 1
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.name.startswith("mmcopy.integrations.smg")
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError

    serve(body, lambda: ZeroDivisionError("by nought"), engine=engine)


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
def test_an_exception_after_the_first_chunk(serve: Any, shm_dir: pathlib.Path, engine: str) -> None:
    async def body(client: Client, worker: Failing) -> None:
        responses = []
        call = client.stub.Generate(request_with_segment(shm_dir, engine, stream=True))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in call:
                responses.append(response)
        assert [list(r.chunk.token_ids) for r in responses] == [[1, 2], [3]]
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert await call.details() == "the handler raised KeyError: 'gone'"
        assert worker.closed == 1

    serve(body, lambda: KeyError("gone"), engine=engine)


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"])
def test_a_status_of_its_choice(serve: Any, shm_dir: pathlib.Path, engine: str, rpc: str, code: str) -> None:
    """The gateway repeats some codes; a request whose segments are consumed never gets one of those."""
    chosen = (code, "the engine is full")
    with_segments = chosen if code == "FAILED_PRECONDITION" else ("INTERNAL", f"{code}: the engine is full")

    async def body(client: Client, _: Failing) -> None:
        assert await client.refused(request_with_segment(shm_dir, engine, rpc=rpc)) == with_segments
        assert await client.refused(request_with(engine, rpc=rpc)) == chosen

    serve(body, lambda: StatusError(code, "the engine is full"), engine=engine)


@pytest.mark.parametrize("code", ["OK", "internal", "TEAPOT"])
def test_a_status_must_exist(code: str) -> None:
    with pytest.raises(ValueError, match=f"no gRPC error status is called '{code}'"):
        StatusError(code, "why")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FileNotFoundError, "INTERNAL"),
        (MemoryError, "INTERNAL"),
        (TimeoutError, "INTERNAL"),
        (NotImplementedError, "UNIMPLEMENTED"),
        (asyncio.CancelledError, "INTERNAL"),
    ],
)
def test_other_exceptions(serve: Any, shm_dir: pathlib.Path, kind: type[BaseException], code: str) -> None:
    async def body(client: Client, _: Failing) -> None:
        got, details = await client.refused(request_with_segment(shm_dir, "tokenspeed"))
        assert (got, details) == (code, f"the handler raised {kind.__name__}: by itself")

    serve(body, lambda: kind("by itself"))


@pytest.mark.parametrize("character", ["é", "\N{GRINNING FACE}", "\n", "\udcff"])
def test_a_message_fits_its_header(serve: Any, shm_dir: pathlib.Path, character: str) -> None:
    """gRPC's own limit for all headers is 8 KiB, in which each of these bytes takes three."""
    written = "\\udcff" if character == "\udcff" else character

    async def body(client: Client, _: Failing) -> None:
        code, details = await client.refused(request_with_segment(shm_dir, "tokenspeed"))
        assert code == "INTERNAL"
        assert details.startswith(f"the handler raised ValueError: {written * 3}")
        assert details.endswith("...")
        assert 1020 < len(details.encode()) <= 1024

    serve(body, lambda: ValueError(character * 100_000))


@pytest.mark.parametrize("batch", [[-1], [2**32], ["one"], [1.5]])
def test_tokens_that_are_none(serve: Any, shm_dir: pathlib.Path, batch: Any) -> None:
    class Odd(Failing):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.batches = (batch,)

    async def body(client: Client, worker: Failing) -> None:
        code, details = await client.refused(request_with_segment(shm_dir, "tokenspeed", stream=True))
        assert code == "INTERNAL"
        assert details.startswith(("the handler raised ValueError", "the handler raised TypeError"))
        assert worker.closed == 1

    serve(body, lambda: AssertionError("not reached"), kind=Odd)


def test_generate_that_is_no_generator(serve: Any, shm_dir: pathlib.Path) -> None:
    class NoGenerator(Failing):
        async def generate(self, request: WorkerRequest) -> Any:
            return [[1]]

    async def body(client: Client, _: Failing) -> None:
        code, details = await client.refused(request_with_segment(shm_dir, "tokenspeed"))
        assert (code, details) == (
            "INTERNAL",
            "the handler raised TypeError: generate returned a coroutine, want an async generator: does it yield?",
        )

    serve(body, lambda: AssertionError("not reached"), kind=NoGenerator)


def test_one_failure_is_one_requests(serve: Any, shm_dir: pathlib.Path) -> None:
    class FailsOdd(Failing):
        async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
            self.requests.append(request)
            if request.request_id in ("r1", "r3", "r5", "r7"):
                raise self.error()
            yield [4]

    async def body(client: Client, worker: Failing) -> None:
        requests = [request_with_segment(shm_dir, "tokenspeed", request_id=f"r{i}") for i in range(8)]

        async def outcome(request: Any) -> str:
            try:
                responses = await client.generate(request)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return str(list(responses[0].complete.output_ids))

        assert await asyncio.gather(*map(outcome, requests)) == ["[4]", "INTERNAL"] * 4
        assert len(worker.requests) == 8

    serve(body, lambda: RuntimeError("odd"), kind=FailsOdd)
