"""copy_into: every byte, nothing beside it, no buffer kept, and other threads run meanwhile."""

from __future__ import annotations

import array
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy import _native
from mmcopy.errors import ConfigError, PayloadError
from tests.rigs.arrays import MIB, random_bytes, resize

EDGES = [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 3]


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("nbytes", EDGES)
def test_every_byte_arrives_and_nothing_beside_it_changes(nbytes: int, num_threads: int) -> None:
    src = random_bytes(nbytes)
    around = np.full(nbytes + 6, 0xEE, np.uint8)
    _native.copy_into(src, around[3 : 3 + nbytes], num_threads=num_threads)
    assert around[3 : 3 + nbytes].tobytes() == src.tobytes()
    assert (around[:3] == 0xEE).all()
    assert (around[3 + nbytes :] == 0xEE).all()


@given(data=st.binary(max_size=3000), start=st.integers(0, 100), num_threads=st.integers(1, 4))
@settings(deadline=None)
def test_any_bytes_at_any_alignment(data: bytes, start: int, num_threads: int) -> None:
    part = memoryview(data)[start:]
    target = bytearray(len(part))
    _native.copy_into(part, target, num_threads=num_threads)
    assert target == part


@given(nbytes=st.integers(0, 3 * MIB), src_start=st.integers(0, 5000), dst_start=st.integers(0, 5000))
@settings(deadline=None)
def test_an_overlap_is_copied_as_if_through_a_second_buffer(nbytes: int, src_start: int, dst_start: int) -> None:
    buffer = OVERLAPPED.copy()
    wanted = buffer[src_start : src_start + nbytes].copy()
    _native.copy_into(buffer[src_start : src_start + nbytes], buffer[dst_start : dst_start + nbytes], num_threads=4)
    assert np.array_equal(buffer[dst_start : dst_start + nbytes], wanted)


OVERLAPPED = random_bytes(3 * MIB + 5000)


def test_buffers_of_any_format_are_bytes() -> None:
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    target = array.array("d", [0, 0, 0])
    _native.copy_into(floats, target)
    assert target.tobytes() == floats.tobytes()


def test_unequal_lengths_are_refused_with_both() -> None:
    target = bytearray(b"abc")
    with pytest.raises(PayloadError, match=r"source has 2 bytes, target has 3"):
        _native.copy_into(b"12", target)
    assert target == b"abc"


def test_what_is_not_contiguous_or_not_writable_is_refused() -> None:
    two_rows = np.zeros((2, 4), np.uint8)
    for strided in (two_rows.T, two_rows[:, ::2], two_rows[:, ::-1]):
        with pytest.raises(BufferError, match="C-contiguous"):
            _native.copy_into(strided, bytearray(strided.nbytes))
        with pytest.raises(BufferError, match="C-contiguous"):
            _native.copy_into(bytes(strided.nbytes), strided)
    read_only = np.zeros(4, np.uint8)
    read_only.flags.writeable = False
    for dst in (read_only, memoryview(bytes(4))):
        with pytest.raises(BufferError, match="writable buffer is needed, got 4 read-only bytes"):
            _native.copy_into(bytes(4), dst)


@pytest.mark.parametrize("given", [None, 4, "text", [1, 2]])
def test_what_is_no_buffer_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError):
        _native.copy_into(given, bytearray(4))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.copy_into(bytes(4), given)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_threads", [0, -1, -(2**63)])
def test_less_than_one_thread_is_refused_with_the_number(num_threads: int) -> None:
    with pytest.raises(ConfigError, match=f"num_threads must be at least 1, got {num_threads}"):
        _native.copy_into(b"a", bytearray(1), num_threads=num_threads)


def test_more_threads_than_the_machine_has_are_fine() -> None:
    src, dst = random_bytes(16 * MIB), np.zeros(16 * MIB, np.uint8)
    _native.copy_into(src, dst, num_threads=10_000)
    assert np.array_equal(src, dst)


def test_buffers_are_released_after_success_and_after_errors(shm_dir: Path) -> None:
    buffer = bytearray(8)
    calls: list[Callable[[], object]] = [
        lambda: _native.copy_into(buffer, bytearray(8)),
        lambda: _native.copy_into(bytes(8), buffer),
        lambda: _native.cast_into(buffer, "float32", bytearray(4), "bfloat16"),
        lambda: _native.write_segment(shm_dir, "released", buffer),
        lambda: _native.Segment.open(shm_dir, "released").read_into(buffer, 0),
    ]
    failing: list[Callable[[], object]] = [
        lambda: _native.copy_into(buffer, bytearray(7)),
        lambda: _native.copy_into(bytes(7), buffer),
        lambda: _native.copy_into(buffer, bytes(8)),
        lambda: _native.copy_into(buffer, bytearray(8), num_threads=0),
        lambda: _native.cast_into(buffer, "float32", bytearray(5), "bfloat16"),
        lambda: _native.cast_into(buffer, "nonsense", bytearray(4), "bfloat16"),
        lambda: _native.write_segment(shm_dir, "released", buffer),
        lambda: _native.write_segment(shm_dir, "a/b", buffer),
        lambda: _native.Segment.open(shm_dir, "released").read_into(buffer, 1),
    ]
    for call in calls:
        call()
        resize(buffer)
    for call in failing:
        with pytest.raises((ValueError, OSError, BufferError)):
            call()
        resize(buffer)
    assert _native.unlink_segment(shm_dir, "released", _native.Process.current())


class Bystander:
    """A thread that waits to be let go and then needs the GIL for one assignment.

    No thread is asked to give the GIL away here (the switch interval is longer than any test), so it gets there only
    when the thread that lets it go releases the GIL of its own accord.
    """

    def __init__(self) -> None:
        self.has_run = False
        self._start = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        if self._start.acquire(timeout=60):
            self.has_run = True

    def let_go(self) -> None:
        self._start.release()

    def join(self) -> None:
        self._start.release()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    before = sys.getswitchinterval()
    thread = Bystander()
    sys.setswitchinterval(1000)
    try:
        yield thread
    finally:
        sys.setswitchinterval(before)
        thread.join()


def calls_on(nbytes: int, shm_dir: Path) -> dict[str, Callable[[], object]]:
    src, dst = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    half = np.zeros(nbytes // 2, np.uint8)
    _native.write_segment(shm_dir, "present", src)
    segment = _native.Segment.open(shm_dir, "present")
    assert segment.unlink()

    def write() -> None:
        _native.write_segment(shm_dir, "written", src)
        (shm_dir / "written").unlink()

    return {
        "copy_into": lambda: _native.copy_into(src, dst),
        "cast_into": lambda: _native.cast_into(src, "float32", half, "bfloat16"),
        "read_into": lambda: segment.read_into(dst, 0),
        "write_segment": write,
    }


@pytest.mark.parametrize("name", ["copy_into", "cast_into", "read_into", "write_segment"])
def test_other_threads_run_during_a_big_call(name: str, bystander: Bystander, shm_dir: Path) -> None:
    call = calls_on(4 * MIB, shm_dir)[name]
    bystander.let_go()
    # One call may end before the other thread has woken up; it is not the call's work to wait for it.
    calls = 0
    while not bystander.has_run and calls < 2000:
        call()
        calls += 1
    assert bystander.has_run


@pytest.mark.parametrize("name", ["copy_into", "cast_into", "read_into"])
def test_the_gil_is_kept_during_a_small_call(name: str, bystander: Bystander, shm_dir: Path) -> None:
    call = calls_on(_native.GIL_RELEASE_BYTES - 4, shm_dir)[name]
    bystander.let_go()
    for _ in range(2000):
        call()
    assert not bystander.has_run
