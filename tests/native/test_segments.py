"""Segments of the native module: what is written is read, checked, removed once and closed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmcopy import _native
from mmcopy.errors import ClosedError, DtypeError, MmcopyError, PayloadError, SegmentSizeError
from tests.rigs.arrays import MIB, random_bytes

U64_MAX = 2**64 - 1
EDGES = [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, 5 * MIB + 3]

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def read(
    shm_dir: pathlib.Path, name: str, *, offset: int = 0, nbytes: int | None = None, num_threads: int = 1
) -> bytes:
    with _native.Segment.open(shm_dir, name) as segment:
        dst = bytearray(segment.file_nbytes - offset if nbytes is None else nbytes)
        segment.read_into(dst, offset, num_threads=num_threads)
    return bytes(dst)


@pytest.fixture
def digits(shm_dir: pathlib.Path) -> Iterator[_native.Segment]:
    """An open segment of ten bytes."""
    _native.write_segment(shm_dir, "digits", b"0123456789")
    with _native.Segment.open(shm_dir, "digits") as segment:
        yield segment
    (shm_dir / "digits").unlink(missing_ok=True)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("nbytes", EDGES)
def test_what_is_written_is_read(shm_dir: pathlib.Path, nbytes: int, num_threads: int) -> None:
    data = random_bytes(nbytes).tobytes()
    assert _native.write_segment(shm_dir, "s", data, num_threads=num_threads) == nbytes
    found = (shm_dir / "s").stat()
    assert (found.st_size, stat.S_IMODE(found.st_mode), found.st_nlink) == (nbytes, 0o600, 1)
    with _native.Segment.open(shm_dir, "/s") as segment:
        assert (segment.name, segment.file_nbytes, segment.uid) == ("s", nbytes, os.geteuid())
        segment.check(0, nbytes)
        dst = bytearray(nbytes)
        segment.read_into(dst, 0, num_threads=num_threads)
        assert dst == data
        assert segment.unlink() is True
        assert segment.unlink() is False
        segment.read_into(dst, 0)


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), sorted(_native.CASTS))
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_cast_on_the_way_is_the_cast_before(
    shm_dir: pathlib.Path, src_dtype: str, dst_dtype: str, num_threads: int
) -> None:
    elements = MIB + 3
    src = random_bytes(elements * _native.DTYPES[src_dtype]).tobytes()
    wanted = bytearray(elements * _native.DTYPES[dst_dtype])
    _native.cast_into(src, src_dtype, wanted, dst_dtype)
    written = _native.write_segment(
        shm_dir, "s", src, src_dtype=src_dtype, dst_dtype=dst_dtype, num_threads=num_threads
    )
    assert written == len(wanted)
    assert read(shm_dir, "s") == wanted
    (shm_dir / "s").unlink()


def test_equal_dtypes_are_written_as_they_are(shm_dir: pathlib.Path) -> None:
    assert _native.write_segment(shm_dir, "s", b"12345678", src_dtype="int32", dst_dtype="int32") == 8
    assert read(shm_dir, "s") == b"12345678"
    (shm_dir / "s").unlink()


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype", "error", "message"),
    [
        ("float32", None, DtypeError, "go together: got float32 and None"),
        (None, "float32", DtypeError, "go together: got None and float32"),
        ("float32", "int8", DtypeError, "no cast from float32 to int8"),
        ("float32", "bf16", DtypeError, 'unknown dtype "bf16"'),
        ("float32", "bfloat16", PayloadError, "7 bytes are not a whole number of float32 elements of 4"),
        ("float32", "float32", PayloadError, "7 bytes are not a whole number of float32 elements of 4"),
    ],
)
def test_a_cast_that_cannot_be_creates_no_file(
    shm_dir: pathlib.Path, src_dtype: str | None, dst_dtype: str | None, error: type[MmcopyError], message: str
) -> None:
    with pytest.raises(error, match=message):
        _native.write_segment(shm_dir, "s", b"1234567", src_dtype=src_dtype, dst_dtype=dst_dtype)


@given(given_name=st.text(max_size=300))
@settings(deadline=None)
def test_a_name_that_passes_is_one_component(given_name: str) -> None:
    try:
        name = _native.validate_segment_name(given_name)
    except PayloadError:
        stripped = given_name.lstrip("/")
        too_long = len(stripped.encode()) > 255
        assert stripped in ("", ".", "..") or "/" in stripped or "\0" in stripped or too_long
    else:
        assert name == given_name.lstrip("/")
        assert pathlib.PurePosixPath("/d", name).parts == ("/", "d", name)


def test_names_that_are_no_str_are_a_type_error(shm_dir: pathlib.Path) -> None:
    with pytest.raises(TypeError):
        _native.Segment.open(shm_dir, b"bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (10, 0), (3, 7), (np.int64(3), np.uint8(7)), (False, True)])
def test_ranges_inside_pass(digits: _native.Segment, offset: int, nbytes: int) -> None:
    digits.check(offset, nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 11),
        (11, 0),
        (10, 1),
        (U64_MAX, 1),
        (1, U64_MAX),
        (U64_MAX, U64_MAX),
        (U64_MAX - 9, 10),
        (2**64, 0),
        (0, 2**64),
        (2**200, 2**200),
        (-1, 1),
        (0, -1),
    ],
)
def test_ranges_outside_are_refused_with_the_numbers(digits: _native.Segment, offset: int, nbytes: int) -> None:
    with pytest.raises(SegmentSizeError) as caught:
        digits.check(offset, nbytes)
    for number in ("digits", offset, nbytes, 10):
        assert str(number) in str(caught.value)
    if 0 <= nbytes < 100:
        dst = bytearray(nbytes)
        with pytest.raises(SegmentSizeError):
            digits.read_into(dst, offset)
        assert dst == bytes(nbytes)


@pytest.mark.parametrize("bad", [1.0, "1", None])
def test_offsets_that_are_no_int_are_a_type_error(digits: _native.Segment, bad: object) -> None:
    with pytest.raises(TypeError):
        digits.check(bad, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        digits.read_into(bytearray(), bad)  # type: ignore[arg-type]


@given(offset=st.integers(0, 5100), nbytes=st.integers(0, 5100))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_is_its_slice_or_an_error(tmp_path: pathlib.Path, offset: int, nbytes: int) -> None:
    data = random_bytes(5000).tobytes()
    (tmp_path / "s").write_bytes(data)
    if offset + nbytes <= 5000:
        assert read(tmp_path, "s", offset=offset, nbytes=nbytes) == data[offset : offset + nbytes]
    else:
        with pytest.raises(SegmentSizeError):
            read(tmp_path, "s", offset=offset, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", [2 * 1024 * MIB + 4096, 4 * 1024 * MIB + 1])
def test_the_last_bytes_beyond_2_and_4_gib(shm_dir: pathlib.Path, nbytes: int) -> None:
    with (shm_dir / "sparse").open("wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 3)
        file.write(b"end")
    with _native.Segment.open(shm_dir, "sparse") as segment:
        assert segment.file_nbytes == nbytes
        segment.check(0, nbytes)
        dst = bytearray(6)
        segment.read_into(dst, nbytes - 6)
        assert dst == b"\0\0\0end"
        with pytest.raises(SegmentSizeError):
            segment.check(1, nbytes)
        assert segment.unlink()


def test_a_name_is_removed_only_while_it_is_this_file(shm_dir: pathlib.Path) -> None:
    _native.write_segment(shm_dir, "s", b"first")
    with _native.Segment.open(shm_dir, "s") as segment, _native.Segment.open(shm_dir, "s") as other:
        (shm_dir / "s").unlink()
        (shm_dir / "s").write_bytes(b"a stranger's")
        assert segment.unlink() is False
        assert other.unlink() is False
        dst = bytearray(5)
        segment.read_into(dst, 0)
        assert dst == b"first"
    assert (shm_dir / "s").read_bytes() == b"a stranger's"
    assert _native.unlink_segment(shm_dir, "s", _native.Process.current()) is True


def test_closing_twice_and_using_afterwards(shm_dir: pathlib.Path) -> None:
    _native.write_segment(shm_dir, "s", b"abc")
    with _native.Segment.open(shm_dir, "s") as segment:
        assert repr(segment) == f'<mmcopy._native.Segment "s" 3 bytes, uid {os.geteuid()}, open>'
    segment.close()
    for call in (
        lambda: segment.check(0, 0),
        lambda: segment.read_into(bytearray(1), 0),
        segment.unlink,
        segment.__enter__,
    ):
        with pytest.raises(ClosedError, match='segment "s" is closed'):
            call()
    assert (segment.name, segment.file_nbytes) == ("s", 3)
    assert "closed" in repr(segment)
    assert (shm_dir / "s").exists(), "close removes no name"
    assert _native.unlink_segment(shm_dir, "s", _native.Process.current())


def test_leaving_the_block_keeps_the_error_inside(shm_dir: pathlib.Path) -> None:
    _native.write_segment(shm_dir, "s", b"abc")
    dst = bytearray(3)

    def fail_inside() -> None:
        with _native.Segment.open(shm_dir, "s") as segment:
            segment.read_into(memoryview(dst), 0)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert dst == b"abc"
    assert _native.unlink_segment(shm_dir, "s", _native.Process.current())


def test_a_close_in_another_thread_lets_reads_finish(shm_dir: pathlib.Path) -> None:
    data = random_bytes(2 * MIB).tobytes()
    _native.write_segment(shm_dir, "s", data)
    for _ in range(20):
        segment = _native.Segment.open(shm_dir, "s")
        closer = threading.Thread(target=segment.close)
        dst = bytearray(len(data))
        closer.start()
        with contextlib.suppress(ClosedError):
            segment.read_into(dst, 0, num_threads=2)
            assert dst == data
        closer.join(timeout=20)
    assert _native.unlink_segment(shm_dir, "s", _native.Process.current())


def test_namespace_id_is_boot_id_and_device(shm_dir: pathlib.Path) -> None:
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert _native.shm_namespace_id() == f"{boot_id}:{pathlib.Path('/dev/shm').stat().st_dev}"
    assert _native.shm_namespace_id(shm_dir) == f"{boot_id}:{shm_dir.stat().st_dev}"
    assert _native.shm_namespace_id(shm_dir / "missing") == ""


def test_namespace_id_is_the_stock_consumers() -> None:
    mm_shm = pytest.importorskip("smg_grpc_servicer.mm_shm")
    assert _native.shm_namespace_id() == mm_shm.shm_namespace_id()
