"""Segments that cannot be written or read: one clear error each, with its numbers, and nothing lost or left."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mmcopy import _native
from mmcopy.errors import PayloadError, SegmentError, SegmentNotFoundError, SegmentPermissionError, SegmentSizeError
from tests.rigs.arrays import MIB

U64_MAX = 2**64 - 1

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_an_existing_file_is_left_alone(shm_dir: pathlib.Path) -> None:
    (shm_dir / "theirs").write_bytes(b"theirs")
    (shm_dir / "link").symlink_to("target")
    for name in ("theirs", "link"):
        with pytest.raises(SegmentError) as caught:
            _native.write_segment(shm_dir, name, b"ours")
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(shm_dir / name))
    assert (shm_dir / "theirs").read_bytes() == b"theirs"
    assert not (shm_dir / "target").exists()
    (shm_dir / "theirs").unlink()
    (shm_dir / "link").unlink()


def test_a_missing_segment_is_a_missing_file(shm_dir: pathlib.Path) -> None:
    with pytest.raises(SegmentNotFoundError, match=r"no such segment.* than .*/shm") as caught:
        _native.Segment.open(shm_dir, "gone")
    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(shm_dir / "gone"))
    with pytest.raises(SegmentNotFoundError):
        _native.write_segment(shm_dir / "missing", "s", b"x")
    assert _native.unlink_segment(shm_dir, "gone", _native.Process.current()) is False


def test_files_of_another_kind_are_refused_at_once_and_left_alone(shm_dir: pathlib.Path) -> None:
    (shm_dir / "file").write_bytes(b"abc")
    (shm_dir / "directory").mkdir()
    (shm_dir / "link").symlink_to("file")
    (shm_dir / "dangling").symlink_to("nowhere")
    os.mkfifo(shm_dir / "fifo")  # nobody writes to it: an open that waits for a writer would hang
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shm_dir / "socket"))
        for name, kind in [
            ("directory", "a directory"),
            ("link", "a symbolic link"),
            ("dangling", "a symbolic link"),
            ("fifo", "a FIFO"),
            ("socket", "a socket"),
        ]:
            unlink = functools.partial(_native.unlink_segment, owner=_native.Process.current())
            for call in (_native.Segment.open, unlink):
                with pytest.raises(SegmentError, match=f"not a regular file but {kind}") as caught:
                    call(shm_dir, name)
                assert isinstance(caught.value, OSError)
                assert caught.value.errno
                assert caught.value.filename == str(shm_dir / name)
            assert os.path.lexists(shm_dir / name)
    for path in shm_dir.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_device_is_refused() -> None:
    with pytest.raises(SegmentError, match="a character device"):
        _native.Segment.open("/dev", "null")


@contextlib.contextmanager
def as_a_stranger(path: pathlib.Path) -> Iterator[None]:
    """Root becomes another user; any other user takes its own rights away."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_of_another_user_is_refused_with_owner_and_mode() -> None:
    # Every part of tmp_path is closed to others, so the refusal there would be the directory's.
    with contextlib.ExitStack() as stack:
        shm_dir = pathlib.Path("/dev/shm") / f"mmcopy-test-{os.getpid()}"
        shm_dir.mkdir()
        stack.callback(shm_dir.rmdir)
        shm_dir.chmod(0o755)
        path = shm_dir / "theirs"
        path.write_bytes(b"theirs")
        stack.callback(path.unlink)
        path.chmod(0o600)
        owner = os.geteuid()
        with as_a_stranger(path), pytest.raises(SegmentPermissionError) as caught:
            _native.Segment.open(shm_dir, "theirs")
        assert isinstance(caught.value, PermissionError)
        assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(path))
        mode, us = ("0600", 65534) if owner == 0 else ("0000", owner)
        assert f"owner uid {owner}, mode {mode}; we are uid {us}" in str(caught.value)
        if owner == 0:
            with as_a_stranger(path), pytest.raises(SegmentPermissionError, match=f"owner uid {owner}"):
                _native.unlink_segment(shm_dir, "theirs", _native.Process.current())
            with as_a_stranger(path), pytest.raises(SegmentPermissionError, match="creating a segment refused"):
                _native.write_segment(shm_dir, "ours", b"x")
        assert path.exists()


@pytest.mark.parametrize("name", ["", "/", "//", ".", "..", "/..", "a/b", "../a", "a/", "a\0b", "x" * 256, "\ud800"])
def test_bad_names_never_reach_the_file_system(shm_dir: pathlib.Path, name: str) -> None:
    for call in (
        lambda: _native.validate_segment_name(name),
        lambda: _native.Segment.open(shm_dir, name),
        lambda: _native.unlink_segment(shm_dir, name, _native.Process.current()),
        lambda: _native.write_segment(shm_dir, name, b"x"),
    ):
        with pytest.raises(PayloadError, match="bad segment name"):
            call()


def test_a_file_cut_before_the_read_is_an_error_with_what_is_left(shm_dir: pathlib.Path) -> None:
    _native.write_segment(shm_dir, "cut", bytes(8 * MIB))
    with _native.Segment.open(shm_dir, "cut") as segment:
        os.truncate(shm_dir / "cut", 5 * MIB)
        wanted, found = 8 * MIB - 1, 5 * MIB - 1
        for num_threads in (1, 3):
            with pytest.raises(SegmentSizeError, match=f"wanted {wanted} bytes at offset 1, found {found} "):
                segment.read_into(bytearray(wanted), 1, num_threads=num_threads)
        assert segment.unlink()


def test_a_file_cut_during_reads_is_data_or_an_error_and_never_a_signal(shm_dir: pathlib.Path) -> None:
    nbytes = 4 * MIB
    _native.write_segment(shm_dir, "cut", b"\x01" * nbytes)
    stop = threading.Event()

    def cut_and_grow() -> None:
        while not stop.is_set():
            os.truncate(shm_dir / "cut", 0)
            os.truncate(shm_dir / "cut", nbytes)

    peer = threading.Thread(target=cut_and_grow)
    with _native.Segment.open(shm_dir, "cut") as segment:
        peer.start()
        dst = np.empty(nbytes, np.uint8)
        failures = 0
        for _ in range(20_000):
            try:
                segment.read_into(dst, 0, num_threads=2)
            except SegmentSizeError:
                failures += 1
            if failures == 50:
                break
        stop.set()
        peer.join(timeout=20)
        assert failures > 0, "the peer never came between"
        assert segment.unlink()


def test_any_other_failure_has_its_errno(shm_dir: pathlib.Path) -> None:
    (shm_dir / "file").write_bytes(b"")
    with pytest.raises(SegmentError) as caught:
        _native.Segment.open(shm_dir / "file", "s")
    assert caught.value.errno == errno.ENOTDIR
    assert str(caught.value) == f"[Errno {errno.ENOTDIR}] open failed: Not a directory: '{shm_dir}/file/s'"
    (shm_dir / "file").unlink()


SMALL = """
import json, os, sys
from mmcopy import _native
from mmcopy.errors import NoSpaceError
outcomes = []
for kwargs in ({}, {"src_dtype": "uint8", "dst_dtype": "bfloat16", "num_threads": 2}):
    try:
        _native.write_segment(sys.argv[1], "big", bytes(4 << 20), **kwargs)
    except NoSpaceError as error:
        outcomes.append((error.errno, error.filename, str(error), os.listdir(sys.argv[1])))
_native.write_segment(sys.argv[1], "small", bytes(1 << 20))
print(json.dumps(outcomes))
"""


@pytest.mark.root
def test_a_full_file_system_is_an_error_with_the_numbers_and_no_file(tmp_path: pathlib.Path) -> None:
    mount = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, "-c", SMALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == 2
    for (number, filename, message, left), wanted in zip(outcomes, (4 * MIB, 8 * MIB), strict=True):
        assert (number, filename, left) == (errno.ENOSPC, f"{tmp_path}/big", [])
        assert f"no space for {wanted} bytes on {tmp_path} (No space left on device): {2 * MIB} bytes and" in message
