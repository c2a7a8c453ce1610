"""A gateway in Rust, built from examples/, and a worker in Python."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from mmcopy import _native
from tests.rigs.arena_rig import LIMIT_S, Worker
from tests.rigs.waiting import settle

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.usefixtures("nothing_left_open"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo"),
    pytest.mark.timeout(600),  # the first build
]


@pytest.fixture(scope="module")
def sender() -> pathlib.Path:
    """The example's executable."""
    subprocess.run(["cargo", "build", "--quiet", "--example", "arena_sender"], cwd=ROOT, check=True, timeout=590)
    done = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return pathlib.Path(json.loads(done.stdout)["target_directory"]) / "debug" / "examples" / "arena_sender"


def test_a_rust_gateway_and_a_python_worker(sender: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Worker(tmp_path / "run") as worker:
        process = subprocess.Popen([sender, worker.path, "4"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for number in range(4):
            name, offset, nbytes, owner_id = process.stdout.readline().split()
            got = worker.receive((name, int(offset), int(nbytes), owner_id))
            at = np.arange(100_000 * (number + 1))
            pixels = ((at * (number + 3)) % 251).astype(np.float32) / np.float32(250)
            wanted = bytearray(pixels.nbytes // 2)
            _native.cast_into(pixels, "float32", wanted, "bfloat16")
            assert got == wanted
        output, _ = process.communicate(timeout=LIMIT_S + 30)
        assert (output, process.returncode) == ("released 4\n", 0)
        assert settle(lambda: worker.endpoint.statistics()["links"] == 0)


def test_a_rust_gateway_without_a_worker(sender: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sender, str(tmp_path / "missing")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "NobodyListens" in done.stderr
