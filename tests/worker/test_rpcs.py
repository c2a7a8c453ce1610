"""The RPCs beside Generate and Encode, and what a worker tells about itself."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Awaitable
from datetime import datetime
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

import mmcopy
from mmcopy.integrations.smg import SmgWorker
from tests.rigs.smg_messages import ENGINES
from tests.rigs.smg_rig import MODEL, Client, Worker, cpu_receiver, request_with, run, serving, until

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def serve(shm_dir: pathlib.Path, body: Any, **options: Any) -> None:
    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await body(client, worker)

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, **options)))


async def code_of(call: Awaitable[Any]) -> str:
    """The status that the call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("engine", ENGINES)
def test_model_info(shm_dir: pathlib.Path, engine: str) -> None:
    async def body(client: Client, _: Worker) -> None:
        info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
        assert (info.model_path, info.tokenizer_path) == ("/models/tiny", "/models/tiny")
        assert (info.served_model_name, info.model_type) == ("tiny", "qwen3_vl")
        assert list(info.architectures) == ["Qwen3VLForConditionalGeneration"]
        assert (info.vocab_size, list(info.eos_token_ids)) == (300, [258])
        assert (info.max_context_length, info.max_req_input_len, info.supports_vision) == (65536, 65535, True)
        if engine == "tokenspeed":
            assert info.supports_multimodal
            assert list(info.supported_modalities) == [common_pb2.IMAGE, common_pb2.VIDEO]
            assert info.multimodal_encoder_dtype == "float16"
        else:
            assert info.is_generation

    serve(shm_dir, body, engine=engine, encoder_dtype="float16")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("namespace", [None, "", "other-boot:42"])
def test_server_info_advertises_namespace_and_dtype(shm_dir: pathlib.Path, engine: str, namespace: str | None) -> None:
    async def body(client: Client, worker: Worker) -> None:
        info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
        wanted = mmcopy.shm_namespace_id(str(shm_dir)) if namespace is None else namespace
        assert wanted == worker.shm_namespace_id
        assert (wanted != "") == (namespace != "")
        if engine == "tokenspeed":
            fields = dict(info.scheduler_info)
            assert fields == ({"shm_namespace_id": wanted} if wanted else {})
            assert info.server_args["served_model_name"] == "tiny"
            assert info.start_time.seconds > 0
        else:
            assert (info.shm_namespace_id, info.multimodal_encoder_dtype) == (wanted, "float32")
        assert info.uptime_seconds >= 0

    serve(shm_dir, body, engine=engine, shm_namespace_id=namespace, encoder_dtype="float32")


def test_the_fields_of_the_wire(shm_dir: pathlib.Path) -> None:
    """By number, as the gateway reads them."""
    fields = tokenspeed_scheduler_pb2.GetModelInfoResponse.DESCRIPTOR.fields_by_number
    assert fields[18].name == "multimodal_encoder_dtype"
    fields = vllm_engine_pb2.GetServerInfoResponse.DESCRIPTOR.fields_by_number
    assert (fields[10].name, fields[22].name) == ("shm_namespace_id", "multimodal_encoder_dtype")


def test_no_encoder_dtype_is_told_as_none(shm_dir: pathlib.Path) -> None:
    async def body(client: Client, _: Worker) -> None:
        info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
        assert info.multimodal_encoder_dtype == ""

    serve(shm_dir, body, encoder_dtype="")


def test_server_info_hook(shm_dir: pathlib.Path) -> None:
    class Connected(Worker):
        def server_info(self, message: Any) -> None:
            message.kv_connector = "NixlConnector"

    async def test(worker: SmgWorker) -> None:
        async with serving(worker) as client:
            info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
        assert info.kv_connector == "NixlConnector"

    with cpu_receiver(shm_dir) as receiver:
        run(test(Connected(receiver, engine="vllm")))


@pytest.mark.parametrize("engine", ENGINES)
def test_health(shm_dir: pathlib.Path, engine: str) -> None:
    async def body(client: Client, _: Worker) -> None:
        assert (await client.stub.HealthCheck(client.pb.HealthCheckRequest())).healthy
        health = health_pb2_grpc.HealthStub(client.channel)
        response = await health.Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        assert await code_of(health.Check(health_pb2.HealthCheckRequest(service="other"))) == "NOT_FOUND"

    serve(shm_dir, body, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_loads_count_what_runs(shm_dir: pathlib.Path, engine: str) -> None:
    release = asyncio.Event()

    class Waiting(Worker):
        async def generate(self, request: Any) -> Any:
            self.requests.append(request)
            await release.wait()
            yield [1]

    async def test(worker: Waiting) -> None:
        async with serving(worker) as client:
            calls = [asyncio.create_task(client.generate(request_with(engine, request_id=f"r{i}"))) for i in range(3)]
            await until(lambda: len(worker.requests) == 3)
            loads = await client.stub.GetLoads(client.pb.GetLoadsRequest())
            assert (loads.dp_rank_count, loads.loads[0].num_running_reqs) == (1, 3)
            assert datetime.fromisoformat(loads.timestamp).tzinfo is not None
            release.set()
            await asyncio.gather(*calls)
            loads = await client.stub.GetLoads(client.pb.GetLoadsRequest())
            assert loads.loads[0].num_running_reqs == 0

    with cpu_receiver(shm_dir) as receiver:
        run(test(Waiting(receiver, engine=engine)))


def test_abort_of_an_unknown_request(shm_dir: pathlib.Path) -> None:
    async def body(client: Client, _: Worker) -> None:
        response = await client.stub.Abort(client.pb.AbortRequest(request_id="ghost"))
        assert (response.success, response.message) == (False, "no request 'ghost' is running")

    serve(shm_dir, body)

    async def body_vllm(client: Client, _: Worker) -> None:
        await client.stub.Abort(client.pb.AbortRequest(request_ids=["ghost", "other"]))

    serve(shm_dir, body_vllm, engine="vllm")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_rpc_it_does_not_have(shm_dir: pathlib.Path, engine: str) -> None:
    async def body(client: Client, _: Worker) -> None:
        flush, stub = common_pb2.FlushCacheRequest(), client.stub
        assert await code_of(stub.FlushCache(flush)) == "UNIMPLEMENTED"
        for call in (
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
            stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
        ):
            assert await code_of(call.read()) == "UNIMPLEMENTED"

    serve(shm_dir, body, engine=engine)


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("tokenspeed", "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate"),
        ("tokenspeed", "/tokenspeed.grpc.encoder.TokenSpeedEncoder/Encode"),
        ("vllm", "/vllm.grpc.engine.VllmEngine/Generate"),
    ],
)
def test_bytes_that_are_no_message(shm_dir: pathlib.Path, engine: str, method: str) -> None:
    async def body(client: Client, worker: Worker) -> None:
        call = client.channel.unary_unary(method)(b"\xff\xff\xff")
        assert await code_of(call) == "INVALID_ARGUMENT"
        assert f"3 bytes are not a {method.split('.')[0][1:]}.grpc." in await call.details()
        assert worker.requests == []
        # The worker lives on.
        assert await client.generate(request_with(engine))

    serve(shm_dir, body, engine=engine)


def test_a_worker_without_handlers_refuses(shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(worker: SmgWorker) -> None:
        async with serving(worker) as client:
            for rpc in ("encode", "generate"):
                code, details = await client.refused(request_with("tokenspeed", rpc=rpc))
                assert code == "UNIMPLEMENTED"
                assert f"SmgWorker does not {rpc}" in details

    with cpu_receiver(shm_dir) as receiver:
        run(test(SmgWorker(MODEL, receiver)))
    caplog.clear()  # its records hold tracebacks, and so the calls
