"""Closing a request: the pages of large segments are freed by another thread, all of them by the time it is joined."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest

from mmcopy import ShmHandle, TensorData, _native
from mmcopy.errors import ConfigError
from tests.rigs.arrays import MIB
from tests.rigs.copy_job import start_of
from tests.rigs.descriptors import open_descriptors
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.fixture
def opener(shm_dir: pathlib.Path) -> _native.RequestOpener:
    return _native.RequestOpener(shm_dir, ["s"], None, timeout_s=5)


def opened(
    opener: _native.RequestOpener, shm_dir: pathlib.Path, count: int, nbytes: int = MIB, prefix: str = "s"
) -> _native.Request:
    """A request of so many segments, whose names are gone."""
    items = []
    for number in range(count):
        _native.write_segment(shm_dir, f"{prefix}{number}", bytes(nbytes))
        items.append(TensorData("uint8", (nbytes,), ShmHandle(f"{prefix}{number}", 0, nbytes)))
    request = opener.request(items)
    request.open_all()
    assert request.unlink() == (0, count, 0, [])
    return request


def threads() -> list[str]:
    """Names of this process's threads, Python's and others."""
    return sorted(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm"))


def test_all_is_closed_when_joined_and_it_can_be_used_again(
    opener: _native.RequestOpener, shm_dir: pathlib.Path
) -> None:
    assert opener.join(0)
    assert "mmcopy-reaper" not in threads()
    for count in (1, 30, 2):
        request = opened(opener, shm_dir, count)
        before = open_descriptors()
        assert request.close(False) == (0, 0, 0, [])
        assert request.opened() == ((), ())
        assert opener.join(30)
        assert (opener.pending, open_descriptors()) == (0, before - count)
        assert "mmcopy-reaper" not in threads()


def test_small_segments_are_closed_by_the_caller(opener: _native.RequestOpener, shm_dir: pathlib.Path) -> None:
    request = opened(opener, shm_dir, 3, nbytes=5000)
    before = open_descriptors()
    request.close(False)
    assert open_descriptors() == before - 3
    assert "mmcopy-reaper" not in threads()


def test_it_goes_on_by_itself_and_sleeps(opener: _native.RequestOpener, shm_dir: pathlib.Path) -> None:
    for _ in range(2):
        opened(opener, shm_dir, 3).close(False)
        assert settle(lambda: opener.pending == 0)
        assert threads().count("mmcopy-reaper") == 1
    assert opener.join(30)


def test_a_job_that_reads_a_segment_keeps_it(opener: _native.RequestOpener, shm_dir: pathlib.Path) -> None:
    pool = _native.CopyPool(1)
    request = opened(opener, shm_dir, 1)
    slot = bytearray(b"12345")
    job = start_of(pool, request, [slot], [(0, 0, 5, 0, 5)])
    before = open_descriptors()
    request.close(False)
    assert opener.join(30)
    assert open_descriptors() == before
    job.permit(1)
    job.wait(0, 30)
    assert (slot, open_descriptors()) == (bytes(5), before - 1)
    pool.close(30)


def test_several_threads_close_at_once(opener: _native.RequestOpener, shm_dir: pathlib.Path) -> None:
    batches = [[opened(opener, shm_dir, 1, prefix=f"s{n}-{m}-") for m in range(20)] for n in range(4)]
    before = open_descriptors()
    users = [threading.Thread(target=lambda batch=batch: [each.close(False) for each in batch]) for batch in batches]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=30)
    assert opener.join(30)
    assert open_descriptors() == before - 80


def test_a_limit_that_is_not_a_number(opener: _native.RequestOpener) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds, got NaN"):
        opener.join(float("nan"))


def test_a_forked_child_keeps_none_of_it_and_does_not_wait(
    opener: _native.RequestOpener, shm_dir: pathlib.Path
) -> None:
    opened(opener, shm_dir, 1).close(False)
    assert settle(lambda: opener.pending == 0)
    request = opened(opener, shm_dir, 1)
    there = open_descriptors()
    child = os.fork()
    if child == 0:
        try:
            good = open_descriptors() == there - 1
            request.close(False)
            good = good and open_descriptors() == there - 1 and opener.join(0) and opener.pending == 0
            del opener
            os._exit(7 if good else 1)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert request.opened() == ((MIB,), ())
    request.close(False)
    assert opener.join(30)
