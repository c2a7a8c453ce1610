"""Fixtures that every test may use: what is left in shared memory, in descriptors and in threads."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.rigs.descriptors import open_descriptors

from .rigs.shared_memory import shared_files
from .rigs.waiting import settle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing_gpu = _why_no_gpu() if any(item.get_closest_marker("gpu") for item in items) else None
    for item in items:
        if missing_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing_gpu))
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "cupy is not installed"
    return None


@pytest.fixture
def segments() -> Iterator[Callable[[], list[str]]]:
    """A function that lists what this test has added to /dev/shm; at the end of the test that must be nothing."""
    before = shared_files()

    def added() -> list[str]:
        return sorted(shared_files() - before)

    yield added
    assert settle(lambda: added() == []), f"left in /dev/shm: {added()}"


@pytest.fixture
def shm_dir(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory of the test's own in place of /dev/shm; it must be empty at the end."""
    path = tmp_path / "shm"
    path.mkdir()
    yield path
    assert sorted(p.name for p in path.iterdir()) == []


@pytest.fixture
def nothing_left_open() -> Iterator[None]:
    """Open descriptors and threads are back to where they were at the end of the test."""
    descriptors, threads = open_descriptors(), threading.active_count()
    yield
    assert settle(lambda: open_descriptors() <= descriptors), (
        f"{descriptors} descriptors before, {open_descriptors()} after"
    )
    assert settle(lambda: threading.active_count() <= threads), threading.enumerate()
