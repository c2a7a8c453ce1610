"""CopyPool and CopyJob: every byte, in every order of permits; errors and cancels in the middle; nothing kept after."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy import _native
from mmcopy.errors import ClosedError, ConfigError, MmcopyTimeoutError, PayloadError, SegmentSizeError
from tests.rigs.arrays import KIB, MIB, random_bytes, resize
from tests.rigs.copy_job import Piece, copy_now, request_of, start, start_of
from tests.rigs.descriptors import open_descriptors
from tests.rigs.waiting import settle

LIMIT_S = 60.0

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.fixture
def pool() -> Iterator[_native.CopyPool]:
    pool = _native.CopyPool(2)
    yield pool
    pool.close(LIMIT_S)


def removed_segment(shm_dir: pathlib.Path, data: np.ndarray | bytes) -> _native.Segment:
    _native.write_segment(shm_dir, "s", data)
    segment = _native.Segment.open(shm_dir, "s")
    assert segment.unlink()
    return segment


def chunked(nbytes: int, chunk_bytes: int) -> list[Piece]:
    starts = range(0, nbytes, chunk_bytes)
    return [(i, 0, start, 0, min(chunk_bytes, nbytes - start)) for i, start in enumerate(starts)]


def copy_threads() -> list[str]:
    names = (path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm"))
    return sorted(name for name in names if name.startswith("mmcopy-copy"))


def assert_exported(buffer: bytearray) -> None:
    with pytest.raises(BufferError):
        buffer.append(0)


@pytest.mark.parametrize("kind", ["segment", "memory"])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 256 * KIB, MIB - 1, MIB + 1, 3 * MIB + 5])
def test_every_byte_arrives_through_a_ring(
    pool: _native.CopyPool, shm_dir: pathlib.Path, nbytes: int, kind: str
) -> None:
    data = random_bytes(nbytes)
    segment = removed_segment(shm_dir, data)
    slots = [bytearray(b"\xee" * (256 * KIB)) for _ in range(3)]
    job = start(pool, [segment if kind == "segment" else data], slots, chunked(nbytes, 256 * KIB))
    arrived = bytearray()
    for i in range(job.num_chunks):
        job.permit(i + len(slots))
        job.wait(i, LIMIT_S)
        assert job.is_done(i)
        arrived += slots[i % 3][: min(256 * KIB, nbytes - len(arrived))]
    assert arrived == data.tobytes()
    if nbytes % (256 * KIB) and nbytes > 0:
        assert slots[(job.num_chunks - 1) % 3][nbytes % (256 * KIB) :].endswith(b"\xee") or job.num_chunks > 3
    segment.close()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_table_and_any_permits(data: st.DataObject) -> None:
    sources = [random_bytes(data.draw(st.integers(0, 9000)), seed) for seed in range(3)]
    num_slots, num_threads = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    pieces: list[Piece] = []
    wanted: list[bytes] = []
    for chunk in range(data.draw(st.integers(0, 8))):
        slot = b""
        for _ in range(data.draw(st.integers(1, 4))):
            source = data.draw(st.integers(0, 2))
            at = data.draw(st.integers(0, len(sources[source])))
            nbytes = data.draw(st.integers(0, len(sources[source]) - at))
            pieces.append((chunk, source, at, len(slot), nbytes))
            slot += sources[source][at : at + nbytes].tobytes()
        wanted.append(slot)
    slots = [np.zeros(max(map(len, wanted), default=0), np.uint8) for _ in range(num_slots)]
    pool = _native.CopyPool(num_threads)
    with tempfile.TemporaryDirectory() as shm_dir:
        segment = removed_segment(pathlib.Path(shm_dir), sources[0])
    job = start(pool, [segment, *sources[1:]], slots, pieces)
    for i, slot in enumerate(wanted):
        job.permit(i + 1 + data.draw(st.integers(0, num_slots - 1)))
        job.wait(i, LIMIT_S)
        assert slots[i % num_slots][: len(slot)].tobytes() == slot
    segment.close()
    pool.close(LIMIT_S)


def test_a_job_of_one_chunk_is_copied_by_its_owner_even_without_threads(pool: _native.CopyPool) -> None:
    slot = bytearray(5)
    job = start(pool, [b"0123456789"], [slot], [(0, 0, 3, 0, 5)])
    pool.close(LIMIT_S)
    assert copy_threads() == []
    job.permit(1)
    job.wait(0, LIMIT_S)
    assert slot == b"34567"


def test_copy_now_packs_one_chunk_on_the_calling_thread(pool: _native.CopyPool, shm_dir: pathlib.Path) -> None:
    data = random_bytes(3 * KIB)
    segment = removed_segment(shm_dir, data)
    inline, slot = bytearray(b"inline"), bytearray(b"\xee" * (4 * KIB))
    pool.close(LIMIT_S)  # no thread is left that could have a part in it
    copy_now(pool, [segment, inline], slot, [(0, 0, 1 * KIB, 0, 2 * KIB), (0, 1, 0, 2 * KIB, 6)])
    assert slot == data[1 * KIB :].tobytes() + b"inline" + b"\xee" * (2 * KIB - 6)
    copy_now(pool, [], slot, [])
    resize(inline)
    resize(slot)
    with pytest.raises(PayloadError, match="2 chunks for one slot"):
        copy_now(pool, [inline], slot, [(0, 0, 0, 0, 1), (1, 0, 0, 0, 1)])
    with pytest.raises(SegmentSizeError, match="3072"):
        copy_now(pool, [removed_segment(shm_dir, data)], slot, [(0, 0, 1, 0, 3 * KIB)])
    resize(slot)
    segment.close()


def test_wait_says_how_many_in_a_row_are_there(pool: _native.CopyPool) -> None:
    data = random_bytes(4 * KIB)
    slots = [bytearray(KIB) for _ in range(4)]
    job = start(pool, [data], slots, chunked(4 * KIB, KIB))
    job.permit(3)
    there = job.wait(2, LIMIT_S)
    assert there == 1  # the last one is not permitted
    while not job.is_done(0) or not job.is_done(1):
        pass
    assert job.wait(0, LIMIT_S) == 3
    job.permit(4)
    assert job.wait(3, LIMIT_S) == 1
    assert b"".join(slots) == data.tobytes()


def test_rousing_without_a_job_does_nothing(pool: _native.CopyPool) -> None:
    pool.wake(0)
    pool.wake(1000)
    data, slots = random_bytes(MIB), [bytearray(64 * KIB) for _ in range(16)]
    job = start(pool, [data], slots, chunked(MIB, 64 * KIB))
    pool.wake(2)
    job.permit(16)
    for i in range(16):
        job.wait(i, LIMIT_S)
    assert b"".join(slots) == data.tobytes()
    pool.close(LIMIT_S)
    pool.wake(2)


def test_nothing_starts_before_it_is_permitted(pool: _native.CopyPool) -> None:
    slots = [bytearray(2), bytearray(2)]
    job = start(pool, [b"aabbcc"], slots, chunked(6, 2))
    for limit_s in (0.0, -1.0, 0.02):
        with pytest.raises(MmcopyTimeoutError, match="copying chunk 0 did not end within"):
            job.wait(0, limit_s)
    assert not job.is_done(0)
    job.permit(2)
    job.permit(1)  # only rises
    job.wait(1, LIMIT_S)
    with pytest.raises(TimeoutError):
        job.wait(2, 0.02)
    assert slots == [b"aa", b"bb"]
    job.permit(10**6)
    job.wait(2, float("inf"))
    assert slots == [b"cc", b"bb"]


def test_polling_gets_there_without_a_wait(pool: _native.CopyPool) -> None:
    slot = bytearray(3)
    job = start(pool, [b"abc"], [slot], [(0, 0, 0, 0, 3)])
    job.permit(1)
    assert settle(lambda: job.is_done(0))
    assert slot == b"abc"
    resize(slot)


def test_a_permit_of_another_thread_ends_a_wait(pool: _native.CopyPool) -> None:
    slot = bytearray(3)
    job = start(pool, [b"abc"], [slot], [(0, 0, 0, 0, 3)])
    waiter = threading.Thread(target=job.wait, args=(0, LIMIT_S))
    waiter.start()
    job.permit(1)
    waiter.join(LIMIT_S)
    assert not waiter.is_alive()
    assert slot == b"abc"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(1, 0, 0, 0, 1)], "piece 0 belongs to chunk 1, but .* without gaps: 0 wanted"),
        ([(0, 0, 0, 0, 1), (2, 0, 0, 0, 1)], "piece 1 belongs to chunk 2, .* 0 or 1 wanted"),
        ([(0, 2, 0, 0, 1)], "piece 0 of chunk 0: source 2 wanted, but there are 2"),
        ([(0, 0, 9, 0, 2)], "piece 0 of chunk 0: wanted 2 bytes at 9 of source 0, which has 10 bytes"),
        ([(0, 0, 2**64 - 1, 0, 2)], "wanted 2 bytes at 18446744073709551615 of source 0"),
        ([(0, 0, 0, 0, 1), (1, 0, 0, 3, 3)], "piece 1 of chunk 1: wanted 3 bytes at 3 of slot 1, which has 5 bytes"),
        ([(0, 0, -1, 0, 2)], r"piece 0: \(0, 0, -1, 0, 2\) is not five numbers from 0"),
        ([(0, 0, 0, 0, 1), (0, 0, 0, 0, 2**64)], "piece 1: .*, 18446744073709551616. is not five numbers"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_the_numbers(
    pool: _native.CopyPool, shm_dir: pathlib.Path, pieces: list[Piece], message: str
) -> None:
    segment = removed_segment(shm_dir, b"0123456789")
    slots = [bytearray(10), bytearray(5)]
    request = request_of([b"0123456789", segment])
    with pytest.raises(PayloadError, match=message) as caught:
        start_of(pool, request, slots, pieces)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(SegmentSizeError, match="wanted 2 bytes at offset 9, but the file has 10 bytes"):
        start_of(pool, request, slots, [(0, 1, 9, 0, 2)])
    for slot in slots:
        assert not any(slot)
        resize(slot)
    request.close(False)


def test_other_bad_arguments(pool: _native.CopyPool) -> None:
    for num_threads in (0, -1):
        with pytest.raises(ConfigError, match=f"num_threads must be at least 1, got {num_threads}"):
            _native.CopyPool(num_threads)
    with pytest.raises(PayloadError, match="slot 0 wanted, but there are 0"):
        start(pool, [b""], [], [(0, 0, 0, 0, 0)])
    with pytest.raises(BufferError, match="writable buffer is needed"):
        start(pool, [], [b"read-only"], [])  # no piece needs it; it is no slot all the same
    with pytest.raises(PayloadError, match="item 3 wanted, but there are 0"):
        pool.start(request_of([]), [], _native.ChunkTable([3], []))
    with pytest.raises((TypeError, ValueError)):
        start(pool, [b""], [bytearray(1)], [(0, 0, 0, 0)])  # type: ignore[list-item]
    job = start(pool, [b"x"], [bytearray(1)], [(0, 0, 0, 0, 1)])
    for index in (-1, 1, 2**70):
        with pytest.raises(PayloadError, match=f"chunk {index} wanted, but the job has 1"):
            job.wait(index, 0)
        with pytest.raises(PayloadError):
            job.is_done(index)
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds"):
        job.wait(0, float("nan"))
    with pytest.raises(PayloadError, match="chunk 0 wanted, but the job has 0"):
        start(pool, [], [], []).wait(0, 0)


def test_a_segment_that_a_peer_cuts_ends_the_job_with_the_first_error(
    pool: _native.CopyPool, shm_dir: pathlib.Path
) -> None:
    _native.write_segment(shm_dir, "cut", bytes(9000))
    segment = _native.Segment.open(shm_dir, "cut")
    slots = [bytearray(1000), bytearray(1000)]
    job = start(pool, [segment], slots, chunked(9000, 1000))
    job.permit(2)
    job.wait(1, LIMIT_S)
    os.truncate(shm_dir / "cut", 2500)
    job.permit(9)
    with pytest.raises(SegmentSizeError, match="was truncated while it was read") as first:
        job.wait(8, LIMIT_S)
    for slot in slots:
        resize(slot)  # the job is over when its error is raised
    for i in range(9):
        with pytest.raises(SegmentSizeError) as again:
            job.wait(i, LIMIT_S)
        assert str(again.value) == str(first.value)
    (shm_dir / "cut").unlink()


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_running_job_that_is_cancelled_lets_its_buffers_go(pool: _native.CopyPool, how: str) -> None:
    source = bytearray(random_bytes(8 * MIB))
    for num_waited in (0, 1, 3):
        slots = [bytearray(256 * KIB) for _ in range(32)]
        job = start(pool, [source], slots, chunked(8 * MIB, 256 * KIB))
        assert_exported(slots[5])
        assert_exported(source)
        job.permit(32)
        for i in range(num_waited):
            job.wait(i, LIMIT_S)
        if how == "cancel":
            job.cancel()
            job.cancel()
            there = [job.is_done(i) for i in range(32)]
            assert there[:num_waited] == [True] * num_waited
            for i in range(32):
                if there[i]:
                    job.wait(i, 0)
                else:
                    with pytest.raises(ClosedError, match=f"cancelled before chunk {i} was copied"):
                        job.wait(i, LIMIT_S)
        del job
        gc.collect()
        for slot in slots:
            resize(slot)
        before = [bytes(slot) for slot in slots]
        resize(source)
        assert [bytes(slot) for slot in slots] == before  # nobody writes to them any more


def test_a_wait_in_another_thread_ends_with_a_cancel(pool: _native.CopyPool) -> None:
    job = start(pool, [b"abc"], [bytearray(3)], [(0, 0, 0, 0, 3)])
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            job.wait(0, LIMIT_S)
        except ClosedError as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    job.cancel()
    waiter.join(LIMIT_S)
    assert [type(error) for error in outcome] == [ClosedError]


def test_buffers_and_segments_are_released_when_all_is_there(pool: _native.CopyPool, shm_dir: pathlib.Path) -> None:
    source, slots = bytearray(b"abcdef"), [bytearray(3), bytearray(3)]
    before = open_descriptors()
    segment = removed_segment(shm_dir, b"uvwxyz")
    job = start(pool, [source, segment], slots, [(0, 0, 0, 0, 3), (1, 1, 0, 0, 3)])
    segment.close()
    assert open_descriptors() == before + 1
    job.permit(2)
    job.wait(0, LIMIT_S)
    job.wait(1, LIMIT_S)
    assert slots == [b"abc", b"uvw"]
    assert open_descriptors() == before
    for buffer in (source, *slots):
        resize(buffer)
    job.wait(0, 0)
    assert job.is_done(1)
