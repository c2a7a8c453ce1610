"""The command ``mmcopy demo`` itself: its numbers, its exit codes, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mmcopy.tools.cli import main
from mmcopy.tools.demo import job
from mmcopy.tools.demo.gateway import Gateway
from mmcopy.tools.demo.pictures import noise
from tests.rigs.waiting import settle


def made_by(pids: Iterable[int]) -> list[str]:
    """What gateways with these process ids have in shared memory; others work there at the same time."""
    prefixes = tuple(f"smg-tokenspeed-{pid}-" for pid in pids)
    return sorted(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes))


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gateway]]:
    """Every gateway that a run started. At the end none runs and none has left anything."""
    started: list[Gateway] = []

    class Recorded(Gateway):
        def start(self) -> None:
            started.append(self)
            super().start()

    monkeypatch.setattr(job, "Gateway", Recorded)
    yield started
    assert [gateway.running for gateway in started] == [False] * len(started)
    assert made_by(pid for gateway in started for pid in gateway.pids) == []


@pytest.fixture
def numpy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that need no torch, which takes longer to import than all the rest takes."""
    monkeypatch.setattr(job, "default_framework", lambda device: "numpy")


@pytest.fixture
def demo(
    numpy_workers: None, gateways: list[Gateway], capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Runs the command in this process: (exit code, its JSON line, what it wrote to stderr)."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main(["demo", "--json", *arguments])
        out, err = capfd.readouterr()
        assert out.count("\n") == (1 if out else 0), "with --json stdout has that line alone"
        return code, json.loads(out) if out else {}, err

    return run


def line(requests: int, inline: int, segment: int, **changes: Any) -> dict[str, Any]:
    good = {"requests": requests, "tensors": inline + segment, "mismatches": 0, "leftover_segments": 0, "device": "cpu"}
    return {**good, "paths": {"inline": inline, "segment": segment}, **changes}


# Requests 1 and 2 of the generated set have one picture and three. A picture has pixels and two side tensors; with pd
# and epd the side tensors go to both other legs, with vllm's pd image_grid_thw alone goes to decode.
@pytest.mark.gateway
@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--engine", "tokenspeed"], line(2, 8, 4)),
        (["--engine", "vllm"], line(2, 4, 2)),
        (["--topology", "pd"], line(2, 16, 4)),
        (["--topology", "epd"], line(2, 24, 4)),
        (["--engine", "vllm", "--topology", "pd"], line(2, 6, 2)),
        (["--transport", "inline"], line(2, 12, 0)),
        (["--transport", "auto", "--encoder-dtype", "float32"], line(2, 8, 4)),
        (["--transport", "auto", "--shm-namespace", "own"], line(2, 8, 4)),
        (["--transport", "auto", "--shm-namespace", "foreign"], line(2, 12, 0)),
        (["--transport", "auto", "--shm-namespace", "none"], line(2, 12, 0)),
        (["--transport", "shm", "--shm-namespace", "foreign"], line(2, 8, 4)),
        (["--transport", "auto", "--topology", "epd", "--shm-namespace", "foreign"], line(2, 28, 0)),
        (["--shm-min-bytes", "0"], line(2, 0, 12)),
        (["--family", "phi3_v", "--shm-min-bytes", "12000000"], line(2, 12, 0)),
        (["--family", "kimi_k25", "--requests", "4", "--concurrency", "4"], line(4, 12, 6)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_numbers(demo: Any, arguments: list[str], want: dict[str, Any]) -> None:
    if "--requests" not in arguments:
        arguments = [*arguments, "--requests", "2"]
    code, got, table = demo(*arguments)
    assert got == want
    assert code == 0
    assert "left in shared memory: nothing" in table
    assert f"{got['tensors']} of {got['tensors']} right" in table


@pytest.mark.gateway
def test_the_default_run_prints_the_table_with_the_photo(
    numpy_workers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    photo = next(row for row in out.splitlines() if "47376x1536" in row)
    assert re.fullmatch(
        r"item0\.encoder_input +bfloat16 +47376x1536 +segment +138\.8 MiB +[\d.]+ (ms|s) +numpy *", photo
    )
    assert "request 3: photo 4032x3008" in out
    assert "15 tensors in 3 requests: 5 by segment (149.0 MiB), 10 inline (160 B); received in" in out
    assert re.search(r"\d GB/s; 15 of 15 right", out.replace("\n", " "))
    assert "received as numpy arrays" in out
    assert out.endswith("left in shared memory: nothing\neverything arrived, and every byte is right\n")


@pytest.mark.gateway
def test_own_pictures(demo: Any, tmp_path: Path) -> None:
    from PIL import Image

    png, jpeg, odd = tmp_path / "a.png", tmp_path / "b.jpg", tmp_path / "odd [1].png"
    png.write_bytes(noise(96, 64).file)
    Image.new("RGB", (64, 64), (9, 99, 199)).save(jpeg)
    odd.write_bytes(noise(133, 77).file)
    code, got, table = demo("--image", str(png), str(jpeg), str(odd), "--requests", "2", "--shm-min-bytes", "60000")
    assert (code, got["requests"], got["tensors"], got["mismatches"]) == (0, 2, 18, 0)
    checks_seen = re.findall(r"item(\d)\.encoder_input .* (numpy|checksum)", table)
    assert checks_seen == [("0", "numpy"), ("1", "checksum"), ("2", "checksum")] * 2
    assert got["paths"] == {"inline": 14, "segment": 4}  # b.jpg is 16 patches of 3 KiB, the others 24 and 32


@pytest.mark.gateway
@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")
def test_a_video(demo: Any, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    source = ["-f", "lavfi", "-i", "testsrc=duration=2:size=320x240:rate=10", "-pix_fmt", "yuv420p"]
    subprocess.run(["ffmpeg", "-v", "error", *source, str(clip)], check=True, timeout=60)
    code, got, table = demo("--video", str(clip))
    assert (code, got["requests"], got["mismatches"]) == (0, 1, 0)
    assert "item0.video_grid_thw" in table


@pytest.mark.gateway
def test_a_wrong_byte_is_found(demo: Any, one_wrong_byte: None) -> None:
    code, got, table = demo("--requests", "1")
    assert (code, got) == (1, line(1, 2, 1, mismatches=1))
    assert "mismatch request 1, regular, item0.encoder_input: the bytes are not those that numpy computes" in table
    assert "2 of 3 right" in table
    assert table.endswith("this run failed\n")


@pytest.mark.gateway
def test_a_leftover_is_reported_and_removed(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(job.Gateway):  # type: ignore[misc, name-defined]
        def stop(self) -> int | None:
            Path("/dev/shm", f"smg-tokenspeed-{self.pid}-1-0").write_bytes(bytes(2048))
            return super().stop()  # type: ignore[no-any-return]

    monkeypatch.setattr(job, "Gateway", Leaking)
    code, got, table = demo("--requests", "1")
    assert (code, got) == (1, line(1, 2, 1, leftover_segments=1))
    assert re.search(
        r"left in shared memory 1 segments, 2 KiB \(removed now\):\n  smg-tokenspeed-\d+-1-0  2 KiB\n", table
    )


@pytest.mark.gateway
def test_a_request_that_fails_is_told(demo: Any, tmp_path: Path) -> None:
    from PIL import Image

    whole, cut = tmp_path / "whole.jpg", tmp_path / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(whole)
    cut.write_bytes(whole.read_bytes().partition(b"\xff\xda")[0])  # all headers, no scan
    code, got, table = demo("--image", str(cut))
    assert (code, got) == (1, line(1, 0, 0))
    assert "failure request 1 failed: status 400:" in table


@pytest.mark.gateway
def test_legs_that_share_a_segment_are_explained(demo: Any) -> None:
    code, got, table = demo("--topology", "epd", "--shm-min-bytes", "0", "--requests", "1")
    assert code == 1
    assert got["mismatches"] == 0
    assert "SegmentNotFoundError" in table
    assert "note with pd and epd SMG gives both legs the same segment" in table


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--engine", "vllm", "--topology", "epd"], "epd needs engine tokenspeed"),
        (["--encoder-dtype", "uint8"], "uint8 needs engine vllm"),
        (["--image", "/nonexistent.png"], "/nonexistent.png: No such file"),
        (["--image", __file__], "neither a PNG nor a JPEG"),
        (["--video", "clip.mp4", "--family", "llava"], "the family llava takes no video"),
        (["--device", "cuda:99", "--requests", "1"], "the regular worker did not start: .*cuda:99"),
        (["--device", "gpu"], "the regular worker did not start: device is 'gpu'"),
    ],
)
def test_what_cannot_run_is_told_in_a_line(
    capfd: pytest.CaptureFixture[str], gateways: list[Gateway], arguments: list[str], why: str
) -> None:
    assert main(["demo", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(f"mmcopy demo: .*{why}.*\n", err)
    assert gateways == []


def test_no_ffmpeg_and_no_smg(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["demo", "--video", "clip.mp4"]) == 2
    assert "--video needs ffmpeg on PATH" in capfd.readouterr().err
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nonexistent")
    assert main(["demo"]) == 2
    assert "the SMG gateway (command smg) was found neither" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "required: COMMAND"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["demo", "--family", "pixtral"], "invalid choice: 'pixtral'"),
        (["demo", "--requests", "0"], "--requests: the value is '0', want a whole number, 1 or more"),
        (["demo", "--concurrency", "two"], "--concurrency: the value is 'two', want a whole number"),
        (["demo", "--shm-min-bytes", "-1"], "--shm-min-bytes: the value is '-1', want a number of bytes"),
        (["demo", "--transport", "rdma"], "invalid choice: 'rdma'"),
        (["demo", "--shm-namespace", "theirs"], "invalid choice: 'theirs'"),
        (["demo", "--image"], "expected at least one argument"),
    ],
)
def test_bad_options(capfd: pytest.CaptureFixture[str], arguments: list[str], why: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert why in capfd.readouterr().err


def test_help_needs_numpy_alone() -> None:
    code = (
        "import sys; from mmcopy.tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'grpc', 'google', 'smg', 'PIL', 'rich', 'tokenizers'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"^    demo +send pictures", done.stdout, re.MULTILINE)
    assert re.search(r"^    doctor +check this machine", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- Ctrl-C ----------------------------------------------------------------


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def is_gateway(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("smg") or "launch" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.gateway
@pytest.mark.parametrize(
    ("moment", "whole_group", "number"),
    [
        ("worker", True, signal.SIGINT),
        ("gateway", False, signal.SIGINT),
        ("segment", False, signal.SIGINT),
        ("segment", True, signal.SIGINT),
        ("segment", False, signal.SIGTERM),
    ],
)
def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, moment: str, whole_group: bool, number: signal.Signals
) -> None:
    """``moment``: the signal comes as soon as this is there."""
    code = (
        "import sys; from mmcopy.tools.cli import main; from mmcopy.tools.demo import job\n"
        "job.default_framework = lambda device: 'numpy'\n"
        "sys.exit(main(['demo', '--requests', '40']))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as run:
        seen: dict[int, psutil.Process] = {}
        gateway_pids: set[int] = set()

        def reached() -> bool:
            for each in descendants(run):
                seen[each.pid] = each
                if is_gateway(each):
                    gateway_pids.add(each.pid)
            return bool({"worker": seen, "gateway": gateway_pids}.get(moment) or made_by(gateway_pids))

        deadline = time.monotonic() + 60
        while not reached():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, f"{moment} was not reached"
        (os.killpg if whole_group else os.kill)(run.pid, number)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert out == ""
    assert err == f"mmcopy demo: stopped by {number.name}\n"
    assert settle(lambda: not any(each.is_running() and each.status() != "zombie" for each in seen.values()))
    assert made_by(gateway_pids) == []
    assert list(tmp_path.iterdir()) == []
