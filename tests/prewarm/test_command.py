"""``mmcopy prewarm`` as users call it, at sizes that a CPU encodes at once."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mmcopy.errors import ConfigError
from mmcopy.tools.bench.encoder import Bench, Spec, measure_cold, measure_warm
from mmcopy.tools.bench.encoder_table import as_markdown, encoder_table
from mmcopy.tools.cli import main
from mmcopy.tools.cli.prewarm import parse
from tests.rigs.encoder_models import build
from tests.rigs.waiting import settle


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("qwen3_vl")
    (directory / "config.json").write_text(build("qwen3_vl").config.to_json_string(use_diff=False))
    return directory


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmcopy", "prewarm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def test_a_table_of_cold_prewarm_and_first_after(model_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = call(
        "--model", model_dir, "--compile", "blocks", "--backend", "eager", "--image", "32x32", "24x16",
        "--modalities", "image", "--check-image", "16x24", "16x16+16x24", "--rounds", "3", "--json", "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    cold, warm = result["cold"], result["warm"]
    assert [row["shape"] for row in cold["rows"]] == ["image 32x32"]
    assert cold["rows"][0]["graphs"] > 0
    assert [(row["shape"], row["warmed"]) for row in warm["rows"]] == [
        ("image 32x32", True), ("image 24x16", True), ("image 16x24", False), ("image 16x16 + 16x24", False),
    ]  # fmt: skip
    for row in warm["rows"]:
        assert row["first_s"] > 0
        assert row["steady_s"] > 0
        assert row["steady_iqr_s"] >= 0
        assert row["ratio"] == row["first_s"] / row["steady_s"]
        assert row["forecast_plans"] is False, "a CPU has no cuDNN"
        assert row["forecast_compiles"] or row["graphs"] == 0
    assert [row["forecast_compiles"] for row in warm["rows"]] == [False, False, False, True]
    assert warm["report"]["status"] == "warm"
    assert warm["report"]["compiled"]
    assert warm["report"]["graphs"] > 0
    assert warm["about"]["weights"] == "random"
    assert json.loads((tmp_path / "prewarm.json").read_text()) == result
    markdown = (tmp_path / "prewarm.md").read_text()
    assert markdown == as_markdown(warm, cold)
    assert "| image 16x24 | - | not used | " in markdown
    assert "first after" in done.stderr
    assert "attention sdpa (cuDNN's not taken), transformers " in markdown
    for compiles, plans, cell in ((True, True, "compiles, plans"), (False, True, "plans"), (False, None, "-")):
        warm["rows"][0] |= {"forecast_compiles": compiles, "forecast_plans": plans}
        assert encoder_table(warm, cold).rows[0][-1] == cell
    assert len(encoder_table(warm, None).columns) == len(encoder_table(warm, cold).columns) - 1


def test_a_modality_without_inputs_is_left_out_as_the_prewarm_leaves_it_out(tmp_path: pathlib.Path) -> None:
    """Gemma 4 has an encoder for sound, and its family no inputs for it."""
    import transformers

    config = build("gemma4").config
    config.audio_config = transformers.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    spec = Spec(model=str(tmp_path), sizes={"image": [[[48, 48]]], "video": [[[1, 48, 48]]]}, rounds=1, dtype="float32")
    assert "audio" in Bench(spec).dtypes
    assert [row["shape"].split()[0] for row in measure_cold(spec)["rows"]] == ["image", "video"]
    warm = measure_warm(spec)
    assert warm["report"]["status"] == "warm"
    assert "audio is not warmed: Gemma4 has no inputs for it" in warm["report"]["warnings"]


@pytest.mark.parametrize("modality", ["audio", "smell"])
def test_a_modality_that_is_not_encoded_is_named(model_dir: pathlib.Path, modality: str) -> None:
    bench = Bench(Spec(model=str(model_dir), dtype="float32"))
    says = (
        f"qwen3_vl cannot be measured with {modality}: it has encoders for image, video, QwenVl inputs for image, video"
    )
    for items in (None, [[100]]):
        with pytest.raises(ConfigError, match=says):
            bench.shape(modality, items)


def test_an_incomplete_prewarm_is_exit_code_1(model_dir: pathlib.Path) -> None:
    """65,536 patches of attention do not end within the deadline, and what still runs does not spoil the exit."""
    done = call(
        "--model", model_dir, "--no-cold", "--no-cudnn-attention", "--image", "2048x2048", "--deadline-s", "0.05",
        "--rounds", "1",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "prewarm: incomplete, " in done.stdout
    assert "the deadline, in " in done.stdout
    assert "(cuDNN's off)" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_files(model_dir: pathlib.Path, tmp_path: pathlib.Path, number: int) -> None:
    command = [
        sys.executable,
        "-m",
        "mmcopy",
        "prewarm",
        "--model",
        str(model_dir),
        "--no-cold",
        "--image",
        "2048x2048",
    ]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as us:
        try:
            children = pathlib.Path(f"/proc/{us.pid}/task/{us.pid}/children")
            assert settle(lambda: bool(children.read_text()), limit_s=60)
            child = os.pidfd_open(int(children.read_text()))
            try:
                us.send_signal(number)
                assert us.wait(60) == 128 + number
                assert select.select([child], [], [], 0)[0], "the measuring process has ended"
            finally:
                os.close(child)
        finally:
            us.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_decode_worker_has_nothing_to_measure(model_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prewarm", "--model", str(model_dir), "--role", "decode"]) == 0
    assert capsys.readouterr().out == "prewarm of decode: skipped, a decode worker encodes nothing\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/nowhere"], "/nowhere is no model's config: FileNotFoundError"),
        (["--device", "cuda"], "give the index, for example 'cuda:0'"),
        (["--device", "cuda:99"], "device is 'cuda:99', this machine has"),
        (["--role", "prefil"], "did you mean 'prefill'"),
        (["--image", "1024"], "image size (1024,): want (height, width)"),
        (["--video", "axbxc"], "--video 'axbxc': want sizes such as 1024x1024"),
    ],
)
def test_bad_calls(
    model_dir: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    model = [] if "--model" in arguments else ["--model", str(model_dir)]
    assert main(["prewarm", *model, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("mmcopy prewarm: ")
    assert says in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "0"], "argument --rounds: the value is '0', want a whole number, 1 or more"),
        (["--max-pixels", "-4"], "argument --max-pixels: the value is '-4'"),
        (["--recompile-limit", "0"], "argument --recompile-limit: the value is '0'"),
        (["--deadline-s", "0"], "argument --deadline-s: the value is '0'"),
    ],
)
def test_bad_numbers(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prewarm", "--model", "/nowhere", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""


def test_sizes_as_they_are_typed() -> None:
    assert parse("image", ["1024x1024", "512x512+512x768"]) == [[[1024, 1024]], [[512, 512], [512, 768]]]
    assert parse("video", ["8x448x448"]) == [[[8, 448, 448]]]
    assert parse("audio", ["3000"]) == [[[3000]]]
    with pytest.raises(ConfigError):
        parse("image", ["8x0"])
