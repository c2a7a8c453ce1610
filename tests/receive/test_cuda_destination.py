"""The destination on a GPU, with the GPU played: which bytes go where, what is unlinked and released when."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, Metrics, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import DeviceError, LeaseError
from mmcopy.metrics import Counter
from mmcopy.receive.cuda import CudaDestination
from mmcopy.receive.plan import pack, place
from mmcopy.receive.request import Request, RequestOpener
from mmcopy.receive.staging import StagingOptions
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.played_cuda import CALLERS_STREAM, COPY_STREAM, PlayedRuntime, played_cuda
from tests.rigs.waiting import settle

SLOT = 4096

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


class Rig:
    """A sender of leases, one of segments, a worker's endpoint, and a destination on a played GPU."""

    def __init__(self, torch: Any, directory: pathlib.Path, *, has_driver: bool) -> None:
        self.endpoint = WorkerEndpoint(directory)
        self.worker = WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": self.endpoint.path})
        self.metrics = Metrics()
        cuda = played_cuda(torch, has_driver=has_driver)
        self.runtime: PlayedRuntime = cuda.runtime
        self.destination = CudaDestination(
            0,
            staging=StagingOptions(4 * SLOT, SLOT),
            num_threads=2,
            timeout_s=20.0,
            metrics=self.metrics,
            endpoint=self.endpoint,
            cuda=cuda,
        )
        self.leases = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=16 * MIB, num_threads=2)
        self.leases.connect(self.worker, timeout_s=20)
        self.segments = Sender(TransportConfig(mode="shm", shm_min_bytes=1))
        self.opener = RequestOpener("/dev/shm", ["mmcopy-"], self.metrics, endpoint=self.endpoint, timeout_s=20.0)

    def send(self, arrays: Sequence[Bytes], kinds: str) -> list[TensorData]:
        """``kinds[n]`` of each: l(ease), s(egment) or i(nline)."""
        by_kind: dict[str, Callable[[Bytes], TensorData]] = {
            "l": lambda array: self.leases.send(array, worker=self.worker),
            "s": self.segments.send,
            "i": lambda array: TensorData("uint8", array.shape, Inline(array.tobytes())),
        }
        return [by_kind[kind](array) for array, kind in zip(arrays, kinds, strict=True)]

    def open(self, items: Sequence[TensorData]) -> Request:
        request = self.opener.request(items)
        request.open_all()
        return request

    def receive(self, items: Sequence[TensorData], out: Sequence[Any] | None = None) -> list[Bytes]:
        request, why = self.opener.request(items), "released"
        try:
            request.open_all()
            if out is not None:
                self.destination.check_out(items, out)
            tensors = self.destination.receive(request, out)
            why = "received"
        finally:
            request.close(why)
        self.runtime.finish()
        return [tensor.numpy() for tensor in tensors]

    def close(self) -> None:
        self.runtime.finish()
        assert settle(lambda: self.leases.leases_out == 0)
        self.leases.close()
        self.segments.close()
        self.destination.close()
        assert self.runtime.registered == {}
        self.runtime.close()
        self.endpoint.close()


@pytest.fixture(params=[True, False], ids=["with driver", "without driver"])
def rig(
    request: pytest.FixtureRequest, torch: Any, tmp_path: pathlib.Path, segments: Callable[[], list[str]]
) -> Iterator[Rig]:
    rig = Rig(torch, tmp_path / "s", has_driver=request.param)
    yield rig
    rig.close()
    assert segments() == []


SIZES = [1, 300, 5 * SLOT + 7, 256, SLOT, 3 * SLOT - 1]


@pytest.mark.parametrize("kinds", ["llllll", "ssssss", "iiiiii", "lsilsi", "sslili", "illlls"])
@pytest.mark.parametrize("is_out", [False, True])
def test_packed_and_into_the_callers_tensors(rig: Rig, torch: Any, kinds: str, is_out: bool) -> None:
    for round_ in range(3):
        arrays = [random_bytes(n, round_) for n in SIZES]
        out = [torch.zeros(n, dtype=torch.uint8) for n in SIZES] if is_out else None
        tensors = rig.receive(rig.send(arrays, kinds), out)
        assert [t.tobytes() for t in tensors] == [a.tobytes() for a in arrays]
        if out is not None:
            assert [t.ctypes.data for t in tensors] == [o.data_ptr() for o in out]
    assert rig.runtime.edges[-1][:2] == (COPY_STREAM, CALLERS_STREAM)
    assert rig.runtime.edges[-1][2] == len(rig.runtime.copies)


def test_one_tensor_has_its_own_dtype_and_shape_and_empty_ones_are_there(rig: Rig, torch: Any) -> None:
    data = TensorData("float32", (3, 5), rig.send([random_bytes(60)], "l")[0].payload)
    empty = TensorData("int64", (0, 4), Inline(b""))
    for items in ([data], [empty], [empty, TensorData("uint8", (1,), Inline(b"x")), empty], []):
        request = rig.open(items)
        tensors = rig.destination.receive(request)
        request.close("received")
        assert [tuple(t.shape) for t in tensors] == [item.shape for item in items]
        assert [str(t.dtype) for t in tensors] == [f"torch.{item.dtype}" for item in items]
    rig.runtime.finish()


def test_leases_of_one_sender_are_one_copy_also_beside_others(rig: Rig) -> None:
    arrays = [random_bytes(1000, n) for n in range(6)]
    leases = rig.leases.send_many(arrays[::2], worker=rig.worker)
    others = rig.send(arrays[1::2], "iii")
    items = [item for pair in zip(leases, others, strict=True) for item in pair]
    assert [t.tobytes() for t in rig.receive(items)] == [a.tobytes() for a in arrays]
    assert len(rig.runtime.copies) == 2


@pytest.mark.parametrize("kinds", ["lll", "sss", "lsi", "sll"])
def test_windows(rig: Rig, kinds: str) -> None:
    arrays = [random_bytes(n) for n in (3 * SLOT + 5, 300, 2 * SLOT)]
    layout = place(tuple(len(a) for a in arrays), pack(tuple(len(a) for a in arrays)).starts)
    base = rig.destination.allocate(pack(layout.sizes).nbytes)
    base.zero_()
    windows = ((512, SLOT), (2 * SLOT, 4 * SLOT))
    request = rig.open(rig.send(arrays, kinds))
    rig.destination.fill(request, layout, [base], windows)
    request.close("received")
    rig.runtime.finish()
    inside = np.zeros(len(base), bool)
    for first, last in windows:
        inside[first:last] = True
    for start, array in zip(layout.starts, arrays, strict=True):
        part = slice(start, start + len(array))
        assert (base.numpy()[part][inside[part]] == array[inside[part]]).all()
    assert not base.numpy()[~inside].any()


@pytest.mark.parametrize("others", ["", "si"])
def test_a_lease_that_is_being_written_is_followed(rig: Rig, others: str) -> None:
    arrays = [random_bytes(3 * MIB + 1), *(random_bytes(9 * SLOT, n) for n in range(len(others)))]
    sending = rig.leases.send_streaming(arrays[0], worker=rig.worker)
    tensors = rig.receive([sending.data, *rig.send(arrays[1:], others)])
    sending.wait(20)
    assert [t.tobytes() for t in tensors] == [a.tobytes() for a in arrays]


def test_leases_are_released_behind_their_copies_and_not_before(rig: Rig) -> None:
    rig.runtime.gate.clear()
    request = rig.open(rig.send([random_bytes(1000, n) for n in range(3)], "lli"))
    rig.destination.receive(request)
    request.close("received")
    assert rig.leases.leases_out == 2
    rig.runtime.finish()
    assert settle(lambda: rig.leases.leases_out == 0)
    assert rig.metrics.get(Counter.LEASES_RELEASED, "received") == 2


def test_a_driver_that_refuses_to_write_flags_is_asked_once(torch: Any, tmp_path: pathlib.Path, caplog: Any) -> None:
    rig = Rig(torch, tmp_path / "s", has_driver=True)
    rig.runtime.refuses_words = True
    try:
        for _ in range(2):
            arrays = [random_bytes(1000, n) for n in range(3)]
            assert [t.tobytes() for t in rig.receive(rig.send(arrays, "lll"))] == [a.tobytes() for a in arrays]
            assert settle(lambda: rig.leases.leases_out == 0)
    finally:
        rig.close()
    refusals = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert refusals == ["the driver refuses to write release flags from a stream (801): the host writes them"]


def test_names_are_there_until_the_first_copy_is_queued(rig: Rig, segments: Callable[[], list[str]]) -> None:
    seen: list[int] = []
    rig.runtime.before_copy = lambda: seen.append(sum(not name.endswith(".lock") for name in segments()))
    items = rig.send([random_bytes(6 * SLOT)] * 2, "ss")
    rig.receive(items)
    assert seen[0] == 2
    assert set(seen[1:]) == {0}


@pytest.mark.parametrize("kinds", ["ss", "ll", "ls", "si"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_copy_gives_everything_back(rig: Rig, kinds: str, at: int) -> None:
    arrays = [random_bytes(6 * SLOT, n) for n in range(2)]
    rig.runtime.refuse_at = at
    items = rig.send(arrays[::-1], kinds)[::-1]  # scattered leases, two copies
    with pytest.raises(DeviceError, match="cuda:0 refused a copy"):
        rig.receive(items)
    assert rig.runtime.edges[-1][:2] == (COPY_STREAM, CALLERS_STREAM)
    assert rig.destination.ring.num_free == rig.destination.ring.num_slots
    rig.runtime.finish()
    assert settle(lambda: rig.leases.leases_out == 0)
    rig.runtime.refuse_at = -1
    assert [t.tobytes() for t in rig.receive(rig.send(arrays, kinds))] == [a.tobytes() for a in arrays]


def test_a_sender_that_gives_up_fails_its_request_alone(rig: Rig) -> None:
    others = rig.send([random_bytes(1000)] * 2, "ls")
    arena = rig.leases.arena
    assert arena is not None
    (writer,) = arena.take([MIB], [0], timeout_s=5.0)
    handle = ShmHandle(writer.name, writer.offset, writer.nbytes, writer.owner_id)
    timer = threading.Timer(0.1, writer.abort)
    timer.start()
    with pytest.raises(LeaseError):
        rig.receive([*others, TensorData("uint8", (MIB,), handle)])
    timer.join()
    rig.runtime.finish()
    assert settle(lambda: rig.leases.leases_out == 0)
