"""``benches/calls.py`` where there is no GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from mmcopy.tools.doctor.gpu import find_gpus

SCRIPT = pathlib.Path(__file__).parents[2] / "benches" / "calls.py"


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:0", "benches/calls.py needs one NVIDIA GPU: "), ("cpu", "--device is 'cpu', want cuda:N")],
)
def test_without_a_gpu_it_says_so_and_exits_with_2(device: str, said: str) -> None:
    if device != "cpu" and find_gpus().gpus:
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPT), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
