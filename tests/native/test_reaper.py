"""Reaper: segments are closed soon, by another thread, and all of them by the time it is joined."""

from __future__ import annotations

import functools
import os
import pathlib
import threading

import pytest

from mmcopy import _native
from mmcopy.errors import ClosedError, ConfigError
from tests.rigs.descriptors import open_descriptors
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def removed_segments(shm_dir: pathlib.Path, count: int, nbytes: int = 5000) -> list[_native.Segment]:
    opened = []
    for number in range(count):
        _native.write_segment(shm_dir, f"s{number}", bytes(nbytes))
        opened.append(_native.Segment.open(shm_dir, f"s{number}"))
        assert opened[-1].unlink()
    return opened


def has_closed_all(reaper: _native.Reaper) -> bool:
    return reaper.pending == 0


def threads() -> list[str]:
    """Names of this process's threads, Python's and others."""
    return sorted(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm"))


def test_all_is_closed_when_joined_and_it_can_be_used_again(shm_dir: pathlib.Path) -> None:
    reaper = _native.Reaper()
    assert reaper.join(0)
    assert "mmcopy-reaper" not in threads()
    for count in (1, 30, 2):
        opened = removed_segments(shm_dir, count)
        before = open_descriptors()
        reaper.close_later(opened)
        for segment in opened:
            with pytest.raises(ClosedError):
                segment.check(0, 1)
        assert reaper.join(30)
        assert (reaper.pending, open_descriptors()) == (0, before - count)
        assert "mmcopy-reaper" not in threads()


def test_it_goes_on_by_itself_and_sleeps(shm_dir: pathlib.Path) -> None:
    reaper = _native.Reaper()
    reaper.close_later(removed_segments(shm_dir, 3))
    assert settle(functools.partial(has_closed_all, reaper))
    assert threads().count("mmcopy-reaper") == 1
    reaper.close_later(removed_segments(shm_dir, 3))
    assert threads().count("mmcopy-reaper") == 1
    del reaper
    assert "mmcopy-reaper" not in threads()


def test_closed_segments_and_empty_lists_start_nothing(shm_dir: pathlib.Path) -> None:
    reaper = _native.Reaper()
    reaper.close_later([])
    (segment,) = removed_segments(shm_dir, 1)
    segment.close()
    reaper.close_later([segment, segment])
    assert reaper.pending == 0
    assert "mmcopy-reaper" not in threads()


def test_a_job_that_reads_a_segment_keeps_it(shm_dir: pathlib.Path) -> None:
    reaper, pool = _native.Reaper(), _native.CopyPool(1)
    _native.write_segment(shm_dir, "s", b"0123456789")
    segment = _native.Segment.open(shm_dir, "s")
    assert segment.unlink()
    slot = bytearray(5)
    job = pool.start([segment], [slot], [(0, 0, 5, 0, 5)])
    before = open_descriptors()
    reaper.close_later([segment])
    assert reaper.join(30)
    assert open_descriptors() == before
    job.permit(1)
    job.wait(0, 30)
    assert (slot, open_descriptors()) == (b"56789", before - 1)
    pool.close(30)


def test_several_threads_hand_over_at_once(shm_dir: pathlib.Path) -> None:
    reaper = _native.Reaper()
    batches = [removed_segments(shm_dir, 20) for _ in range(4)]
    before = open_descriptors()
    users = [threading.Thread(target=lambda batch=batch: [reaper.close_later([s]) for s in batch]) for batch in batches]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=30)
    assert reaper.join(30)
    assert open_descriptors() == before - 80


def test_bad_arguments() -> None:
    reaper = _native.Reaper()
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds, got NaN"):
        reaper.join(float("nan"))
    with pytest.raises(TypeError):
        reaper.close_later([b"no segment"])  # type: ignore[list-item]


def test_a_forked_child_closes_its_own_and_does_not_wait(shm_dir: pathlib.Path) -> None:
    reaper = _native.Reaper()
    reaper.close_later(removed_segments(shm_dir, 1))
    segment = removed_segments(shm_dir, 1)[0]
    child = os.fork()
    if child == 0:
        try:
            before = open_descriptors()
            reaper.close_later([segment])
            good = open_descriptors() == before - 1 and reaper.join(0) and reaper.pending == 0
            del reaper
            os._exit(7 if good else 1)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    segment.check(0, 5000)
    segment.close()
    assert reaper.join(30)
