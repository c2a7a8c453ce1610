"""``mmcopy explain`` with real workers: what it says of each, in text and JSON, and what it ends with."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mmcopy import Receiver, WorkerSpec, shm_namespace_id
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import ConfigError, WorkerUnreachableError
from mmcopy.integrations.smg import Advertised, ask_worker, with_advertised
from mmcopy.tools.cli import main
from tests.rigs.smg_rig import Worker, cpu_receiver

pytestmark = [pytest.mark.usefixtures("segments")]


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMG_MM_TENSOR_TRANSPORT", "SMG_MM_SHM_MIN_BYTES", "MMCOPY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def endpoint() -> Iterator[WorkerEndpoint]:
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name,
        WorkerEndpoint(f"{name}/run", max_arenas=0) as endpoint,
    ):
        yield endpoint


class Served:
    """Workers on a loop of their own while the test's thread asks them."""

    def __init__(self, receiver: Receiver, *options: dict[str, Any]) -> None:
        self.workers = [Worker(receiver, **each) for each in options]

    def __enter__(self) -> list[str]:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        for worker in self.workers:
            asyncio.run_coroutine_threadsafe(worker.start(), self._loop).result(30)
        return [worker.address for worker in self.workers]

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            asyncio.run_coroutine_threadsafe(worker.stop(0), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def explained(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["explain", "--json", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)  # type: ignore[no-any-return]


def test_what_workers_advertise(endpoint: WorkerEndpoint) -> None:
    with cpu_receiver("/dev/shm") as receiver:
        options = [
            {"engine": engine, "encoder_dtype": dtype, "endpoint_path": path, "shm_namespace_id": namespace}
            for engine in ("tokenspeed", "vllm")
            for dtype, path, namespace in [("float16", endpoint.path, None), ("", "", "")]
        ]
        with Served(receiver, *options) as urls:
            told = [ask_worker(url) for url in urls]
    ours = {"shm_namespace_id": shm_namespace_id(), "mmcopy_endpoint": endpoint.path, "shm_uid": str(os.geteuid())}
    normalizes = {"mm_device_do_normalize": "false"}
    assert told == [
        Advertised("tokenspeed", {**ours, "multimodal_encoder_dtype": "float16"}),
        Advertised("tokenspeed", {"shm_uid": ours["shm_uid"]}),
        Advertised("vllm", {**ours, **normalizes, "multimodal_encoder_dtype": "float16"}),
        Advertised("vllm", {**normalizes, "shm_uid": ours["shm_uid"]}),
    ]
    spec = WorkerSpec("w", labels={"shm_namespace_id": "operator's"}, engine="vllm")
    merged = with_advertised(spec, told[0])
    assert (merged.engine, merged.labels["shm_namespace_id"]) == ("vllm", "operator's")
    assert merged.labels["mmcopy_endpoint"] == endpoint.path


def test_a_worker_that_does_not_answer_and_a_url_that_is_none() -> None:
    with pytest.raises(
        WorkerUnreachableError, match=r"worker grpc://127.0.0.1:1 does not tell its labels: UNAVAILABLE"
    ):
        ask_worker("grpc://127.0.0.1:1", timeout_s=5)
    for url in ("http://127.0.0.1:1", "", "grpc://", "unix:/x"):
        with pytest.raises(ConfigError, match="worker url is"):
            ask_worker(url)


def test_each_value_comes_with_its_source(
    endpoint: WorkerEndpoint,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B86: three workers, and every layer is somebody's source."""
    monkeypatch.setenv("SMG_MM_SHM_MIN_BYTES", "100000")
    monkeypatch.setenv("SMG_TOKENSPEED_VIDEO_ENCODER_INPUT_DTYPE", "bogus")
    with cpu_receiver("/dev/shm") as receiver:
        options = [
            {"encoder_dtype": "float16", "endpoint_path": endpoint.path},
            {"engine": "vllm", "encoder_dtype": "", "shm_namespace_id": "elsewhere:1"},
            {"encoder_dtype": ""},
        ]
        with Served(receiver, *options) as urls:
            file = tmp_path / "router.yaml"
            file.write_text(
                f"mode: auto\nworkers:\n - url: {urls[0]}\n   role: encode\n   multimodal_shm_min_bytes: 64KiB\n"
                f" - url: {urls[1]}\n   role: prefill\n - url: {urls[2]}\n   role: decode\n"
                "   multimodal_tensor_transport: inline\n"
            )
            seen = explained(capsys, "--config", str(file))
            assert main(["explain", "--config", str(file)]) == 0
            text = capsys.readouterr().out
    auto = f"config ({file}:1)"
    assert seen["router"] == {
        "mode": "auto",
        "mode_source": auto,
        "shm_min_bytes": 100_000,
        "shm_min_bytes_source": "SMG_MM_SHM_MIN_BYTES",
        "probe_max_age_s": 30,
    }
    encode, prefill, decode = seen["workers"]
    assert (encode["engine"], prefill["engine"], encode["role"]) == ("tokenspeed", "vllm", "encode")
    assert (encode["mode"], encode["mode_source"]) == ("auto", auto)
    assert (encode["shm_min_bytes"], encode["shm_min_bytes_source"]) == (65536, "worker")
    assert {size: path["path"] for size, path in encode["paths"].items()} == {
        "1 KiB": "inline",
        "64 KiB": "segment",
        "64 MiB": "segment",
    }
    assert encode["paths"]["1 KiB"]["reason"] == "small"
    assert encode["dtypes"] == {
        "image": {"dtype": "float16", "source": "worker label multimodal_encoder_dtype"},
        "video": {"dtype": "float32", "source": "SMG_TOKENSPEED_VIDEO_ENCODER_INPUT_DTYPE"},
        "audio": {"dtype": "float16", "source": "worker label multimodal_encoder_dtype"},
    }
    assert (encode["shares_memory"], prefill["shares_memory"], decode["shares_memory"]) == (True, False, True)
    assert prefill["paths"]["64 MiB"]["reason"] == "namespace_differs"
    assert prefill["paths"]["64 KiB"]["reason"] == "small"  # 100000, of the environment
    assert prefill["dtypes"]["image"] == {"dtype": "float32", "source": "default"}
    assert (decode["mode"], decode["mode_source"], decode["paths"]["64 MiB"]["reason"]) == ("inline", "worker", "mode")
    assert decode["dtypes"]["image"] == {"dtype": "bfloat16", "source": "default"}

    pixels, side = seen["legs"]
    assert (pixels["receivers"], pixels["paths"]["64 MiB"]["path"]) == ([urls[0]], "segment")
    assert side["receivers"] == urls[1:]
    assert side["paths"]["64 MiB"]["reason"] == "receivers_disagree"
    assert any("'bogus'" in warning for warning in seen["warnings"])

    for wanted in (auto, "SMG_MM_SHM_MIN_BYTES", "worker label multimodal_encoder_dtype", "elsewhere:1", "'bogus'"):
        assert wanted in text
    assert f"pixels, to {urls[0]}" in text
    assert f"side tensors, to each of {urls[1]}, {urls[2]}" in text


def test_the_command_line_goes_before_the_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("mode: auto\nshm_min_bytes: 1MiB\n")
    seen = explained(capsys, "--config", str(file), "--multimodal-tensor-transport", "shm")["router"]
    assert (seen["mode"], seen["mode_source"]) == ("shm", "config (--multimodal-tensor-transport)")
    assert (seen["shm_min_bytes"], seen["shm_min_bytes_source"]) == (1 << 20, f"config ({file}:2)")


def test_a_worker_that_does_not_answer_is_told_and_the_others_too(capsys: pytest.CaptureFixture[str]) -> None:
    with cpu_receiver("/dev/shm") as receiver, Served(receiver, {}) as urls:
        arguments = [
            "--worker",
            "encode=grpc://127.0.0.1:1",
            f"prefill={urls[0]}",
            "--multimodal-tensor-transport=auto",
        ]
        seen = explained(capsys, *arguments, code=1)
    missing, found = seen["workers"]
    assert "UNAVAILABLE" in missing["fault"]
    assert missing["paths"]["64 MiB"]["reason"] == "namespace_unknown"
    assert (found["fault"], found["paths"]["64 MiB"]["path"]) == ("", "segment")
    assert [leg["name"] for leg in seen["legs"]] == ["pixels", "side tensors"]


def test_a_worker_without_shared_memory_of_ours_is_found_out_by_asking(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    other = tmp_path / "shm"
    other.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name,
        WorkerEndpoint(name, shm_dir=other, max_arenas=0) as endpoint,
    ):
        options = {"endpoint_path": endpoint.path, "shm_namespace_id": shm_namespace_id()}
        with cpu_receiver("/dev/shm") as receiver, Served(receiver, options) as urls:
            (worker,) = explained(capsys, "--worker", urls[0], "--multimodal-tensor-transport", "auto")["workers"]
            code = main(["doctor", "--json", "--worker", urls[0], "grpc://127.0.0.1:1"])
            lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert not worker["shares_memory"]
    assert worker["paths"]["64 MiB"]["reason"] == "proof_failed"
    assert str(other) in worker["sharing"]
    assert lines["probe"]["status"] == "good"
    assert lines[f"worker {urls[0]}"]["status"] == "warning"
    assert "auto sends inline" in lines[f"worker {urls[0]}"]["advice"]
    assert lines["worker grpc://127.0.0.1:1"]["status"] == "problem"
    assert code == 1


@pytest.fixture
def arena_worker() -> Iterator[tuple[str, str]]:
    """A worker that takes arenas, and sees another /dev/shm than we: its url, and its socket."""
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name,
        tempfile.TemporaryDirectory(prefix="mmcopy-test-") as other,
        WorkerEndpoint(name, shm_dir=other) as endpoint,
        Receiver("cpu", framework="numpy", endpoint=endpoint) as receiver,
        Served(receiver, {"shm_namespace_id": "elsewhere:1"}) as urls,
    ):
        yield urls[0], endpoint.path


def test_a_worker_that_takes_the_arena_gets_leases(
    arena_worker: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, socket = arena_worker
    (worker,) = explained(capsys, "--worker", url, "--multimodal-tensor-transport", "auto")["workers"]
    assert (worker["takes_arena"], worker["arena"]) == (True, f"handed over at {socket}")
    assert not worker["shares_memory"]
    assert {size: path["path"] for size, path in worker["paths"].items()} == {
        "1 KiB": "inline",
        "64 KiB": "lease",
        "64 MiB": "lease",
    }
    assert "which the worker has mapped" in worker["paths"]["64 MiB"]["detail"]
    (inline,) = explained(capsys, "--worker", url, "--multimodal-tensor-transport", "inline")["workers"]
    assert (inline["takes_arena"], inline["paths"]["64 MiB"]["path"]) == (True, "inline")
    assert main(["explain", "--worker", url, "--multimodal-tensor-transport", "shm"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  takes arena +yes +handed over at {socket}$", text, re.MULTILINE)
    assert re.search(r"^  64 MiB +lease +written into the arena, which the worker has mapped", text, re.MULTILINE)
    main(["doctor", "--json", "--worker", url])
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines[f"worker {url}"]["status"] == "good"
    assert "takes the arena, auto uses it" in lines[f"worker {url}"]["found"]
    assert "no such segment" in lines[f"worker {url}"]["found"]


def test_why_there_is_no_lease(endpoint: WorkerEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"{endpoint.path}.gone"
    with cpu_receiver("/dev/shm") as receiver:
        options = [{"endpoint_path": path} for path in (endpoint.path, "", gone)]
        with Served(receiver, *options) as urls:
            arguments = ["--worker", *urls, "--multimodal-tensor-transport", "shm"]
            seen = explained(capsys, *arguments)["workers"]
    whys = [
        f"the worker takes none at {endpoint.path}",
        "it advertises no socket (mmcopy_endpoint)",
        f"not handed over at {gone}: no connection",
    ]
    assert [(worker["takes_arena"], worker["arena"]) for worker in seen] == [(False, why) for why in whys]
    for worker, why in zip(seen, whys, strict=True):
        path = worker["paths"]["64 MiB"]
        assert (path["path"], path["detail"]) == ("segment", f"no arena: {why}")


def test_doctor_probes_a_good_worker(endpoint: WorkerEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    with cpu_receiver("/dev/shm") as receiver, Served(receiver, {"endpoint_path": endpoint.path}, {}) as urls:
        main(["doctor", "--json", "--worker", *urls])
        lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    for url, how in zip(urls, [f"asked over {endpoint.path}", "by its labels"], strict=True):
        assert lines[f"worker {url}"]["status"] == "good"
        assert how in lines[f"worker {url}"]["found"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--config", "/nonexistent.yaml"], "cannot read /nonexistent.yaml"),
        (["--worker", "encoder=grpc://a:1"], "worker grpc://a:1: role is 'encoder'.*did you mean 'encode'"),
        (["--worker", "grpc://a:1", "grpc://a:1"], "worker grpc://a:1 is listed twice"),
        (["--timeout", "soon"], "--timeout is 'soon', want seconds"),
    ],
)
def test_bad_calls_end_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"mmcopy explain: .*{why}.*\n", err), err


def test_bad_settings_from_anywhere_end_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMCOPY_CONFIGG", "x")
    assert main(["explain"]) == 2
    assert "did you mean 'MMCOPY_CONFIG'" in capsys.readouterr().err
    monkeypatch.delenv("MMCOPY_CONFIGG")
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--multimodal-tensor-transport", "atuo"])
    assert caught.value.code == 2
    assert "did you mean 'auto'" in capsys.readouterr().err


def test_the_variable_names_the_file(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("mode: shm\n")
    monkeypatch.setenv("MMCOPY_CONFIG", str(file))
    assert explained(capsys)["router"]["mode_source"] == f"config ({file}:1)"


def test_without_workers_it_needs_no_grpc() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from mmcopy.tools.cli import main; sys.exit(main(['explain', '--multimodal-tensor-transport', 'shm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "shm        config (--multimodal-tensor-transport)" in done.stdout
