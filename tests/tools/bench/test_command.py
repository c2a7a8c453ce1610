"""``mmcopy bench h2d`` and ``mmcopy bench copy`` as a user runs them: small, on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import mmcopy.tools.bench.h2d
from mmcopy.tools.bench.paths import Path, Role
from mmcopy.tools.bench.sweep import Setting, SweepRow, advice, best_setting
from mmcopy.tools.cli import main

Added = Callable[[], list[str]]
PATHS = ["memcpy", "lease", "segment", "shared_memory_staged", "inline"]
SMALL = ["bench", "h2d", "--sizes", "4KiB,64KiB", "--batches", "3x4KiB", "--repeats", "3"]


def check_records(records: list[dict[str, Any]], paths: list[str], cases: list[tuple[int, int]]) -> None:
    limit, baselines = paths[0], paths[3:]
    keys = {"path", "nbytes", "count", "median_s", "iqr_s", "gbps", "of_limit", "versus"}
    assert [set(record) for record in records] == [keys] * len(records)
    assert [(r["path"], r["nbytes"], r["count"]) for r in records] == [(p, *case) for case in cases for p in paths]
    for case in cases:
        rows = {r["path"]: r for r in records if (r["nbytes"], r["count"]) == case}
        best = max(rows[name]["gbps"] for name in baselines)
        for row in rows.values():
            assert row["gbps"] == pytest.approx(case[0] * case[1] / row["median_s"] / 1e9)
            assert row["of_limit"] == pytest.approx(row["gbps"] / rows[limit]["gbps"])
            assert row["versus"] == pytest.approx(row["gbps"] / best)
            assert row["iqr_s"] >= 0


def test_without_baselines_nothing_is_compared_with_them(capsys: pytest.CaptureFixture[str], segments: Added) -> None:
    assert main([*SMALL, "--no-baselines", "--json"]) == 0
    captured = capsys.readouterr()
    records = json.loads(captured.out.splitlines()[-1])
    assert [record["path"] for record in records] == PATHS[:3] * 3
    assert {record["versus"] for record in records} == {None}
    assert "staged" not in captured.err
    assert segments() == []


def test_json_is_the_last_line_and_agrees_with_itself(
    capsys: pytest.CaptureFixture[str], segments: Added, nothing_left_open: None
) -> None:
    assert main([*SMALL, "--json"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    check_records(json.loads(told.out), PATHS, [(4096, 1), (65536, 1), (4096, 3)])
    assert re.search(r"^3 x 4 KiB +memcpy +[\d.]+ (us|ms) ", told.err, re.MULTILINE)
    assert segments() == []


def test_the_table_tells_units_machine_and_date(capsys: pytest.CaptureFixture[str], segments: Added) -> None:
    assert main([*SMALL, "--threads", "1"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert re.match(r"host memory \(cpu\); \d+ cores of .*; Linux .*mmcopy \S+, Python .*; \d{4}-\d\d-\d\d", lines[0])
    assert lines[2].split("  ")[0] == "tensors"
    assert [title in lines[2] for title in ("median", "IQR", "GB/s", "of limit", "versus")] == [True] * 5
    assert len(re.findall(r"^ +segment +[\d.]+ (?:us|ms) ", told.out, re.MULTILINE)) == 3
    assert "GB/s is 1e9 bytes a second" in told.out
    assert "limit of a batch is one contiguous copy" in told.out
    assert "\x1b" not in told.out


def test_a_path_that_corrupts_makes_the_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, segments: Added
) -> None:
    real = mmcopy.tools.bench.h2d.h2d_paths

    def with_a_broken_one(load: Any, *others: Any, **options: Any) -> list[Path]:
        paths = real(load, *others, **options)
        ours = next(path for path in paths if path.role is Role.OURS)

        def receive(sent: Any) -> list[Any]:
            arrays = list(ours.receive(sent))
            arrays[-1][7] ^= 1
            return arrays

        return [*paths, Path("broken", Role.BASELINE, ours.publish, receive, ours.settle, ours.cancel)]

    monkeypatch.setattr(mmcopy.tools.bench.h2d, "h2d_paths", with_a_broken_one)
    assert main([*SMALL, "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "broken, 4 KiB: 1 of 4096 bytes of tensor 0 differ; the first is byte 7" in told.err
    assert segments() == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["h2d", "--sizes", "64KB"], "--sizes: the value is '64KB', want a number of bytes, 1 or more"),
        (["h2d", "--batches", "64KiB"], "--batches: the value is '64KiB', want COUNTxSIZE"),
        (["h2d", "--threads", "0"], "--threads: the value is '0', want a whole number, 1 or more"),
        (["h2d", "--threads", "1,2"], "--threads: the value is '1,2', want a whole number"),
        (["h2d", "--seconds", "nan"], "--seconds: the value is 'nan', want seconds, more than 0"),
        (["h2d", "--seconds", "1", "--repeats", "1"], "not allowed with"),
        (["copy", "--slots", "big"], "--slots: the value is 'big', want a number of bytes"),
        ([], "BENCHMARK"),
    ],
)
def test_a_bad_call_is_told_clearly(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *options])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["h2d", "--sizes", "none", "--batches", "none"], "nothing to measure"),
        (["copy", "--sizes", "none"], "nothing to measure"),
        (["h2d", "--sizes", "9999999GiB"], "/dev/shm has"),
        (["h2d", "--device", "gpu"], "want 'cpu' or 'cuda:N'"),
    ],
)
def test_what_cannot_run_is_told_clearly(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], segments: Added
) -> None:
    assert main(["bench", *options]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("mmcopy bench: ")
    assert told in stderr


def test_copy_tries_every_setting_and_names_the_best(capsys: pytest.CaptureFixture[str], segments: Added) -> None:
    assert main(["bench", "copy", "--sizes", "4KiB,64KiB", "--threads", "1,2", "--repeats", "2", "--json"]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert [(r["num_threads"], r["slot_bytes"], r["nbytes"]) for r in result["rows"]] == [
        (1, None, 4096), (2, None, 4096), (1, None, 65536), (2, None, 65536)
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["gbps"] == pytest.approx(row["nbytes"] / row["median_s"] / 1e9)
    assert result["best"]["num_threads"] in (1, 2)
    assert f"best here: use Receiver(num_threads={result['best']['num_threads']})\n" in told.err
    assert segments() == []


def rows(speeds: dict[tuple[int, int], tuple[float, float]]) -> list[SweepRow]:
    return [
        SweepRow(threads, slot, nbytes, nbytes / gbps / 1e9, 0.0, gbps)
        for (threads, slot), pair in speeds.items()
        for nbytes, gbps in zip((1000, 2000), pair, strict=True)
    ]


def test_the_best_setting_is_best_over_all_sizes_with_no_thread_too_many() -> None:
    mib = 1 << 20
    assert best_setting(rows({(1, mib): (1.0, 1.0), (4, mib): (2.0, 8.0), (8, mib): (9.0, 1.0)})) == Setting(4, mib)
    near = rows({(2, mib): (9.8, 9.8), (4, mib): (10.0, 10.0), (2, 2 * mib): (9.9, 9.9)})
    assert best_setting(near) == Setting(2, 2 * mib)
    assert (
        advice(Setting(2, 2 * mib))
        == "use Receiver(num_threads=2, staging=StagingOptions(slot_bytes=2097152))  # slots of 2 MiB"
    )


def test_it_needs_numpy_alone(segments: Added) -> None:
    script = """
    import sys
    for name in ("torch", "cupy", "rich", "matplotlib"):
        sys.modules[name] = None
    from mmcopy.tools.cli import main
    sys.exit(main(["bench", "h2d", "--sizes", "4KiB", "--batches", "none", "--repeats", "1", "--json"]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_records(json.loads(done.stdout), PATHS, [(4096, 1)])


def test_ctrl_c_ends_it_with_nothing_left(segments: Added) -> None:
    command = [sys.executable, "-m", "mmcopy", "bench", "h2d", "--sizes", "1MiB", "--seconds", "100"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("host memory")  # measuring begins
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert out == ""
    assert "stopped by SIGINT" in err
    assert segments() == []


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--threads", "4"]])
def test_on_a_gpu_every_path_is_right_and_in_the_output(
    options: list[str], capsys: pytest.CaptureFixture[str], segments: Added
) -> None:
    sizes = ["--sizes", "64KiB,1MiB,4097", "--batches", "5x1MiB", "--repeats", "2", "--device", "cuda:0"]
    assert main(["bench", "h2d", *sizes, *options, "--json"]) == 0
    told = capsys.readouterr()
    paths = ["pinned_h2d", "lease", "segment", "shared_memory_staged", "pageable", "inline"]
    check_records(json.loads(told.out), paths, [(65536, 1), (1 << 20, 1), (4097, 1), (1 << 20, 5)])
    assert "(cuda:0); driver " in told.err
    assert segments() == []


@pytest.mark.gpu
def test_on_a_gpu_copy_tries_threads_and_slots(capsys: pytest.CaptureFixture[str], segments: Added) -> None:
    options = ["--sizes", "1MiB,4MiB", "--threads", "1,4", "--slots", "1MiB,2MiB", "--repeats", "2"]
    assert main(["bench", "copy", *options, "--device", "cuda:0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    settings = {(row["num_threads"], row["slot_bytes"]) for row in result["rows"]}
    assert settings == {(threads, slot << 20) for threads in (1, 4) for slot in (1, 2)}
    assert (result["best"]["num_threads"], result["best"]["slot_bytes"]) in settings
    assert segments() == []
