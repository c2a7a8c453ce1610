"""Starting, stopping, settings, and what a worker leaves behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest

from mmcopy import MmcopyError, errors
from mmcopy.errors import ClosedError, ConfigError
from mmcopy.integrations.smg import ModelInfo, SmgWorker
from mmcopy.integrations.smg.status import RETRIED, receive_status
from tests.rigs.descriptors import open_descriptors
from tests.rigs.smg_messages import ENGINES
from tests.rigs.smg_rig import MODEL, SegmentMaker, Worker, cpu_receiver, request_with, run, serving, tensor_of

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.mark.parametrize("engine", ENGINES)
def test_start_and_stop_leave_nothing_even_without_a_collection(shm_dir: pathlib.Path, engine: str) -> None:
    async def once(worker: Worker) -> None:
        good, bad = request_with(engine), request_with(engine, stream=True)
        SegmentMaker(shm_dir).fill(tensor_of(good))
        SegmentMaker(shm_dir).fill(tensor_of(bad), dtype="float3")
        async with serving(worker) as client:
            await client.generate(good)
            await client.refused(bad)

    gc.collect()
    gc.disable()
    try:
        descriptors, threads = open_descriptors(), threading.active_count()
        for _ in range(3):
            with cpu_receiver(shm_dir) as receiver:
                run(once(Worker(receiver, engine=engine)))
        assert (open_descriptors(), threading.active_count()) == (descriptors, threads)
    finally:
        gc.enable()


def test_a_port_that_is_taken(shm_dir: pathlib.Path) -> None:
    async def test(first: Worker, receiver: Any) -> None:
        async with first:
            second = Worker(receiver, port=first.port)
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
                await second.start()
            await second.stop()

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver), receiver))


def test_one_start_a_worker(shm_dir: pathlib.Path) -> None:
    async def test(worker: Worker) -> None:
        await worker.start()
        with pytest.raises(ClosedError, match="was started already"):
            await worker.start()
        await worker.stop()
        await worker.stop()
        with pytest.raises(ClosedError, match="was started already"):
            await worker.start()

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver)))


def test_stop_before_start_is_nothing(shm_dir: pathlib.Path) -> None:
    with cpu_receiver(shm_dir) as receiver:
        run(Worker(receiver).stop())


def test_wait_returns_after_stop(shm_dir: pathlib.Path) -> None:
    async def test(worker: Worker) -> None:
        await worker.start()
        waiting = asyncio.create_task(worker.wait())
        stops = [asyncio.create_task(worker.stop()) for _ in range(3)]
        await asyncio.gather(waiting, *stops)

    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_address(shm_dir: pathlib.Path, host: str) -> None:
    async def test(worker: Worker) -> None:
        port = await worker.start()
        await worker.stop()
        assert port > 0
        assert worker.address == f"grpc://{'[::1]' if ':' in host else host}:{port}"

    if host == "::1" and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with cpu_receiver(shm_dir) as receiver:
        run(test(Worker(receiver, host=host)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "sglang"}, "engine is 'sglang', want one of tokenspeed, vllm"),
        ({"encoder_dtype": "bf16"}, "encoder_dtype is 'bf16', want '' or one of float64"),
        ({"port": 65536}, "port is 65536"),
        ({"port": -1}, "port is -1"),
        ({"port": "8080"}, "port is '8080'"),
        ({"receive_threads": None}, "receive_threads is None"),
        ({"receive_timeout_s": "soon"}, "receive_timeout_s is 'soon'"),
        ({"receive_threads": 0}, "receive_threads is 0"),
        ({"receive_timeout_s": 0}, "receive_timeout_s is 0"),
        ({"receive_timeout_s": float("nan")}, "receive_timeout_s is nan"),
    ],
)
def test_bad_settings(shm_dir: pathlib.Path, options: dict[str, Any], message: str) -> None:
    with cpu_receiver(shm_dir) as receiver, pytest.raises(ConfigError, match=message):
        SmgWorker(MODEL, receiver, **options)


def test_a_worker_process_ends_with_its_input(shm_dir: pathlib.Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.rigs.worker_process", str(shm_dir)],
        cwd=pathlib.Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) > 0


@pytest.mark.parametrize("package", ["grpc", "smg_grpc_proto"])
def test_without_a_package_start_names_the_extra(shm_dir: pathlib.Path, package: str) -> None:
    code = (
        "import asyncio, sys; sys.modules[sys.argv[1]] = None\n"
        "import mmcopy; from mmcopy.integrations.smg import *\n"
        "model = ModelInfo(model_path='/m', served_model_name='m', model_type='t', architectures=(), vocab_size=1,"
        " eos_token_ids=())\n"
        "worker = SmgWorker(model, mmcopy.Receiver('cpu', framework='numpy'))\n"
        "try: asyncio.run(worker.start())\n"
        "except mmcopy.errors.MissingDependencyError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, package], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'mmcopy[smg]'" in result.stdout
    assert package in result.stdout


def subclasses(kind: type[MmcopyError]) -> set[type[MmcopyError]]:
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def test_every_error_of_mmcopy_has_a_status() -> None:
    known = {kind for kind in subclasses(MmcopyError) if kind.__module__ == errors.__name__}
    assert len(known) > 20
    for kind in known:
        error = kind("receive", "wanted 3") if kind is errors.MmcopyTimeoutError else kind("wanted 3")
        status = receive_status(error, has_segments=True)
        assert status.code not in RETRIED
        assert status.message == f"{kind.__name__}: {error}"
        if receive_status(error, has_segments=False).code not in RETRIED:
            assert receive_status(error, has_segments=False) == status


def write_config(directory: pathlib.Path, **config: Any) -> pathlib.Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


BASE = {"model_type": "llava", "architectures": ["Llava"]}


def test_model_info_from_a_directory(tmp_path: pathlib.Path) -> None:
    write_config(tmp_path, **BASE, vocab_size=1, text_config={"vocab_size": 300, "eos_token_id": [1, 2]})
    assert ModelInfo.from_dir(tmp_path, served_model_name="tiny") == ModelInfo(
        model_path=str(tmp_path),
        served_model_name="tiny",
        model_type="llava",
        architectures=("Llava",),
        vocab_size=300,
        eos_token_ids=(1, 2),
    )


def test_model_info_from_the_top_level(tmp_path: pathlib.Path) -> None:
    write_config(tmp_path, **BASE, vocab_size=5, eos_token_id=4, text_config={"hidden_size": 8})
    info = ModelInfo.from_dir(tmp_path, served_model_name="t", modalities=("audio",), max_context_length=9)
    assert (info.vocab_size, info.eos_token_ids) == (5, (4,))
    assert (info.modalities, info.max_context_length) == (("audio",), 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*config.json"),
        ("{", "cannot read .*config.json"),
        ("[]", "holds a list, want an object"),
        (json.dumps({**BASE, "vocab_size": 3}), "has no 'eos_token_id'"),
        (json.dumps({**BASE, "eos_token_id": 3}), "has no 'vocab_size'"),
        (json.dumps({"vocab_size": 3, "eos_token_id": 3}), "has no 'model_type'"),
        (json.dumps({**BASE, "vocab_size": "many", "eos_token_id": 3}), "bad field in .*config.json: .*'many'"),
    ],
)
def test_a_model_directory_that_is_none(tmp_path: pathlib.Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelInfo.from_dir(tmp_path, served_model_name="tiny")


def test_an_unknown_modality() -> None:
    with pytest.raises(ConfigError, match="unknown modality 'smell', want some of image, video, audio"):
        ModelInfo(
            model_path="/m",
            served_model_name="m",
            model_type="t",
            architectures=(),
            vocab_size=1,
            eos_token_ids=(),
            modalities=("image", "smell"),
        )
