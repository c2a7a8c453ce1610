"""A worker before it is ready, and which encoder dtype it tells: real gRPC, no gateway."""

from __future__ import annotations

import json
import logging
import pathlib
import threading
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmcopy import Readiness
from mmcopy.errors import ConfigError
from mmcopy.integrations.smg import ModelInfo, SmgWorker
from mmcopy.prewarm.readiness import ReadinessSnapshot, ReadinessState
from tests.rigs.smg_messages import ENGINES
from tests.rigs.smg_rig import MODEL, Client, SegmentMaker, Worker, cpu_receiver, request_with, run, serving, tensor_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def refusals(client: Client) -> list[str]:
    """Messages of the questions that a gateway asks, each of which must be refused."""
    found = []
    for name in ("HealthCheck", "GetModelInfo", "GetServerInfo"):
        try:
            await getattr(client.stub, name)(getattr(client.pb, f"{name}Request")())
        except grpc.aio.AioRpcError as error:
            found.append((error.code().name, error.details() or ""))
    assert {code for code, _ in found} <= {"UNAVAILABLE"}
    return [message for _, message in found]


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_told_before_it_is_ready(shm_dir: pathlib.Path, engine: str) -> None:
    readiness = Readiness()

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            health = health_pb2_grpc.HealthStub(client.channel)
            assert await refusals(client) == ["not ready: starting"] * 3
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING

            readiness.warming("image 64x64", modality="image", done=1, total=4)
            assert await refusals(client) == ["not ready: warming image 64x64 (1 of 4 done)"] * 3

            readiness.ready("video was not warmed")
            assert await refusals(client) == []
            assert (await client.stub.HealthCheck(client.pb.HealthCheckRequest())).healthy
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING

            readiness.fail("the encoder raised")
            assert await refusals(client) == ["not ready: failed: the encoder raised"] * 3
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine, readiness=readiness)))


@pytest.mark.usefixtures("nothing_left_open")
@pytest.mark.parametrize(
    ("engine", "rpc"), [("tokenspeed", "generate"), ("tokenspeed", "encode"), ("vllm", "generate")]
)
def test_a_request_that_comes_too_early_is_refused_aloud_and_leaves_nothing(
    shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture, engine: str, rpc: str
) -> None:
    readiness = Readiness()

    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            request = request_with(engine, rpc=rpc)
            if rpc == "generate":
                assert await client.refused(request) == ("UNAVAILABLE", "not ready: starting")
            maker = SegmentMaker(shm_dir)
            maker.fill(tensor_of(request))
            # Its segments go with it, so that a second attempt could only fail: see status.py.
            assert await client.refused(request) == ("INTERNAL", "UNAVAILABLE: not ready: starting")
            assert maker.names() == []
            assert worker.requests == worker.receives == []
            readiness.ready()
            maker.fill(tensor_of(request))
            await client.call(request)
            assert len(worker.requests) == 1

    with cpu_receiver(shm_dir) as receiver, caplog.at_level(logging.WARNING):
        run(test(Worker(receiver, engine=engine, readiness=readiness)))
    assert "is refused: UNAVAILABLE: not ready: starting" in caplog.text


# ---- the dtype -------------------------------------------------------------


def encoder(**dtypes: str) -> Any:
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    for name, dtype in dtypes.items():
        model.add_module(name, torch.nn.Linear(4, 4, dtype=getattr(torch, dtype)))
    return model


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict, "bfloat16"),
        (lambda: {"encoder_dtype": "float16"}, "float16"),
        (lambda: {"encoder_dtype": ""}, ""),
        (lambda: {"encoder_dtype": {"image": "float16", "video": "float16"}}, "float16"),
        (lambda: {"encoder_dtype": {"image": "bfloat16", "audio": "float16"}}, "float32"),
        (lambda: {"encoder_dtype": {}}, ""),
        (lambda: {"encoder": encoder(visual="float16")}, "float16"),
        (lambda: {"encoder": encoder(audio_tower="bfloat16")}, "bfloat16"),
        (lambda: {"encoder": encoder(visual="bfloat16", audio_tower="float32")}, "float32"),
        (lambda: {"encoder": encoder(text="bfloat16")}, ""),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_dtype_that_is_told(shm_dir: pathlib.Path, engine: str, options: Any, wanted: str) -> None:
    async def test(worker: SmgWorker) -> None:
        async with serving(worker) as client:
            name = "GetModelInfo" if engine == "tokenspeed" else "GetServerInfo"
            info = await getattr(client.stub, name)(getattr(client.pb, f"{name}Request")())
            assert info.multimodal_encoder_dtype == wanted

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, engine=engine, **options())))


def test_no_dtype_is_logged_with_the_reason(shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with cpu_receiver(shm_dir) as receiver, caplog.at_level(logging.WARNING):
        Worker(receiver, encoder=encoder(text="bfloat16"))
    assert "no encoder dtype is advertised" in caplog.text
    assert "no module called visual" in caplog.text


def test_an_encoder_that_is_loaded_late(shm_dir: pathlib.Path) -> None:
    readiness = Readiness()

    async def test(worker: SmgWorker) -> None:
        async with serving(worker) as client:
            assert worker.advertise_encoder(encoder(visual="float16")) == "float16"
            readiness.ready()
            info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
            assert info.multimodal_encoder_dtype == worker.encoder_dtype == "float16"
            assert info.model_dtype == "bfloat16"

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, readiness=readiness)))


def test_bad_dtypes(shm_dir: pathlib.Path) -> None:
    with cpu_receiver(shm_dir) as receiver:
        with pytest.raises(ConfigError, match="both given"):
            Worker(receiver, encoder_dtype="float16", encoder=encoder(visual="float16"))
        with pytest.raises(ConfigError, match="encoder_dtype is 'half'"):
            Worker(receiver, encoder_dtype="half")
        with pytest.raises(ConfigError, match="'int8': a gateway sends"):
            Worker(receiver, encoder_dtype={"image": "int8"})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "text_config": {"dtype": "float32"}}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_the_language_models_dtype_is_its_own(tmp_path: pathlib.Path, fields: dict[str, Any], wanted: str) -> None:
    config = {"model_type": "x", "architectures": ["X"], "vocab_size": 8, "eos_token_id": 1, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelInfo.from_dir(tmp_path, served_model_name="x").model_dtype == wanted
    assert MODEL.model_dtype == "bfloat16"


# ---- the object itself -----------------------------------------------------


def test_snapshots_are_of_one_moment_and_watchers_see_every_change() -> None:
    readiness, seen = Readiness(), list[ReadinessSnapshot]()
    readiness.watch(seen.append)
    assert readiness.state is ReadinessState.STARTING
    assert not readiness.is_ready
    readiness.warming("image 8x8", modality="image", done=0, total=2)
    readiness.warming("image 16x8", modality="image", done=1, total=2)
    readiness.ready()
    assert [str(each) for each in seen] == [
        "warming image 8x8 (0 of 2 done)",
        "warming image 16x8 (1 of 2 done)",
        "ready",
    ]
    assert readiness.is_ready
    assert readiness.snapshot().since_s >= 0
    assert repr(readiness) == "Readiness(ready)"


@pytest.mark.parametrize("limit", [10, 1e12, float("inf")])
@pytest.mark.parametrize("end", ["ready", "fail"])
def test_wait_ends_with_ready_and_with_failed(end: str, limit: float) -> None:
    readiness = Readiness()
    threading.Timer(0.01, readiness.ready if end == "ready" else lambda: readiness.fail("why")).start()
    assert str(readiness.wait(limit)) == ("ready" if end == "ready" else "failed: why")


def test_wait_has_a_limit() -> None:
    assert Readiness().wait(0.01).state is ReadinessState.STARTING
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        Readiness().wait(0)
