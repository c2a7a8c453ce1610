"""Two users in one world-writable directory: a file counts only with its owner."""

from __future__ import annotations

import ast
import os
import pathlib

import pytest

from mmcopy import _native
from tests.rigs.users import OURS, THEIRS, as_user, open_to_all, start_as

__all__ = ["open_to_all"]

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("nothing_left_open")]

SEND_AND_CLOSE = """
owner = _native.SegmentOwner(folder)
name = owner.next_name()
_native.write_segment(folder, name, bytes(100))
owner.close()
print(name)
"""
SWEEP = "print(_native.sweep(folder, orphan_grace_s=float(sys.argv[3])))"


def swept(uid: int, folder: pathlib.Path, grace_s: str = "60") -> str:
    return as_user(uid, folder, SWEEP, grace_s)


def listing(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_strangers_lock_file_says_nothing_about_our_segments(open_to_all: pathlib.Path) -> None:
    name = as_user(OURS, open_to_all, SEND_AND_CLOSE)
    lock = name.rpartition("-")[0] + ".lock"
    as_user(THEIRS, open_to_all, "(folder / sys.argv[3]).touch()", lock)
    assert swept(OURS, open_to_all) == "([], 0, [])", "on its way to its consumer"
    assert swept(THEIRS, open_to_all, "0") == "([], 0, [])"
    assert listing(open_to_all) == {name}
    as_user(THEIRS, open_to_all, "(folder / sys.argv[3]).touch(); (folder / sys.argv[3]).chmod(0)", lock)
    assert swept(OURS, open_to_all) == "([], 0, [])"
    os.utime(open_to_all / name, (0, 0))
    assert swept(OURS, open_to_all) == f"(['{name}'], 100, [])", "nor does it keep them for ever"
    assert listing(open_to_all) == {lock}


def test_root_clears_up_after_every_user_by_that_users_locks_alone(open_to_all: pathlib.Path) -> None:
    name = as_user(OURS, open_to_all, SEND_AND_CLOSE)
    dead = as_user(THEIRS, open_to_all, SEND_AND_CLOSE.replace("close", "forget"))
    (open_to_all / (name.rpartition("-")[0] + ".lock")).touch()
    os.chown(open_to_all / (name.rpartition("-")[0] + ".lock"), THEIRS, THEIRS)
    assert _native.sweep(open_to_all) == ([dead], 100, [])
    assert listing(open_to_all) == {name}


SEND = """
sender = mmcopy.Sender(mmcopy.TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=folder)
print(sender.send(b"first").payload.name, flush=True)
sys.stdin.readline()
sent = [sender.send(b"abc") for _ in range(100)]
for data in sent:
    sender.cancel(data)
sender.close()
print({data.path for data in sent}, dict(sender.metrics.snapshot().get("shm_write_failures", {})))
"""
SQUAT = """
taken = sys.argv[3]
sender, _, number = taken.rpartition("-")
for n in [*range(1000), *range(int(number), int(number) + 1000)]:
    if n != int(number):
        (folder / f"{sender}-{n}").touch()
"""


def test_names_that_another_user_takes_in_advance_are_not_those_that_come(open_to_all: pathlib.Path) -> None:
    process = start_as(OURS, open_to_all, SEND)
    assert process.stdout is not None
    first = process.stdout.readline().strip()
    as_user(THEIRS, open_to_all, SQUAT, first)
    answer, problem = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0, problem
    assert answer.strip() == "{'segment'} {}"
    assert first in listing(open_to_all)


MANY = """
for n in range(1100):
    (folder / f"mmcopy-{n:016x}.lock").touch()
"""
FEW_DESCRIPTORS = """
for _ in range(100):
    owner = _native.SegmentOwner(folder)
    _native.write_segment(folder, owner.next_name(), bytes(10))
    owner.forget()
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
names, nbytes, failures = _native.sweep(folder)
print(len(names), nbytes, failures)
"""


def test_any_number_of_lock_files_takes_two_descriptors(open_to_all: pathlib.Path) -> None:
    as_user(THEIRS, open_to_all, MANY)
    assert as_user(OURS, open_to_all, FEW_DESCRIPTORS) == "100 1000 []"
    assert len(listing(open_to_all)) == 1100


def test_what_cannot_be_removed_is_reported_and_the_rest_goes(open_to_all: pathlib.Path) -> None:
    first, second = (as_user(OURS, open_to_all, SEND_AND_CLOSE.replace("close", "forget")) for _ in range(2))
    (open_to_all / first).chmod(0)
    names, nbytes, failures = ast.literal_eval(swept(OURS, open_to_all))
    assert (names, nbytes) == ([second], 100)
    (failure,) = failures
    assert failure.startswith(f"{open_to_all / first}: open refused (Permission denied)")
    assert listing(open_to_all) == {first}
