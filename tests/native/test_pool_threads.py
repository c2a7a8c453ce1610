"""CopyPool's threads: jobs share them, they sleep and end, a forked child has none."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mmcopy import _native
from mmcopy.errors import ClosedError
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.copy_job import Piece, request_of, start, start_of
from tests.rigs.waiting import settle

from .test_pool import LIMIT_S, chunked, copy_threads, removed_segment

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.fixture
def pool() -> Iterator[_native.CopyPool]:
    pool = _native.CopyPool(2)
    yield pool
    pool.close(LIMIT_S)


def test_many_jobs_from_several_threads(pool: _native.CopyPool, shm_dir: pathlib.Path) -> None:
    data = random_bytes(MIB)
    request = request_of([removed_segment(shm_dir, data)])
    failures: list[str] = []

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            chunk_bytes = int(rng.integers(10_000, 400_000))
            start = int(rng.integers(0, MIB))
            slots = [np.zeros(chunk_bytes, np.uint8) for _ in range(int(rng.integers(1, 4)))]
            table = [(c, s, start + at, t, n) for c, s, at, t, n in chunked(MIB - start, chunk_bytes)]
            job = start_of(pool, request, slots, table)
            for i, (_, _, at, _, nbytes) in enumerate(table):
                job.permit(i + len(slots))
                job.wait(i, LIMIT_S)
                if not np.array_equal(slots[i % len(slots)][:nbytes], data[at : at + nbytes]):
                    failures.append(f"seed {seed}, chunk {i} of {table}")

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(LIMIT_S)
        assert not user.is_alive()
    assert failures == []


def test_two_jobs_take_turns() -> None:
    """One thread, two jobs, nobody waits. One sets a mark a chunk; each chunk of the other is a picture of them.

    A third job keeps the thread busy for some milliseconds, so that both are permitted when it comes to them.
    """
    marks, num_pictures = np.zeros(10_000, np.uint8), 40
    long, long_slot = np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)
    for _ in range(20):
        marks[:] = 0
        pool = _native.CopyPool(1)
        holding = start(pool, [long], [long_slot], [(0, 0, 0, 0, MIB)] * 500)
        holding.permit(1)
        holding.is_done(0)  # which asks the thread to begin
        marking = start(pool, [b"\x01"], [marks[i : i + 1] for i in range(len(marks))], chunked_marks(len(marks)))
        pictures = [np.zeros_like(marks) for _ in range(num_pictures)]
        looking = start(pool, [marks], pictures, [(i, 0, 0, 0, len(marks)) for i in range(num_pictures)])
        marking.permit(len(marks))
        looking.permit(num_pictures)
        is_held = not holding.is_done(0)
        assert settle(functools.partial(looking.is_done, num_pictures - 1), limit_s=LIMIT_S)
        marking.cancel()
        pool.close(LIMIT_S)
        counts = np.array([picture.sum(dtype=np.int64) for picture in pictures])
        if is_held:
            assert counts[0] in (0, 1)
            assert (np.diff(counts) == 1).all(), counts
            return
    pytest.fail("the thread was always free before both jobs were permitted")


def chunked_marks(count: int) -> list[Piece]:
    return [(i, 0, 0, 0, 1) for i in range(count)]


def test_threads_start_with_the_pool_and_end_with_it() -> None:
    for how in ("close", "drop"):
        pool = _native.CopyPool(3)
        assert pool.num_threads == 3
        assert settle(lambda: copy_threads() == ["mmcopy-copy-0", "mmcopy-copy-1", "mmcopy-copy-2"])
        if how == "close":
            pool.close(LIMIT_S)
            pool.close(0)
            with pytest.raises(ClosedError, match="the copy pool is closed"):
                start(pool, [], [], [])
        else:
            del pool
        assert copy_threads() == []


def test_idle_threads_sleep(pool: _native.CopyPool) -> None:
    def ticks() -> int:
        spent = 0
        for task in pathlib.Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().startswith("mmcopy-copy"):
                user, system = (task / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
                spent += int(user) + int(system)
        return spent

    slot = bytearray(1)
    for _ in range(100):
        job = start(pool, [b"a"], [slot], [(0, 0, 0, 0, 1)])
        job.permit(1)
        job.wait(0, LIMIT_S)
    before = ticks()
    threading.Event().wait(0.3)
    assert ticks() - before <= 1


FORK = """
import os, sys
from mmcopy import _native
from mmcopy.errors import ClosedError
from tests.rigs.copy_job import start
pool = _native.CopyPool(2)
slots = [bytearray(1 << 20) for _ in range(8)]
job = start(pool, [bytes(1 << 20)], slots, [(i, 0, 0, 0, 1 << 20) for i in range(8)])
job.permit(8)
child = os.fork()
if child == 0:
    refused = 0
    calls = (lambda: start(pool, [], [], []), lambda: job.wait(7, 60), lambda: job.is_done(0), lambda: job.permit(8))
    for call in calls:
        try:
            call()
        except ClosedError:
            refused += 1
    job.cancel()
    pool.close(60)
    fresh = _native.CopyPool(1)
    slot = bytearray(3)
    work = start(fresh, [b"abc"], [slot], [(0, 0, 0, 0, 3)])
    work.permit(1)
    work.wait(0, 60)
    sys.exit(7 if refused == 4 and slot == b"abc" else 1)  # an ordinary exit: finalizers run
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
job.wait(7, 60)
pool.close(60)
"""


def test_a_forked_child_has_no_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_may_end_without_closing() -> None:
    script = (
        "from mmcopy import _native\nfrom tests.rigs.copy_job import start\n"
        "pool = _native.CopyPool(2)\n"
        "job = start(pool, [bytes(1 << 22)], [bytearray(1 << 22)] * 4, [(i, 0, 0, 0, 1 << 22) for i in range(4)])\n"
        "job.permit(4)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
