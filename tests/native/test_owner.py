"""Senders in processes of their own: killed, forked, in another pid namespace. Only the lock says who is alive."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mmcopy import _native
from mmcopy.errors import ClosedError, ConfigError, SegmentError, SegmentNotFoundError

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SENDER = """
import sys
from mmcopy import _native
owner = _native.SegmentOwner(sys.argv[1])
for _ in range(int(sys.argv[2])):
    name = owner.next_name()
    _native.write_segment(sys.argv[1], name, bytes(100))
    print(name)
print("ready", flush=True)
if sys.stdin.readline() == "close\\n":
    owner.close()
"""


class Sender:
    """A process that has written ``count`` segments of 100 bytes and waits."""

    def __init__(self, shm_dir: pathlib.Path, count: int, *, prefix: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SENDER, str(shm_dir), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: set[str] = set()

    def wait_until_ready(self) -> Sender:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                return self
            self.names.add(line.strip())
        raise AssertionError("the sender ended early")

    @property
    def lock_name(self) -> str:
        return next(iter(self.names)).rpartition("-")[0] + ".lock"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        assert self._end("") == -signal.SIGKILL

    def close(self) -> None:
        assert self._end("close\n") == 0

    def _end(self, last_line: str) -> int:
        self._process.communicate(last_line, timeout=30)
        return self._process.returncode

    def clean_up(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=30)


@pytest.fixture
def senders() -> Iterator[list[Sender]]:
    started: list[Sender] = []
    yield started
    for sender in started:
        sender.clean_up()


def listing(shm_dir: pathlib.Path) -> set[str]:
    return {path.name for path in shm_dir.iterdir()}


def test_an_owner_has_a_private_lock_file_until_it_is_closed(shm_dir: pathlib.Path) -> None:
    owner = _native.SegmentOwner(shm_dir)
    lock = shm_dir / f"mmcopy-{owner.instance_id}.lock"
    assert re.fullmatch(r"[0-9a-f]{16}", owner.instance_id)
    assert lock.stat().st_mode & 0o7777 == 0o600
    names = [owner.next_name() for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(rf"mmcopy-{owner.instance_id}-\d+", name) for name in names)
    name, nbytes = owner.write(b"\0\x01", src_dtype="uint8", dst_dtype="uint8")
    assert (shm_dir / name).read_bytes() == b"\0\x01"
    assert nbytes == 2
    assert _native.unlink_segment(shm_dir, name, _native.Process.current())
    assert repr(owner) == f"<mmcopy._native.SegmentOwner {owner.instance_id} open>"
    owner.close()
    owner.close()
    owner.forget()
    assert not lock.exists()
    assert "closed" in repr(owner)
    for call in (owner.next_name, lambda: owner.write(b"x")):
        with pytest.raises(ClosedError, match=owner.instance_id):
            call()


def test_an_owner_that_is_dropped_is_closed(shm_dir: pathlib.Path) -> None:
    owner = _native.SegmentOwner(shm_dir)
    assert len(listing(shm_dir)) == 1
    del owner
    assert listing(shm_dir) == set()


def test_forgetting_leaves_the_lock_file_for_a_sweep(shm_dir: pathlib.Path) -> None:
    owner = _native.SegmentOwner(shm_dir)
    owner.forget()
    with pytest.raises(ClosedError):
        owner.next_name()
    assert listing(shm_dir) == {f"mmcopy-{owner.instance_id}.lock"}
    assert _native.sweep(shm_dir) == ([], 0, [])
    assert listing(shm_dir) == set()


def test_a_missing_directory_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SegmentNotFoundError):
        _native.SegmentOwner(tmp_path / "missing")
    with pytest.raises(SegmentNotFoundError):
        _native.sweep(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SegmentError, match="listing failed: Not a directory"):
        _native.sweep(tmp_path / "file")


def test_a_killed_senders_segments_go_and_a_live_ones_stay(shm_dir: pathlib.Path, senders: list[Sender]) -> None:
    senders += [Sender(shm_dir, 5), Sender(shm_dir, 3)]
    live, dead = (sender.wait_until_ready() for sender in senders)
    assert _native.sweep(shm_dir, orphan_grace_s=0) == ([], 0, [])
    dead.kill()
    assert listing(shm_dir) == live.names | dead.names | {live.lock_name, dead.lock_name}
    names, nbytes, _ = _native.sweep(shm_dir)
    assert (set(names), len(names), nbytes) == (dead.names, 3, 300)
    assert listing(shm_dir) == live.names | {live.lock_name}
    live.kill()
    names, nbytes, _ = _native.sweep(shm_dir)
    assert (set(names), nbytes) == (live.names, 500)


def test_a_closed_senders_segments_wait_for_their_consumers(shm_dir: pathlib.Path, senders: list[Sender]) -> None:
    senders.append(Sender(shm_dir, 2))
    sender = senders[0].wait_until_ready()
    sender.close()
    assert listing(shm_dir) == sender.names
    assert _native.sweep(shm_dir) == ([], 0, [])
    assert _native.sweep(shm_dir, orphan_grace_s=float("inf")) == ([], 0, [])
    old = sorted(sender.names)[0]
    os.utime(shm_dir / old, (0, (shm_dir / old).stat().st_mtime - 61))
    assert _native.sweep(shm_dir) == ([old], 100, [])
    assert _native.sweep(shm_dir, orphan_grace_s=0.0) == ([sorted(sender.names)[1]], 100, [])


@pytest.mark.parametrize("orphan_grace_s", [-1.0, float("nan"), float("-inf"), 1e300])
def test_a_bad_grace_is_refused_with_the_number(shm_dir: pathlib.Path, orphan_grace_s: float) -> None:
    with pytest.raises(ConfigError, match="orphan_grace_s must be a number of seconds"):
        _native.sweep(shm_dir, orphan_grace_s=orphan_grace_s)


def test_senders_at_once_never_share_a_name(shm_dir: pathlib.Path, senders: list[Sender]) -> None:
    senders += [Sender(shm_dir, 40) for _ in range(4)]
    names = [name for sender in senders for name in sender.wait_until_ready().names]
    assert len(names) == len(set(names)) == 160
    for sender in senders:
        sender.kill()
    assert set(_native.sweep(shm_dir)[0]) == set(names)


@pytest.mark.root
def test_liveness_is_seen_through_a_pid_namespace(shm_dir: pathlib.Path, senders: list[Sender]) -> None:
    assert shutil.which("unshare")
    # Its pid is 1 in there, and somebody else's out here.
    senders.append(Sender(shm_dir, 2, prefix=("unshare", "--pid", "--fork", "--kill-child")))
    sender = senders[0].wait_until_ready()
    assert _native.sweep(shm_dir, orphan_grace_s=0) == ([], 0, [])
    assert listing(shm_dir) == sender.names | {sender.lock_name}
    sender.kill()
    deadline_s = 20
    wait_for_the_lock(shm_dir / sender.lock_name, deadline_s)
    assert set(_native.sweep(shm_dir)[0]) == sender.names


def wait_for_the_lock(path: pathlib.Path, limit_s: int) -> None:
    """Until nobody holds it: the child of a killed process ends a moment later."""
    subprocess.run(["flock", "--timeout", str(limit_s), str(path), "true"], check=True, timeout=limit_s + 10)


def test_what_is_not_ours_stays(shm_dir: pathlib.Path) -> None:
    strangers = {"smg-tokenspeed-1-2-3", "torch_1_2", "mmcopy-0123456789abcdef", "mmcopy-0123456789abcdef-1.tmp"}
    for name in strangers:
        (shm_dir / name).write_bytes(b"theirs")
    (shm_dir / "mmcopy-0123456789abcdef-1").mkdir()
    (shm_dir / "mmcopy-0123456789abcdef-2").symlink_to("torch_1_2")
    (shm_dir / "mmcopy-0123456789abcdef.lock").symlink_to("torch_1_2")
    os.mkfifo(shm_dir / "mmcopy-0123456789abcdef-3")
    before = listing(shm_dir)
    assert _native.sweep(shm_dir, orphan_grace_s=0) == ([], 0, [])
    assert listing(shm_dir) == before
    for path in shm_dir.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


FORK = """
import os, sys
from mmcopy import _native
from mmcopy.errors import ClosedError
shm_dir, how = sys.argv[1:]
owner = _native.SegmentOwner(shm_dir)
name = owner.next_name()
_native.write_segment(shm_dir, name, b"parent's")
child = os.fork()
if child == 0:
    try:
        owner.next_name()
    except ClosedError:
        getattr(owner, how)() if how != "exit" else None
        sys.exit(7)  # an ordinary exit: finalizers run
    sys.exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert sorted(os.listdir(shm_dir)) == sorted([name, f"mmcopy-{owner.instance_id}.lock"]), os.listdir(shm_dir)
assert _native.sweep(shm_dir, orphan_grace_s=0) == ([], 0, []), "the parent is alive"
owner.next_name()
assert _native.unlink_segment(shm_dir, name, _native.Process.current())
owner.close()
"""


@pytest.mark.parametrize("how", ["close", "forget", "exit"])
def test_a_forked_child_owns_nothing(shm_dir: pathlib.Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(shm_dir), how], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


OUTLIVED = """
import os, sys
from mmcopy import _native
owner = _native.SegmentOwner(sys.argv[1])
_native.write_segment(sys.argv[1], owner.next_name(), b"x")
read_end, write_end = os.pipe()
if os.fork() == 0:
    owner.forget()
    os.write(write_end, b"forgotten")
    os.close(1)
    sys.stdin.read()
    os._exit(0)
os.read(read_end, 100)
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_child_that_forgot_does_not_keep_its_parent_alive(shm_dir: pathlib.Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, str(shm_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.read() == "ready\n"
    assert process.wait(timeout=30) == -signal.SIGKILL
    # The child is still there: it ends when this end of its input closes.
    names, nbytes, _ = _native.sweep(shm_dir)
    assert (len(names), nbytes) == (1, 1)
    process.stdin.close()
    process.stdout.close()
