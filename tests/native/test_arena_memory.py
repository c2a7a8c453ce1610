"""An arena in a control group that has less memory: a clean refusal, and nobody is killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.root

LIMIT_BYTES = 256 << 20

SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from mmcopy import _native
from mmcopy.errors import ArenaMemoryError
try:
    _native.Arena(512 << 20)
except ArenaMemoryError as error:
    print(error)
arena = _native.Arena(64 << 20, num_threads=2)
print(arena.data_nbytes)
"""


@pytest.fixture
def group() -> Iterator[pathlib.Path]:
    """A control group of our own with a limit on memory, in whichever version the machine has."""
    name = f"mmcopy-test-{os.getpid()}"
    places = (
        (pathlib.Path("/sys/fs/cgroup"), "memory.max"),
        (pathlib.Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    )
    for parent, limit in places:
        path = parent / name
        try:
            path.mkdir()
        except OSError:
            continue
        if not (path / limit).exists():  # a plain directory, or a group without that controller
            path.rmdir()
            continue
        (path / limit).write_text(str(LIMIT_BYTES))
        yield path
        path.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


def test_more_than_the_group_has_is_refused_with_the_numbers(group: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(group)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    refusal, nbytes = done.stdout.splitlines()
    assert f"an arena of {(512 << 20) + (8192 * 128) + 4096} bytes is refused" in refusal
    assert f"{LIMIT_BYTES} of {group}" in refusal
    assert int(nbytes) == 64 << 20
