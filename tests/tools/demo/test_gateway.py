"""The real gateway as a context manager, with the demo's own worker behind it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mmcopy.errors import ConfigError, MissingDependencyError
from mmcopy.tools.demo.gateway import GatewayError, Worker
from mmcopy.tools.demo.model_dir import write_model_dir
from mmcopy.tools.demo.pictures import noise
from mmcopy.tools.demo.worker_process import WorkerError, WorkerProcess
from tests.rigs.orphans import have_ended, orphans_of
from tests.rigs.smg_gateway import Gateway
from tests.rigs.waiting import settle

MODEL = "qwen3_vl-demo"
PICTURE = noise(128, 128).file


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("worker") / "log"
    process = WorkerProcess(model_dir, served_model_name=MODEL, log_path=log, framework="numpy")
    process.start()
    try:
        process.wait_until_ready(time.monotonic() + 30)
        yield process
    finally:
        process.stop()


@pytest.mark.gateway
def test_a_request_and_what_can_be_read_about_it(
    model_dir: Path, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMG_MM_SHM_MIN_BYTES", "1")  # must not get there: the small tensors would go by segment too
    gateway = Gateway(model_dir, [worker.address], model=MODEL, env={"SMG_MM_TENSOR_TRANSPORT": "shm"})
    assert not gateway.running
    with gateway:
        reply = gateway.chat(images=[PICTURE])
        assert (reply.status, reply.content, reply.chunks) == (200, "received", 0)
        assert reply.usage["completion_tokens"] == len("received")
        streamed = gateway.chat(images=[PICTURE], text="again", stream=True)
        assert (streamed.status, streamed.content) == (200, "received")
        assert streamed.chunks > 1
        assert settle(lambda: {reply.id, streamed.id} <= {line["request_id"] for line in worker.reports("request")})
        (seen,) = gateway.workers()
        assert seen["url"] == worker.address.url
        assert seen["is_healthy"] is True
        metrics = gateway.metrics()
        # Twice: the pixels by segment, image_grid_thw and patches_per_image inline.
        assert metrics['smg_mm_tensors_total{runtime="tokenspeed",path="shm"}'] == 2
        assert metrics['smg_mm_tensors_total{runtime="tokenspeed",path="inline"}'] == 4
        assert all(name.startswith("smg_mm") for name in metrics)
        assert gateway.log_lines("POST path=/v1/chat/completions")
        assert gateway.request("GET", "/nothing").status == 404
        assert settle(lambda: gateway.segments() == [])
        with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
            patch.setattr(gateway, "url", f"http://127.0.0.1:{silent.getsockname()[1]}")
            late = gateway.chat(text="nobody answers", timeout_s=0.1)
        assert late.status is None
        assert late.text
        pid = gateway.pid
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert settle(lambda: not any(each.is_running() and each.status() != "zombie" for each in family))
    assert gateway.stop() == 0
    assert gateway.log_text() == ""
    assert gateway.workers() == []
    assert gateway.metrics() == {}


@pytest.mark.gateway
def test_what_a_killed_gateway_made_is_listed_by_its_pid(model_dir: Path, worker: WorkerProcess) -> None:
    gateway = Gateway(model_dir, [worker.address], model=MODEL)
    with gateway:
        left = Path("/dev/shm", f"smg-tokenspeed-{gateway.pid}-1-2")
        stranger = Path("/dev/shm", f"smg-tokenspeed-{gateway.pid}0-1-2")
        try:
            left.touch()
            stranger.touch()
            gateway.kill()
            assert not gateway.running
            assert gateway.segments() == [left.name]
        finally:
            left.unlink()
            stranger.unlink()
    assert gateway.stop() == -signal.SIGKILL


@pytest.mark.gateway
def test_a_gateway_without_workers_takes_them_later(model_dir: Path, worker: WorkerProcess) -> None:
    with Gateway(model_dir, flags=["--enable-igw"], model=MODEL) as gateway:
        assert gateway.workers() == []
        assert gateway.chat(images=[PICTURE]).status != 200
        assert gateway.request("POST", "/workers", {"url": worker.address.url}).status == 202
        assert settle(lambda: any(seen["is_healthy"] for seen in gateway.workers()), limit_s=15)
        assert settle(lambda: gateway.chat(images=[PICTURE]).status == 200, limit_s=15)


@pytest.mark.gateway
def test_one_that_cannot_start_says_why_and_is_gone(model_dir: Path, tmp_path: Path, nothing_left_open: None) -> None:
    log = tmp_path / "log"
    gateway = Gateway(model_dir, transport="shm", flags=["--no-such-flag"], log_path=log)
    with pytest.raises(GatewayError, match=r"ended before it could answer HTTP\n.*no-such-flag"):
        gateway.start()
    assert not gateway.running
    assert "--no-such-flag" in log.read_text()
    nobody = Worker("grpc://127.0.0.1:9")
    gateway = Gateway(model_dir, [nobody], model=MODEL, start_timeout_s=3.0)
    with pytest.raises(GatewayError, match="did not find its 1 workers healthy in time"):
        gateway.start()
    assert len(gateway.pids) == 3  # a probe that came too early is worth another start
    assert not any(psutil.pid_exists(pid) for pid in gateway.pids)


@pytest.mark.gateway
def test_a_wait_can_be_ended(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class EnoughError(Exception):
        pass

    def poll() -> None:
        raise EnoughError

    gateway = Gateway(model_dir, poll=poll)
    with pytest.raises(EnoughError):
        gateway.start()
    assert not gateway.running
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gateway
def test_it_ends_with_its_parent(model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from mmcopy.tools.demo.gateway import Gateway\n"
        f"g = Gateway({str(model_dir)!r}, flags=['--enable-igw'], log_path={str(tmp_path / 'log')!r})\n"
        "g.start(); print(g.pid, flush=True); time.sleep(60)"
    )
    orphans = orphans_of(code)
    assert settle(lambda: have_ended(orphans), limit_s=8)


def test_bad_arguments_and_no_smg(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="topology is 'ring', want one of regular, pd, epd"):
        Gateway(model_dir, topology="ring")
    with pytest.raises(ConfigError, match="role is 'boss', want one of"):
        Worker("grpc://127.0.0.1:1", "boss")
    with pytest.raises(RuntimeError, match="was not started"):
        _ = Gateway(model_dir).pid
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependencyError, match=r"smg.*pip install 'mmcopy\[demo\]'"):
        Gateway(model_dir).start()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, nothing_left_open: None) -> None:
    process = WorkerProcess(tmp_path, served_model_name=MODEL, log_path=tmp_path / "log", framework="numpy")
    process.start()
    with pytest.raises(WorkerError, match=r"the regular worker did not start: .*config\.json"):
        process.wait_until_ready(time.monotonic() + 30)
    process.stop()
    assert not psutil.pid_exists(process.pid)


def test_a_worker_ends_when_its_parent_is_killed(worker: WorkerProcess, model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from mmcopy.tools.demo.worker_process import WorkerProcess\n"
        f"w = WorkerProcess({str(model_dir)!r}, served_model_name={MODEL!r}, log_path={str(tmp_path / 'log')!r},"
        " framework='numpy')\n"
        "w.start(); w.wait_until_ready(time.monotonic() + 30); print(w.pid, flush=True); time.sleep(60)"
    )
    orphans = orphans_of(code)
    assert settle(lambda: have_ended(orphans), limit_s=8)
    assert psutil.pid_exists(worker.pid)
    assert os.getpgid(worker.pid) == worker.pid
