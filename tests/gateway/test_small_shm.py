"""The gateway in an 8 MiB /dev/shm: pixels that do not fit come inline, and are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.private_shm import private_shm

pytestmark = [pytest.mark.gateway, pytest.mark.root]

ROOT = Path(__file__).parents[2]
PRIVATE_SHM = private_shm()


@pytest.fixture(scope="module", autouse=True)
def _may_mount() -> None:
    try:
        tried = subprocess.run([*PRIVATE_SHM, "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if tried.returncode != 0:
        pytest.skip(f"may not mount a tmpfs of its own: {tried.stderr.strip()}")


@pytest.mark.parametrize(("engine", "pixels"), [("tokenspeed", "item0.encoder_input"), ("vllm", "item0.pixel_values")])
def test_pixels_larger_than_dev_shm_come_inline(tmp_path: Path, model_dir: Path, engine: str, pixels: str) -> None:
    directory = tmp_path / "stack"
    directory.mkdir()
    command = [*PRIVATE_SHM, sys.executable, "-W", "error", "-m", "tests.rigs.gateway_small_shm"]
    done = subprocess.run(
        [*command, str(directory), str(model_dir), engine],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    large, small = result["requests"]
    sides = ["item0.image_grid_thw", "item0.patches_per_image"]
    answered = {"status": 200, "content": "seen", "equal": True, "left": []}
    assert result["size"] == 8 << 20
    assert large == {**answered, "paths": {"inline": sorted([pixels, *sides])}}
    assert small == {**answered, "paths": {"segment": [pixels], "inline": sides}}
    assert sum(result["failures"].values()) >= 1, "the gateway never tried shared memory"
