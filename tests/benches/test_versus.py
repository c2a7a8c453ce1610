"""``benches/versus.py``: this version of mmcopy against itself, on the CPU."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]


def test_both_versions_are_timed_on_every_path(segments: Callable[[], list[str]]) -> None:
    site = str(ROOT / "python")
    works = ["1 x 64 KiB", "1 x 1 MiB"]
    command = [sys.executable, str(ROOT / "benches" / "versus.py"), site, site, "--device", "cpu", "--rounds", "1"]
    done = subprocess.run([*command, "--works", *works], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    figure = r"\d+\.\d, \d+\.\d"
    ratio = r"\d+\.\d\d"
    rows = [line.split(" | ") for line in done.stdout.splitlines() if re.match(r"\| \d", line)]
    assert [cells[0].strip("| ") for cells in rows] == [
        "1 x 64 KiB, lease, send",
        "1 x 64 KiB, lease, receive",
        "1 x 64 KiB, segment, send",
        "1 x 64 KiB, segment, receive",
        "1 x 1 MiB, lease, send",
        "1 x 1 MiB, lease, receive",
        "1 x 1 MiB, segment, send",
        "1 x 1 MiB, segment, receive",
        "1 x 1 MiB, streamed, both",
    ]
    for cells in rows:
        assert re.fullmatch(figure, cells[1])
        assert re.fullmatch(figure, cells[2])
        assert re.fullmatch(ratio, cells[3])
        assert re.fullmatch(rf"{ratio} \({ratio} to {ratio}\)", cells[4])


def test_a_version_that_does_not_run_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mmcopy").mkdir()
    (tmp_path / "mmcopy" / "__init__.py").write_text("raise ImportError('no such version')\n")
    command = [sys.executable, str(ROOT / "benches" / "versus.py"), str(tmp_path), str(tmp_path), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}: exit code 1" in done.stderr
    assert "no such version" in done.stderr
