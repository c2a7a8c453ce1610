"""Every cast against torch: bit for bit, and NaN lanes by class, since their payloads are nobody's contract."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy import _native
from mmcopy.errors import DtypeError, PayloadError

torch = pytest.importorskip("torch")

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16, "uint8": np.uint8}
INFINITY = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
PAIRS = sorted(_native.CASTS)


def torch_cast(bits: np.ndarray, src: str, dst: str) -> np.ndarray:
    """What torch makes of these bit patterns, as bit patterns."""
    if bits.size == 0:  # torch has no stride to view an empty tensor through
        return np.empty(0, BITS[dst])
    as_bytes = torch.from_numpy(bits.copy()).view(torch.uint8)
    cast = as_bytes.view(getattr(torch, src)).to(getattr(torch, dst))
    result: np.ndarray = cast.view(torch.uint8).numpy().view(BITS[dst])
    return result


def native_cast(bits: np.ndarray, src: str, dst: str, *, num_threads: int = 1) -> np.ndarray:
    out = np.empty(bits.size, BITS[dst])
    _native.cast_into(bits, src, out, dst, num_threads=num_threads)
    return out


def is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "uint8":
        return np.zeros(bits.shape, bool)
    magnitude = bits & (np.iinfo(bits.dtype).max >> 1)
    result: np.ndarray = magnitude > INFINITY[dtype]
    return result


def assert_like_torch(bits: np.ndarray, src: str, dst: str, *, num_threads: int = 1) -> None:
    ours, theirs = native_cast(bits, src, dst, num_threads=num_threads), torch_cast(bits, src, dst)
    nan = is_nan(bits, src)
    assert np.array_equal(is_nan(ours, dst), nan)
    assert np.array_equal(is_nan(theirs, dst), nan)
    differ = np.flatnonzero((ours != theirs) & ~nan)
    first = [(hex(bits[i]), hex(ours[i]), hex(theirs[i])) for i in differ[:5]]
    assert first == [], f"{differ.size} of {bits.size}: (source, ours, torch's)"


def test_the_table_of_casts() -> None:
    assert {
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "float16"),
        ("float16", "float32"),
        ("uint8", "float32"),
        ("uint8", "bfloat16"),
        ("uint8", "float16"),
    } == _native.CASTS


@pytest.mark.parametrize(("src", "dst"), [pair for pair in PAIRS if pair[0] != "float32"])
def test_every_pattern_of_at_most_16_bits(src: str, dst: str) -> None:
    assert_like_torch(np.arange(1 << (8 * _native.DTYPES[src]), dtype=np.uint32).astype(BITS[src]), src, dst)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_random_float32_patterns(dst: str, num_threads: int) -> None:
    random = np.random.default_rng(1)
    anything = random.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    # Patterns are spread evenly over exponents, so few are subnormal and few are in float16's range.
    subnormal = random.integers(0, 1 << 23, 1 << 17, dtype=np.uint32) | (anything[: 1 << 17] & 0x8000_0000)
    near_float16 = random.integers(0x3280_0000, 0x4790_0000, 1 << 19, dtype=np.uint32)
    assert_like_torch(np.concatenate([anything, subnormal, near_float16]), "float32", dst, num_threads=num_threads)


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_ties_between_all_neighbours_and_one_bit_beside_them(dst: str) -> None:
    patterns = np.arange(INFINITY[dst], dtype=np.uint16)
    values = native_cast(patterns, dst, "float32").view(np.float32)
    # Exact: a tie needs one bit of significand more than the neighbours have.
    ties = ((values[:-1].astype(np.float64) + values[1:].astype(np.float64)) / 2).astype(np.float32)
    bits = ties.view(np.uint32)
    both_signs = np.concatenate([bits, bits + 1, bits - 1])
    both_signs = np.concatenate([both_signs, both_signs | np.uint32(0x8000_0000)])
    assert_like_torch(both_signs, "float32", dst)


@pytest.mark.parametrize("dst", ["bfloat16", "float16"])
def test_float32_there_and_back_keeps_what_fits(dst: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    there = native_cast(patterns, dst, "float32")
    back = native_cast(there, "float32", dst)
    nan = is_nan(patterns, dst)
    assert np.array_equal(back[~nan], patterns[~nan])
    assert is_nan(back, dst)[nan].all()


@pytest.mark.parametrize(
    ("src", "bits", "dst", "wanted"),
    [
        ("bfloat16", 0x3F80, "float32", 0x3F80_0000),  # 1.0
        ("float32", 0x3F80_0000, "bfloat16", 0x3F80),
        ("float32", 0x8000_0000, "bfloat16", 0x8000),  # -0.0
        ("float32", 0x3F80_8000, "bfloat16", 0x3F80),  # ties to even, down
        ("float32", 0x3F81_8000, "bfloat16", 0x3F82),  # ties to even, up
        ("float32", 0x7F7F_FFFF, "bfloat16", 0x7F80),  # the largest rounds to infinity
        ("float32", 0x0000_0001, "bfloat16", 0x0000),
        ("float32", 0x0001_8000, "bfloat16", 0x0002),  # subnormal tie
        ("float32", 0x477F_EFFF, "float16", 0x7BFF),  # just below 65520
        ("float32", 0x477F_F000, "float16", 0x7C00),  # 65520
        ("float32", 0x3380_0000, "float16", 0x0001),  # smallest subnormal
        ("float32", 0x3300_0000, "float16", 0x0000),  # half of it: to even
        ("float32", 0xFF80_0000, "float16", 0xFC00),  # -infinity
        ("uint8", 255, "float16", 0x5BF8),
        ("uint8", 255, "bfloat16", 0x437F),
        ("uint8", 0, "float16", 0),
    ],
)
def test_known_patterns(src: str, bits: int, dst: str, wanted: int) -> None:
    assert hex(native_cast(np.array([bits], BITS[src]), src, dst)[0]) == hex(wanted)


@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=1100), start=st.integers(0, 3), num_threads=st.integers(1, 3))
@settings(deadline=None)
def test_any_float32_patterns_at_any_alignment(bits: list[int], start: int, num_threads: int) -> None:
    patterns = np.array(bits, np.uint32)
    source = bytes(start) + patterns.tobytes()
    for dst in ("bfloat16", "float16"):
        target = bytearray(start + 2 * len(bits))
        _native.cast_into(
            memoryview(source)[start:], "float32", memoryview(target)[start:], dst, num_threads=num_threads
        )
        assert target[:start] == bytes(start)
        ours, theirs = np.frombuffer(target, np.uint16, offset=start), torch_cast(patterns, "float32", dst)
        nan = is_nan(patterns, "float32")
        assert np.array_equal(ours[~nan], theirs[~nan])
        assert np.array_equal(is_nan(ours, dst), nan)


@pytest.mark.parametrize("elements", [0, 1, 1023, 1024, 1025, (1 << 19) + 1])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_number_of_elements(src: str, dst: str, elements: int) -> None:
    bits = np.random.default_rng(elements).integers(0, 256, elements * _native.DTYPES[src], dtype=np.uint8)
    assert_like_torch(bits.view(BITS[src]), src, dst, num_threads=2)


@pytest.mark.parametrize("dtype", sorted(_native.DTYPES))
def test_equal_dtypes_are_a_plain_copy(dtype: str) -> None:
    nbytes = 8 * _native.DTYPES[dtype]
    src, dst = bytes(range(nbytes)), bytearray(nbytes)
    _native.cast_into(src, dtype, dst, dtype)
    assert dst == src


@pytest.mark.parametrize(("src", "dst"), [("int64", "float32"), ("float32", "uint8"), ("float16", "bfloat16")])
def test_other_pairs_are_refused_with_the_pairs_there_are(src: str, dst: str) -> None:
    with pytest.raises(DtypeError, match=f"no cast from {src} to {dst}; supported: .*uint8 to bfloat16"):
        _native.cast_into(b"", src, bytearray(), dst)


@pytest.mark.parametrize("name", ["", "float", "Float32", "torch.float32", "bf16", "float32\0", "complex64"])
def test_unknown_names_are_refused_with_the_table(name: str) -> None:
    for src, dst in [(name, "float32"), ("float32", name)]:
        with pytest.raises(DtypeError, match=r"known: .*bfloat16"):
            _native.cast_into(b"", src, bytearray(), dst)


def test_wrong_lengths_are_refused_with_the_numbers() -> None:
    with pytest.raises(PayloadError, match="source has 8 bytes, target has 5; 4 wanted"):
        _native.cast_into(bytes(8), "float32", bytearray(5), "bfloat16")
    with pytest.raises(PayloadError, match="7 bytes are not a whole number of float32 elements of 4 bytes"):
        _native.cast_into(bytes(7), "float32", bytearray(4), "bfloat16")
    with pytest.raises(PayloadError, match="7 bytes are not a whole number of float32 elements of 4 bytes"):
        _native.cast_into(bytes(7), "float32", bytearray(7), "float32")


def test_a_cast_onto_its_own_input_is_refused() -> None:
    buffer = memoryview(bytearray(16))
    with pytest.raises(PayloadError, match="share memory"):
        _native.cast_into(buffer[:8], "float32", buffer[4:8], "bfloat16")
