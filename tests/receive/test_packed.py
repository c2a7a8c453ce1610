"""Tensors in one buffer: each of its bytes, dtype and shape, however many are cut off at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcopy import Inline, TensorData
from mmcopy.receive.plan import pack, strides_of, views_into
from mmcopy.tensors import DTYPES


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


SHAPES = st.sampled_from([(), (0,), (1,), (64,), (256,), (3, 0, 2), (2, 128), (1, 1, 256), (7, 11), (4, 3, 64)])
RUNS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES, st.integers(1, 5)), min_size=1, max_size=6)


def item(dtype: str, shape: tuple[int, ...]) -> TensorData:
    nbytes = DTYPES[dtype]
    for n in shape:
        nbytes *= n
    return TensorData(dtype, shape, Inline(bytes(nbytes)))


@given(runs=RUNS)
def test_each_is_its_bytes(torch: Any, runs: list[tuple[str, tuple[int, ...], int]]) -> None:
    items = [item(dtype, shape) for dtype, shape, count in runs for _ in range(count)]
    layout = pack(tuple(each.nbytes for each in items))
    base = torch.arange(layout.nbytes, dtype=torch.int64).to(torch.uint8)
    tensors = views_into(base, layout.starts, items)
    assert len(tensors) == len(items)
    for tensor, start, data in zip(tensors, layout.starts, items, strict=True):
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{data.dtype}", data.shape)
        assert tensor.is_contiguous()
        assert tensor.stride() == torch.empty(data.shape, device="meta").stride()
        if data.nbytes:
            assert tensor.data_ptr() == base.data_ptr() + start
            found = tensor.reshape(-1).view(torch.uint8).tolist()
            assert found == base[start : start + data.nbytes].tolist()


def test_equal_neighbours_are_the_callers_own(torch: Any) -> None:
    """What torch counts as one of several views of a call may not be changed in place where gradients are wanted."""
    items = [item("float32", (4, 64))] * 3
    layout = pack(tuple(each.nbytes for each in items))
    tensors = views_into(torch.zeros(layout.nbytes, dtype=torch.uint8), layout.starts, items)
    weight = torch.ones(4, 64, requires_grad=True)
    tensors[1].add_(weight)
    tensors[1].sum().backward()
    assert weight.grad.tolist() == torch.ones(4, 64).tolist()
    assert tensors[2].requires_grad is False


def test_strides_follow_torch() -> None:
    assert strides_of((2, 0, 3)) == (3, 3, 1)
    assert strides_of(()) == ()
