"""Programs that run as users of their own, in a directory that all of them may write to."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

__all__ = ["OURS", "THEIRS", "as_user", "open_to_all", "start_as"]

OURS, THEIRS = 61_234, 61_235
"""Two users besides root. The kernel asks for no name."""

_AS_USER = """
import os, pathlib, resource, sys, time
import numpy as np
import mmcopy
from mmcopy import _native, endpoint, errors, fanout
from mmcopy.endpoint import SenderLink, WorkerEndpoint
folder = pathlib.Path(sys.argv[2])
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
"""


@pytest.fixture
def open_to_all() -> Iterator[pathlib.Path]:
    """An empty directory like /dev/shm: all may write, and remove only what is their own (mode 1777)."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-test-", dir="/tmp") as name:
        path = pathlib.Path(name)
        path.chmod(0o1777)
        yield path


def start_as(uid: int, folder: pathlib.Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python program with ``folder`` and ``arguments`` (from ``sys.argv[3]`` on), as this user. It has the names of
    the package at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", _AS_USER + program, str(uid), str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": "/"},
    )


def as_user(uid: int, folder: pathlib.Path, program: str, *arguments: str) -> str:
    """What it prints, once it has ended well."""
    process = start_as(uid, folder, program, *arguments)
    answer, problem = process.communicate(timeout=60)
    assert process.returncode == 0, problem
    return answer.strip()
