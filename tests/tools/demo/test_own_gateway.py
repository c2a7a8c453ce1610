"""``mmcopy demo --gateway mmcopy``: leases from a gateway process to the worker, every byte right, nothing left."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from mmcopy import Sender, TransportConfig, WorkerSpec
from mmcopy.errors import ConfigError
from mmcopy.tools.cli import main
from mmcopy.tools.demo import checks, job, own_gateway, own_gateway_process
from mmcopy.tools.demo.chat import http
from mmcopy.tools.demo.expected import expected_tensors, prepared, rounded
from mmcopy.tools.demo.families import FAMILIES, RECOMPUTED
from mmcopy.tools.demo.leftovers import Leftover, Leftovers, sender_ids_of
from mmcopy.tools.demo.pictures import Attachments, decode, decoded, noise, picture_from_file
from mmcopy.tools.process import ChildProcess
from tests.rigs.waiting import settle

Demo = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Demo:
    """Runs the command in this process: (exit code, its JSON line, what it wrote to stderr).

    What is left in shared memory is the demo's own to find: others work there at the same time.
    """
    monkeypatch.setattr(job, "default_framework", lambda device: "numpy")

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        children = {child.pid for child in psutil.Process().children()}
        code = main(["demo", "--gateway", "mmcopy", "--json", *arguments])
        assert {child.pid for child in psutil.Process().children()} <= children
        out, err = capfd.readouterr()
        return code, json.loads(out), err

    return run


def line(requests: int, inline: int, segment: int, lease: int, **changes: Any) -> dict[str, Any]:
    paths = {"inline": inline, "segment": segment, "lease": lease}
    good = {"requests": requests, "tensors": sum(paths.values()), "mismatches": 0, "leftover_segments": 0}
    return {**good, "device": "cpu", "paths": paths, **changes}


# Two requests with one picture and with three; a picture has pixels and two side tensors of a few bytes.
@pytest.mark.gateway
@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--engine", "tokenspeed"], line(2, 8, 0, 4)),
        (["--engine", "vllm", "--encoder-dtype", "float16"], line(2, 4, 0, 2)),
        (["--engine", "vllm", "--encoder-dtype", "uint8", "--shm-min-bytes", "0"], line(2, 0, 0, 6)),
        (["--transport", "inline"], line(2, 12, 0, 0)),
        # What a worker advertises of /dev/shm does not matter to memory that it was handed.
        (["--transport", "auto", "--shm-namespace", "foreign"], line(2, 8, 0, 4)),
        (["--transport", "shm", "--requests", "4", "--concurrency", "4"], line(4, 12, 0, 6)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_numbers(demo: Demo, arguments: list[str], want: dict[str, Any]) -> None:
    if "--requests" not in arguments:
        arguments = [*arguments, "--requests", "2"]
    code, got, table = demo(*arguments)
    assert (got, code) == (want, 0), table
    assert "mmcopy gateway -> " in table
    assert "left in shared memory: nothing" in table
    assert f"{got['tensors']} of {got['tensors']} right" in " ".join(table.split())
    assert "note" not in table


@pytest.mark.gateway
def test_a_wrong_byte_of_a_lease_is_found(demo: Demo, one_wrong_byte: None) -> None:
    code, got, table = demo("--requests", "1")
    assert (code, got) == (1, line(1, 2, 0, 1, mismatches=1))
    assert "item0.encoder_input: the bytes are not those that numpy computes" in table


@pytest.mark.gateway
def test_own_pictures_a_jpeg_among_them(demo: Demo, tmp_path: Path) -> None:
    from PIL import Image

    png, jpeg = tmp_path / "a.png", tmp_path / "b.jpg"
    png.write_bytes(noise(96, 64).file)
    Image.new("RGB", (256, 256), (9, 99, 199)).save(jpeg)
    code, got, table = demo("--image", str(png), str(jpeg), "--shm-min-bytes", "60000")
    assert (code, got) == (0, line(1, 4, 0, 2)), table


@pytest.mark.gateway
def test_a_picture_that_no_longer_decodes_fails_its_request_alone(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    real = own_gateway_process.OwnGatewayProcess.chat
    seen: list[int] = []

    def chat(self: Any, *, images: list[bytes], **options: Any) -> Any:
        seen.append(1)
        return real(self, images=[b"no picture"] if len(seen) == 1 else images, **options)

    monkeypatch.setattr(own_gateway_process.OwnGatewayProcess, "chat", chat)
    code, got, table = demo("--requests", "2", "--concurrency", "1")
    assert (code, got["paths"]["lease"], got["mismatches"]) == (1, 3, 0)
    assert "failure request 1 failed: status 400: " in table
    assert "cannot identify image" in table


@pytest.mark.gateway
def test_leases_that_are_out_at_the_end_and_sockets_that_stay_are_failures(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_reports, real_stop = own_gateway_process.OwnGatewayProcess.reports, job.WorkerProcess.stop

    def reports(self: Any, *events: str) -> Any:
        found = real_reports(self, *events)
        return [{**each, "leases_out": 3} for each in found] if events == ("stopped",) else found

    def stop(self: Any) -> Any:
        code = real_stop(self)
        Path(self._options["endpoint-dir"], "mmcopy-0123456789abcdef.sock").touch()
        return code

    monkeypatch.setattr(own_gateway_process.OwnGatewayProcess, "reports", reports)
    monkeypatch.setattr(job.WorkerProcess, "stop", stop)
    code, got, table = demo("--requests", "1")
    assert (code, got) == (1, line(1, 2, 0, 1))
    assert "failure a worker left its socket mmcopy-0123456789abcdef.sock" in table
    assert "failure the mmcopy gateway's arena still had 3 leases out at the end" in table


@pytest.mark.gateway
def test_an_interrupted_run_leaves_nothing() -> None:
    code = (
        "import sys; from mmcopy.tools.cli import main; from mmcopy.tools.demo import job\n"
        "job.default_framework = lambda device: 'numpy'\n"
        "sys.exit(main(['demo', '--gateway', 'mmcopy', '--requests', '40']))"
    )
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-test-") as directory,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": directory},
            start_new_session=True,
        ) as run,
    ):
        found: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while not any("mmcopy.tools.demo.own_gateway" in each.cmdline() for each in found):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            found = psutil.Process(run.pid).children(recursive=True)
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
        assert (run.returncode, out, err) == (128 + signal.SIGINT, "", "mmcopy demo: stopped by SIGINT\n")
        assert settle(lambda: not any(each.is_running() and each.status() != "zombie" for each in found))
        assert list(Path(directory).iterdir()) == []


# ---- without a process -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--topology", "pd"], "topology pd needs gateway smg"),
        (["--topology", "epd"], "topology epd needs gateway smg"),
        (["--family", "phi3_v"], "gateway mmcopy preprocesses qwen3_vl alone, not phi3_v: use --gateway smg"),
    ],
)
def test_what_it_cannot_do_is_told_in_a_line(capfd: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    assert main(["demo", "--gateway", "mmcopy", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("mmcopy demo: ")
    assert why in err
    assert err.count("\n") == 1


def test_pictures_that_need_a_resize_and_videos_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "odd.png"
    odd.write_bytes(noise(133, 77).file)
    assert main(["demo", "--gateway", "mmcopy", "--image", str(odd)]) == 2
    assert "qwen3_vl does not take 133x77 as it is (both sides have to be multiples of 32" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="videos need gateway smg"):
        job.Job(family=FAMILIES["qwen3_vl"], attachments=[Attachments(videos=(b"",))], gateway="mmcopy")
    # Those that are not sent do not matter.
    attachments = [Attachments((noise(64, 64),)), Attachments((noise(133, 77),))]
    job.Job(family=FAMILIES["qwen3_vl"], attachments=attachments, gateway="mmcopy", requests=1)
    with pytest.raises(ConfigError, match="133x77"):
        job.Job(family=FAMILIES["qwen3_vl"], attachments=attachments, gateway="mmcopy", requests=2)


def test_what_is_prepared_becomes_after_the_cast_what_is_expected() -> None:
    family = FAMILIES[RECOMPUTED]
    pixels = np.random.default_rng(1).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    got = prepared(family, [pixels], engine="tokenspeed", dtype="bfloat16")
    want = expected_tensors(family, [(pixels, 640, 480)], engine="tokenspeed", dtype="bfloat16")
    assert got.keys() == want.keys()
    for key, array in got.items():
        tensor = want[key]
        assert tensor is not None
        cast = rounded(array, tensor.dtype) if array.dtype == np.float32 else array
        assert np.array_equal(cast, tensor.elements)


def test_raw_bytes_stay_bytes() -> None:
    pixels = noise(64, 64).pixels
    assert pixels is not None
    made = prepared(FAMILIES[RECOMPUTED], [pixels], engine="vllm", dtype="uint8")
    assert made[0, "pixel_values"].dtype == np.uint8


def test_files_are_decoded_for_a_gateway_that_decodes_alike(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "a.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    attached = Attachments((picture_from_file(path), noise(64, 64)))
    assert attached.pictures[0].pixels is None
    full = decoded(attached)
    assert np.array_equal(full.pictures[0].pixels, decode(path.read_bytes()))  # type: ignore[arg-type]
    assert full.pictures[1].pixels is attached.pictures[1].pixels
    path.write_bytes(path.read_bytes().partition(b"\xff\xda")[0])
    with pytest.raises(ConfigError, match=r"a\.jpg 64x64 is damaged"):
        decoded(Attachments((picture_from_file(path),)))


@pytest.mark.parametrize(
    "body", [[], {}, {"messages": []}, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": 3}}]}]}]
)
def test_a_body_that_is_no_chat_is_answered(serving: own_gateway._Server, body: Any) -> None:
    reply = http("POST", f"http://127.0.0.1:{serving.server_port}{own_gateway.CHAT_PATH}", body, timeout_s=20)
    assert (reply.status, list(json.loads(reply.text))) == (400, ["error"])


def test_a_connection_on_which_nothing_comes_does_not_keep_it_from_ending(
    serving: own_gateway._Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopping = ChildProcess(["true"], log_path=tmp_path / "log", watched=False)
    assert own_gateway._Handler.timeout < stopping.stop_timeout_s
    monkeypatch.setattr(own_gateway._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", serving.server_port), timeout=20):
        assert settle(lambda: any(thread.name.endswith("(process_request_thread)") for thread in threading.enumerate()))
        closing = threading.Thread(target=serving.server_close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.fixture
def serving() -> Iterator[own_gateway._Server]:
    """Our gateway in this process, in front of nobody."""
    worker = WorkerSpec("grpc://127.0.0.1:1", engine="tokenspeed")
    with Sender(TransportConfig(mode="inline")) as sender, grpc.insecure_channel("127.0.0.1:1") as channel:
        server = own_gateway._Server(own_gateway.OwnGateway(FAMILIES[RECOMPUTED], worker, sender, channel, None))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_lease_has_only_numpy_to_vouch_for_it() -> None:
    tensor = {"path": "lease", "device": "cpu", "dtype": "uint8", "shape": [2], "device_sha256": "a"}
    tensor |= {"plain_sha256": None, "plain_error": None}
    assert checks._judge(tensor, ("uint8", (2,), "a"), "cpu") == ("numpy", "")
    assert "not those that numpy computes" in checks._judge(tensor, ("uint8", (2,), "b"), "cpu")[1]
    assert "nothing to compare it with" in checks._judge(tensor, None, "cpu")[1]


def test_what_a_sender_of_mmcopy_left_is_found_by_its_name(shm_dir: Path) -> None:
    leftovers = Leftovers(shm_dir)
    ours, others = "mmcopy-0123456789abcdef", "mmcopy-fedcba9876543210"
    names = [f"{ours}-7", f"{ours}.lock", f"{others}-1", f"{others}.lock"]
    for name in names:
        (shm_dir / name).touch()
    try:
        ids = sender_ids_of([f"{ours}-1", "smg-tokenspeed-1-2-3", base64.b64encode(b"x").decode()])
        assert ids == {"0123456789abcdef"}
        found = leftovers.found(gateway_pids=[], handed=[], sender_ids=ids)
        assert found == [Leftover(f"{ours}-7", 0), Leftover(f"{ours}.lock", 0)]
    finally:
        for name in names:
            (shm_dir / name).unlink()
