"""``benches/writers.py``, small."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benches" / "writers.py"


def test_every_number_of_threads_is_timed_alone_and_behind_torch(segments: Callable[[], list[str]]) -> None:
    pytest.importorskip("torch")
    options = ["--threads", "1,3", "--count", "2", "--nbytes", "100000", "--rounds", "2"]
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [cells[0] for cells in rows[2:]] == ["1 threads", "3 threads", "default", "torch"]
    for cells in rows[2:]:
        assert len(cells) == 5
        assert all(re.fullmatch(r"[\d.]+ (us|ms|s), [\d.]+ (us|ms|s)", cell) for cell in (cells[1], cells[3]))
        assert all(re.fullmatch(r"\d+\.\d", cell) for cell in (cells[2], cells[4]))
