"""``out``: the caller's own tensors are filled, or refused before a byte is written."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mmcopy import Receiver, Sender, TransportConfig
from mmcopy.errors import DeviceError

ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)


@pytest.fixture
def sender(shm_dir: pathlib.Path) -> Iterator[Sender]:
    with Sender(ALWAYS, shm_dir=shm_dir) as sender:
        yield sender


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_out_is_filled_in_the_form_of_the_items(sender: Sender, shm_dir: pathlib.Path, framework: str) -> None:
    source = {
        "a": np.arange(70_000, dtype=np.float32).reshape(100, 700),
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 3)),
    }
    make = torch.from_numpy if framework == "torch" else np.asarray
    with Receiver("cpu", framework=framework, shm_dir=shm_dir) as receiver:  # type: ignore[arg-type]
        out: dict[str, Any] = {key: make(np.full_like(value, 1)) for key, value in reversed(source.items())}
        got = receiver.receive({key: sender.send(value) for key, value in source.items()}, out=out)
        for key, value in source.items():
            assert got[key] is out[key]
            assert np.array_equal(np.asarray(out[key]), value)
        single = make(np.zeros(3, np.int32))
        assert receiver.receive(sender.send(np.arange(3, dtype=np.int32)), out=single) is single
        assert list(single) == [0, 1, 2]


OUTS = [
    (torch.zeros(4, dtype=torch.int64), "int64 [4] on cpu"),
    (torch.zeros(5, dtype=torch.int32), "int32 [5] on cpu"),
    (torch.zeros(8, dtype=torch.int32)[::2], "not contiguous"),
    (torch.zeros(4, dtype=torch.int32, device="meta"), "on meta"),
    (np.zeros(4, np.int32), "ndarray, not a torch tensor"),
    (None, "NoneType, not a torch tensor"),
]


@pytest.mark.parametrize(("bad", "why"), OUTS, ids=[why for _, why in OUTS])
def test_a_refused_out_is_not_written_to(sender: Sender, shm_dir: pathlib.Path, bad: Any, why: str) -> None:
    good = torch.full((4,), 9, dtype=torch.int32)
    with Receiver("cpu", shm_dir=shm_dir) as receiver:
        items = [sender.send(np.arange(4, dtype=np.int32)) for _ in range(2)]
        with pytest.raises(DeviceError, match=rf"out 1 is .*{why.replace('[', '.').replace(']', '.')}"):
            receiver.receive(items, out=[good, bad])
    assert good.tolist() == [9] * 4
    assert [path.name for path in shm_dir.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("out", [{"a": 1}, {}, [torch.zeros(1)], torch.zeros(1)])
def test_an_out_of_another_form(sender: Sender, shm_dir: pathlib.Path, out: Any) -> None:
    with Receiver("cpu", shm_dir=shm_dir) as receiver, pytest.raises(DeviceError, match="out has the keys"):
        receiver.receive({"a": sender.send(b"x"), "b": sender.send(b"y")}, out=out)
    with Receiver("cpu", shm_dir=shm_dir) as receiver, pytest.raises(DeviceError, match="out is Tensor, want a seq"):
        receiver.receive([sender.send(b"x"), sender.send(b"y")], out=torch.zeros(2))
    with (
        Receiver("cpu", shm_dir=shm_dir) as receiver,
        pytest.raises(DeviceError, match="out has 1 tensors, items has 2"),
    ):
        receiver.receive([sender.send(b"x"), sender.send(b"y")], out=[torch.zeros(1)])


def test_a_read_only_numpy_out(sender: Sender, shm_dir: pathlib.Path) -> None:
    out = np.zeros(1, np.uint8)
    out.flags.writeable = False
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver, pytest.raises(DeviceError, match="read-only"):
        receiver.receive(sender.send(b"x"), out=out)
