"""Which segments count as left over, with real senders that live, ended or were killed."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mmcopy import _native
from mmcopy.tools.doctor import Status
from mmcopy.tools.doctor.leftovers import OLD_S, Found, find, judge, lines

SENDER = """
import sys
from mmcopy import _native
owner = _native.SegmentOwner(sys.argv[1])
for size in (10, 20, 0):
    _native.write_segment(sys.argv[1], owner.next_name(), bytes(size))
print("ready", flush=True)
sys.stdin.read()
owner.close()
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path


@pytest.fixture
def sender(folder: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """A live sender with three segments of 30 bytes in all."""
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_the_segments_of_a_live_sender_are_under_way_however_old(
    folder: pathlib.Path, sender: subprocess.Popen[str]
) -> None:
    assert find(str(folder), now=time.time() + 10 * OLD_S) == (Found(3, 30, 0, 0), Found())
    assert sender.poll() is None


def test_the_segments_of_a_killed_sender_are_left_over_at_once(
    folder: pathlib.Path, sender: subprocess.Popen[str]
) -> None:
    before = sorted(folder.iterdir())
    sender.send_signal(signal.SIGKILL)
    sender.wait(timeout=30)
    assert find(str(folder), now=time.time()) == (Found(3, 30, 3, 30), Found())
    ours, smg = lines(str(folder))
    assert ours.status is Status.WARNING
    assert "3 of them, 30 B, are left over" in ours.found
    assert smg.status is Status.GOOD
    assert sorted(folder.iterdir()) == before, "the doctor only looks"
    removed, nbytes, _ = _native.sweep(str(folder))
    assert (len(removed), nbytes) == (3, 30), "what is told as left over is what a sweep removes"


def test_the_segments_of_a_sender_that_closed_are_left_over_after_a_minute(
    folder: pathlib.Path, sender: subprocess.Popen[str]
) -> None:
    sender.communicate(timeout=30)
    assert find(str(folder), now=time.time())[0] == Found(3, 30, 0, 0)
    assert find(str(folder), now=time.time() + OLD_S + 1)[0] == Found(3, 30, 3, 30)


def test_segments_of_smg_count_by_age_and_other_files_not_at_all(folder: pathlib.Path) -> None:
    for name, size, age_s in [
        ("smg-tokenspeed-1-2-3", 100, 0.0),
        ("smg-tokenspeed-1-2-4", 50, OLD_S + 5),
        ("smg-tokenspeed-", 7, OLD_S + 5),
        ("mmcopy-0123456789abcdeX-1", 7, OLD_S + 5),
        ("mmcopy-0123456789abcdef-", 7, OLD_S + 5),
        ("psm_12345", 7, OLD_S + 5),
    ]:
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (time.time() - age_s,) * 2)
    (folder / "smg-tokenspeed-9-9-9").symlink_to("psm_12345")
    (folder / "smg-tokenspeed-8-8-8").mkdir()
    assert find(str(folder), now=time.time()) == (Found(), Found(2, 150, 1, 50))
    line = lines(str(folder))
    assert "-mmin +1 -delete" in list(line)[1].advice


@pytest.mark.root
def test_a_lock_file_of_another_user_says_nothing(folder: pathlib.Path) -> None:
    (folder / "mmcopy-0123456789abcdef-1").write_bytes(b"1")
    lock = folder / "mmcopy-0123456789abcdef.lock"
    lock.touch()
    assert find(str(folder), now=time.time())[0] == Found(1, 1, 1, 1)
    os.chown(lock, 65534, 65534)
    assert find(str(folder), now=time.time())[0] == Found(1, 1, 0, 0)
    assert find(str(folder), now=time.time() + OLD_S + 1)[0] == Found(1, 1, 1, 1)


def test_a_fifo_in_place_of_a_lock_blocks_nothing(folder: pathlib.Path) -> None:
    os.mkfifo(folder / "mmcopy-0123456789abcdef.lock")
    (folder / "mmcopy-0123456789abcdef-1").write_bytes(b"1")
    ours, _ = find(str(folder), now=time.time())
    assert ours.count == 1


def test_no_folder_no_segments(folder: pathlib.Path) -> None:
    assert find(str(folder / "missing"), now=0.0) == (Found(), Found())
    assert judge("leftovers SMG", Found(), what="", advice="").found == "none"
