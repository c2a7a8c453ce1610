"""TensorData: what is a description, and what is refused with which numbers."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from mmcopy import Inline, ShmHandle, TensorData
from mmcopy.errors import DtypeError, PayloadError
from mmcopy.tensors import DTYPES


@pytest.mark.parametrize("shape", [(), (0,), (0, 3, 4), (2, 0), (2, 3), (1, 5, 3, 7)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_bytes_are_shape_times_item_size(dtype: str, shape: tuple[int, ...]) -> None:
    elements = 1
    for n in shape:
        elements *= n
    nbytes = elements * DTYPES[dtype]
    assert TensorData(dtype, shape, Inline(bytes(nbytes))).nbytes == nbytes
    assert TensorData(dtype, shape, ShmHandle("mmcopy-x", 0, nbytes)).nbytes == nbytes
    with pytest.raises(PayloadError, match=rf"takes {nbytes} bytes, the payload has {nbytes + 1}"):
        TensorData(dtype, shape, Inline(bytes(nbytes + 1)))


def test_two_gib_and_more_are_counted_exactly() -> None:
    shape = (2**31 + 1, 2)
    assert TensorData("float32", shape, ShmHandle("mmcopy-x", 0, (2**31 + 1) * 8)).nbytes == 17179869192


@pytest.mark.parametrize("dtype", ["float31", "", "torch.float32", "object", "Float32"])
def test_the_dtype_table_is_closed(dtype: str) -> None:
    with pytest.raises(DtypeError, match=rf"unknown dtype '{dtype}'; known: .*bfloat16"):
        TensorData(dtype, (1,), Inline(b"\0\0\0\0"))


@pytest.mark.parametrize(("shape", "why"), [((-1,), "negative"), ((2.5,), "not a sequence"), (None, "not a sequence")])
def test_shapes_that_are_none(shape: object, why: str) -> None:
    with pytest.raises(PayloadError, match=why):
        TensorData("uint8", shape, Inline(b""))  # type: ignore[arg-type]


def test_payloads_that_are_none() -> None:
    with pytest.raises(PayloadError, match="payload is bytes"):
        TensorData("uint8", (1,), b"a")  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="offset is -1"):
        ShmHandle("mmcopy-x", -1, 1)
    with pytest.raises(PayloadError, match=f"nbytes is {2**64}"):
        ShmHandle("mmcopy-x", 0, 2**64)


def test_a_description_is_a_value() -> None:
    data = TensorData("uint8", [2, 1], Inline(b"ab"))  # type: ignore[arg-type]
    assert data == TensorData("uint8", (2, 1), Inline(b"ab"))
    assert data.shape == (2, 1)
    assert data.path == "inline"
    assert TensorData("uint8", (1,), ShmHandle("n", 0, 1)).path == "segment"
    assert pickle.loads(pickle.dumps(data)) == data
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.dtype = "int8"  # type: ignore[misc]
