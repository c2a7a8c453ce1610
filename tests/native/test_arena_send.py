"""Arena.send: the tensors of one request as leases in one call, all or none, described natively."""

from __future__ import annotations

import copy
import pathlib
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from mmcopy import ShmHandle, TensorData, _native
from mmcopy.arrays import flatten
from mmcopy.errors import ArenaError, ArenaFullError, DtypeError, PayloadError
from mmcopy.send.outgoing import Outgoing, outgoing
from tests.rigs.arena_rig import LIMIT_S, Worker, connect
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.fixture
def worker(tmp_path: pathlib.Path) -> Iterator[Worker]:
    with Worker(tmp_path / "run") as made:
        yield made


@pytest.fixture
def arena() -> Iterator[_native.Arena]:
    made = _native.Arena(4 * MIB, num_threads=2)
    yield made
    made.close(LIMIT_S)


@pytest.fixture
def slot(arena: _native.Arena, worker: Worker) -> Iterator[int]:
    number, link = connect(arena, worker.path)
    yield number
    link.close()


def send(arena: _native.Arena, tensors: list[Outgoing], slot: int, timeout_s: float = 0.0) -> list[TensorData]:
    return arena.send(tensors, [slot], timeout_s=timeout_s, num_threads=2)


def received(worker: Worker, data: TensorData) -> bytes:
    assert isinstance(data.payload, ShmHandle)
    handle = data.payload
    return worker.receive((handle.name, handle.offset, handle.nbytes, handle.owner_id))


def test_every_kind_of_source_arrives(arena: _native.Arena, worker: Worker, slot: int) -> None:
    torch = pytest.importorskip("torch")
    floats = np.linspace(-3, 3, 70_001, dtype=np.float32)
    arrays: list[tuple[Any, str | None, bytes]] = [
        (random_bytes(65_537), None, random_bytes(65_537).tobytes()),
        (np.float32(2.5), None, np.float32(2.5).tobytes()),
        (floats.reshape(-1, 1)[::-1], None, floats[::-1].tobytes()),
        (floats.astype(">f4"), None, floats.tobytes()),
        (torch.from_numpy(floats), None, floats.tobytes()),
        (torch.from_numpy(floats)[5:90], None, floats[5:90].tobytes()),
        (torch.from_numpy(floats), "float16", floats.astype(np.float16).tobytes()),
        (floats, "float16", floats.astype(np.float16).tobytes()),
        (torch.tensor(7, dtype=torch.int64), None, np.int64(7).tobytes()),
    ]
    sent = send(arena, [outgoing(array, dtype) for array, dtype, _ in arrays], slot)
    assert [received(worker, data) for data in sent] == [wanted for _, _, wanted in arrays]
    assert [data.shape for data in sent] == [tuple(array.shape) for array, _, _ in arrays]


def test_what_it_returns_is_as_what_a_constructor_makes(arena: _native.Arena, worker: Worker, slot: int) -> None:
    (data,) = send(arena, [outgoing(np.ones((3, 2), np.float32), None)], slot)
    made = TensorData("float32", (3, 2), ShmHandle(*(getattr(data.payload, n) for n in ShmHandle.__slots__)))
    assert data == made
    assert (hash(data), repr(data), data.path, data.nbytes) == (hash(made), repr(made), "lease", 24)
    assert (type(data), type(data.payload)) == (TensorData, ShmHandle)
    for same in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data), copy.copy(data), replace(data)):
        assert same == data
    with pytest.raises(AttributeError):
        data.dtype = "uint8"  # type: ignore[misc]
    assert received(worker, data) == np.ones(6, np.float32).tobytes()


def test_an_error_in_the_middle_leaves_nothing_out(arena: _native.Arena, slot: int) -> None:
    good = outgoing(random_bytes(1000), None)
    flat = flatten(random_bytes(1000))
    with pytest.raises(PayloadError, match="source has 1000 bytes, target has 999"):
        send(arena, [good, Outgoing(flat, "uint8", 999), good], slot)
    with pytest.raises(DtypeError, match="no cast from uint8 to float64"):
        send(arena, [good, Outgoing(flat, "float64", 8000)], slot)
    with pytest.raises(ArenaFullError):
        send(arena, [good, outgoing(random_bytes(5 * MIB), None)], slot)
    with pytest.raises(ArenaError, match="consumer 9 is not connected"):
        send(arena, [good], 9)
    assert settle(lambda: arena.statistics()["leases_out"] == 0)
    assert arena.statistics()["used_nbytes"] == 0


def test_a_signal_ends_the_wait_for_room(arena: _native.Arena, worker: Worker, slot: int) -> None:
    (first,) = send(arena, [outgoing(random_bytes(3 * MIB), None)], slot)

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGUSR1,))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            send(arena, [outgoing(random_bytes(3 * MIB), None)], slot, timeout_s=60.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert received(worker, first) == random_bytes(3 * MIB).tobytes()
    assert settle(lambda: arena.statistics()["leases_out"] == 0)
