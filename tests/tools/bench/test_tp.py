"""``mmcopy bench tp`` as a user runs it, on two ranks of the CPU, and the pure part that gives the advice."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from mmcopy import ParallelOptions
from mmcopy.tools.bench.breakeven import NEVER, BreakEven, find_break_even
from mmcopy.tools.bench.plan import Effort
from mmcopy.tools.bench.tp import TpSpec
from mmcopy.tools.cli import main
from tests.rigs.arrays import MIB

Added = Callable[[], list[str]]
PATHS = ["one rank alone", "each", "broadcast", "scatter"]
SMALL = ["bench", "tp", "--sizes", "64KiB,5000", "--repeats", "2"]


def check_result(result: dict[str, Any]) -> None:
    assert result["ranks"] == 2
    assert [(row["path"], row["nbytes"]) for row in result["rows"]] == [(p, n) for n in (5000, 65536) for p in PATHS]
    for row in result["rows"]:
        one = next(r for r in result["rows"] if (r["path"], r["nbytes"]) == (PATHS[0], row["nbytes"]))
        assert row["gbps"] == pytest.approx(row["nbytes"] / row["median_s"] / 1e9)
        assert row["of_one"] == pytest.approx(one["median_s"] / row["median_s"])
    for name in ("broadcast", "scatter"):
        nbytes = result[f"{name}_from_bytes"]
        assert result["settings"][f"{name}_min_bytes"] == (NEVER if nbytes is None else 2 * nbytes)


def test_ranks_of_its_own(capsys: pytest.CaptureFixture[str], segments: Added, nothing_left_open: None) -> None:
    assert main([*SMALL, "--ranks", "2", "--json"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    check_result(json.loads(told.out))
    assert re.search(r"^2 ranks; host memory \(cpu\); ", told.err)
    assert re.search(r"^ +scatter +[\d.]+ (us|ms) ", told.err, re.MULTILINE)
    assert "use ParallelOptions(broadcast_min_bytes=" in told.err
    assert segments() == []


def test_leases_of_ranks_that_all_have_the_arena(
    capsys: pytest.CaptureFixture[str], segments: Added, nothing_left_open: None
) -> None:
    assert main([*SMALL, "--ranks", "2", "--payload", "lease", "--json"]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["payload"] == "lease"
    check_result(result)
    assert "Leases are written before." in told.err
    assert segments() == []


def test_ranks_that_torchrun_has_started(segments: Added) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mmcopy", *SMALL,
         "--json"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    check_result(json.loads(line))
    assert segments() == []


@pytest.mark.parametrize("payload", ["segment", "lease"])
def test_a_signal_ends_all_ranks_and_leaves_nothing(
    segments: Added, tmp_path_factory: pytest.TempPathFactory, payload: str
) -> None:
    folder = tmp_path_factory.mktemp("t")  # a short path, for sockets
    command = [sys.executable, "-m", "mmcopy", "bench", "tp", "--sizes", "1MiB", "--seconds", "3000"]
    command += ["--payload", payload]
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)}
    )
    try:
        assert child.stderr is not None
        assert child.stderr.readline().startswith(b"2 ranks; ")
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 128 + signal.SIGINT, errors
    assert b"stopped by SIGINT" in errors
    assert list(folder.iterdir()) == []
    assert segments() == []


def test_wrong_bytes_on_one_rank_end_the_benchmark(segments: Added, tmp_path: pathlib.Path) -> None:
    script = """
    import sys
    import mmcopy.receive.receiver
    from mmcopy.tools.bench.ranks import main
    receive = mmcopy.receive.receiver.Receiver.receive
    def spoiled(self, items, **options):
        tensors = receive(self, items, **options)
        tensors[0][7] ^= 1
        return tensors
    if sys.argv[2] == "1":
        mmcopy.receive.receiver.Receiver.receive = spoiled
    sys.exit(main(sys.argv[1:]))
    """
    spec = json.dumps(asdict(TpSpec((5000,), effort=Effort(repeats=1))))
    given = [spec, str(tmp_path / "result")]
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(n), "2", *given], stderr=subprocess.PIPE, text=True) for n in range(2)]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 1]
    assert "rank 0: rank 1 of the benchmark: BytesDifferError: each, 4.9 KiB: 1 of 5000 bytes" in errors[0]
    assert "the first is byte 7" in errors[1]
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sizes", "none"], "nothing to measure"),
        (["--device", "cuda:0"], "want 'cpu', or 'cuda': rank r takes cuda:r"),
        (["--device", "cuda", "--ranks", "99"], "99 ranks need as many GPUs"),
        (["--sizes", "9999999GiB", "--repeats", "1"], "/dev/shm has"),
    ],
)
def test_what_cannot_run_is_told_clearly(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], segments: Added
) -> None:
    assert main(["bench", "tp", *options]) == 2
    assert told in capsys.readouterr().err


def test_what_is_too_large_to_be_made_is_no_wrong_bytes(capfd: pytest.CaptureFixture[str], segments: Added) -> None:
    """Exit code 2: 1 would say that bytes were wrong."""
    assert main(["bench", "tp", "--payload", "lease", "--sizes", "100000GiB", "--repeats", "1"]) == 2
    assert "Unable to allocate 97.7 TiB" in capfd.readouterr().err
    assert segments() == []


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "2"}, "RANK expected, but not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', want a whole number"),
    ],
)
def test_a_launcher_that_is_none(
    environment: dict[str, str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(SMALL) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("each", "broadcast", "scatter", "found"),
    [
        ([1, 2, 3, 4], [2, 3, 4, 5], [2, 3, 4, 5], (None, None)),
        ([1, 2, 3, 4], [2, 1, 1, 3], [9, 9, 9, 9], (2 * MIB, None)),
        ([1, 2, 3, 4], [2, 1, 2, 3], [9, 9, 1, 1], (2 * MIB, 3 * MIB)),
        ([1, 2, 3, 4], [2, 3, 2, 3], [9, 1, 1, 1], (None, 2 * MIB)),
        ([1, 2, 3, 4], [0.5, 3, 1, 1], [9, 9, 9, 9], (3 * MIB, None)),  # better at the smallest by accident
        ([1, 2, 3, 4], [1, 2, 2.95, 3.9], [1, 2, 2.95, 3.9], (None, None)),  # not worth it
        ([4, 4, 4, 4], [1, 1, 1, 1], [2, 2, 2, 2], (MIB, None)),
    ],
)
def test_the_break_even_points(
    each: list[float], broadcast: list[float], scatter: list[float], found: tuple[int | None, int | None]
) -> None:
    seconds = {
        name: {(n + 1) * MIB: value for n, value in enumerate(values)}
        for name, values in (("each", each), ("broadcast", broadcast), ("scatter", scatter))
    }
    assert find_break_even(4, seconds) == BreakEven(4, *found)


def test_the_advice_is_what_a_receiver_takes() -> None:
    point = BreakEven(4, 16 * MIB, None)
    assert point.options == ParallelOptions(broadcast_min_bytes=64 * MIB, scatter_min_bytes=NEVER)
    assert point.advice.splitlines() == [
        "fastest with 4 ranks: each, broadcast from 16 MiB on, scatter at no size.",
        f"use ParallelOptions(broadcast_min_bytes={64 * MIB}, scatter_min_bytes={NEVER})  "
        "# for the whole group: divided by its size",
    ]
