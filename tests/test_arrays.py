"""flatten(): every kind of array gives the bytes that numpy's own C-order copy gives."""

from __future__ import annotations

import array
import ctypes
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch._subclasses.fake_tensor import FakeTensorMode

from mmcopy.arrays import flatten
from mmcopy.errors import ArrayTypeError, DtypeError
from mmcopy.tensors import DTYPES

NUMPY_DTYPES = [name for name in DTYPES if not name.startswith(("bfloat", "float8"))]


def check(given_array: object, dtype: str, shape: tuple[int, ...], oracle: bytes) -> None:
    flat = flatten(given_array)
    assert (flat.dtype, flat.shape) == (dtype, shape)
    assert (flat.nbytes, flat.array.tobytes()) == (len(oracle), oracle)


@given(st.sampled_from(NUMPY_DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), st.data())
@settings(max_examples=150, deadline=None)
def test_numpy_of_any_dtype_shape_and_strides(dtype: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    source: np.ndarray[Any, Any] = data.draw(hnp.arrays(dtype, shape))
    source = source.transpose(data.draw(st.permutations(range(len(shape)))))
    if source.ndim:
        source = source[:: data.draw(st.sampled_from([1, -1, 2]))]
    check(source, dtype, source.shape, source.tobytes())


def test_strides_of_every_kind() -> None:
    base = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for view in (base[1:], base.T, base[::-1], base[:, ::2], np.broadcast_to(base[0], (5, 3, 4)), base[0, 0, 1:]):
        check(view, "int32", view.shape, view.tobytes())


def test_read_only_big_endian_and_scalar() -> None:
    source = np.arange(5, dtype=np.float32)
    source.flags.writeable = False
    check(source, "float32", (5,), source.tobytes())
    check(source.astype(">f4"), "float32", (5,), source.tobytes())
    check(np.float32(1.5), "float32", (), np.float32(1.5).tobytes())
    check(np.array(7, dtype=np.int64), "int64", (), np.int64(7).tobytes())


def test_contiguous_arrays_are_not_copied() -> None:
    source = np.arange(8, dtype=np.uint16)
    assert np.shares_memory(flatten(source).array, source)
    tensor = torch.arange(8)[2:]
    assert flatten(tensor).address == flatten(tensor).array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_small_floats_keep_every_bit_pattern(name: str) -> None:
    patterns = np.arange(65536 if name == "bfloat16" else 256).astype(np.uint16 if name == "bfloat16" else np.uint8)
    check(patterns.view(getattr(ml_dtypes, name)), name, patterns.shape, patterns.tobytes())
    signed = torch.from_numpy(patterns.view(np.int16 if name == "bfloat16" else np.int8))
    check(signed.view(getattr(torch, name)), name, patterns.shape, patterns.tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4, 6), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_torch_tensors(name: str, shape: tuple[int, ...]) -> None:
    nbytes = DTYPES[name] * math.prod(shape)
    raw = (torch.arange(nbytes) % 2).to(torch.uint8)  # 0 and 1 are valid in bool, too
    tensor = raw.view(getattr(torch, name)).reshape(shape) if nbytes else torch.empty(shape, dtype=getattr(torch, name))
    check(tensor, name, shape, raw.numpy().tobytes())


def test_torch_views() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    for view in (
        base[1:],
        base.permute(2, 0, 1),
        base[0].expand(3, 3, 4),
        base.flip(0),
        base[:, ::2],
        base.flatten()[2:5],
        torch.view_as_complex(base.reshape(3, 4, 2)).conj().imag,  # carries torch's negative bit
    ):
        check(view, "float32", tuple(view.shape), view.numpy(force=True).tobytes())
    leaf = torch.ones(3, requires_grad=True)
    check(leaf, "float32", (3,), leaf.detach().numpy().tobytes())
    channels_last = base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    check(channels_last, "float32", (1, 2, 3, 4), base.numpy().tobytes())


def test_the_buffer_protocol_and_dlpack() -> None:
    check(b"abc", "uint8", (3,), b"abc")
    check(bytearray(b"abcd"), "uint8", (4,), b"abcd")
    check(memoryview(b"abcdef")[::2], "uint8", (3,), b"ace")
    check(array.array("f", [1.0, 2.0]), "float32", (2,), np.float32([1, 2]).tobytes())
    check((ctypes.c_int32 * 2 * 3)(), "int32", (3, 2), bytes(24))
    check(
        OnlyDlpack(np.arange(6, dtype=np.float16).reshape(2, 3)), "float16", (2, 3), np.arange(6, dtype="f2").tobytes()
    )
    check(OnlyDlpack(torch.ones(3, dtype=torch.bfloat16)), "bfloat16", (3,), np.uint16([0x3F80] * 3).tobytes())


class OnlyDlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, inner: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._inner, self._device = inner, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@pytest.mark.parametrize(
    ("bad", "error", "why"),
    [
        ([1, 2], ArrayTypeError, "list is no array"),
        (None, ArrayTypeError, "NoneType is no array"),
        ("text", ArrayTypeError, "str is no array"),
        (np.array([object()]), DtypeError, "object"),
        (np.zeros(2, dtype=np.complex64), DtypeError, "complex64"),
        (np.zeros(2, dtype=[("a", "i4")]), DtypeError, "cannot be sent"),
        (torch.zeros(2, dtype=torch.complex64), DtypeError, "complex64"),
        (torch.eye(2).to_sparse(), ArrayTypeError, "sparse"),
        (torch.zeros(2, device="meta"), ArrayTypeError, "meta"),
        (OnlyDlpack(np.zeros(2), device=(2, 3)), ArrayTypeError, r"device \(2, 3\)"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_what_is_no_array(bad: object, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        flatten(bad)


def freed() -> torch.Tensor:
    tensor = torch.ones(1 << 10)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "found", "wanted"),
    [
        (freed(), 0, 4096),
        (torch.nn.Parameter(freed()), 0, 4096),
        (cut(torch.ones(1000)[500:], 1024), 1024, 4000),
        (cut(torch.ones(10, 10).T, 396), 396, 400),
        (cut(torch.ones(1, 10).expand(5, 10), 39), 39, 40),
        (cut(torch.ones(4, 10)[:, ::3], 156), 156, 160),
        (cut(torch.ones((), dtype=torch.bfloat16), 1), 1, 2),
        (cut(torch.view_as_complex(torch.ones(3, 2)).conj().imag, 20), 20, 24),
    ],
    ids=["freed", "parameter", "offset", "transposed", "expanded", "strided", "0-d", "negated"],
)
def test_a_storage_that_is_too_short_is_refused(tensor: torch.Tensor, found: int, wanted: int) -> None:
    """Its memory is another's by now, or past the end of the mapping."""
    with pytest.raises(ArrayTypeError, match=f"storage has {found} bytes, its elements are in the first {wanted} "):
        flatten(tensor)


def test_a_storage_of_the_exact_length_and_one_under_an_empty_tensor_are_sent() -> None:
    short = cut(torch.arange(10, dtype=torch.int32)[2:5], 20)
    check(short, "int32", (3,), np.arange(2, 5, dtype=np.int32).tobytes())
    check(cut(torch.ones(10, 10).T[:, 9:], 400), "float32", (10, 1), np.ones(10, np.float32).tobytes())
    check(cut(torch.ones(3, 5)[:0], 0), "float32", (0, 5), b"")


class Wrapper(torch.Tensor):
    """Another tensor's values, and no memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, *_args: Any, **_options: Any) -> Any:
        raise NotImplementedError


def test_tensors_without_memory_of_their_own_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(4)
    with pytest.raises(ArrayTypeError, match="FakeTensor has no memory of its own: 16 bytes"):
        flatten(fake)
    with pytest.raises(ArrayTypeError, match="Wrapper has no memory of its own"):
        flatten(torch.Tensor._make_wrapper_subclass(Wrapper, (3,), dtype=torch.float32, device="cpu"))

    def refused(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ArrayTypeError, match="Tensor has no memory of its own"):
            flatten(tensor)
        return tensor

    torch.func.vmap(refused)(torch.ones(3, 2))
