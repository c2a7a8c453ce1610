"""Receiving onto cuda:0: equal bytes in stream order, slots and sources reused under slow streams, nothing left."""

from __future__ import annotations

import gc
import math
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import (
    DTYPES,
    ClosedError,
    DeviceError,
    DeviceMemoryError,
    Inline,
    Receiver,
    ReceiveTimeoutError,
    SegmentNotFoundError,
    SegmentSizeError,
    Sender,
    ShmHandle,
    TensorData,
    TransportConfig,
)

pytestmark = pytest.mark.gpu

ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)
SLOT = 1 << 20
EDGES = [0, 1, 4095, 4096, 65537, SLOT - 1, SLOT, SLOT + 1, 4 * SLOT, 4 * SLOT + 1, 11 * SLOT + 5]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("cuda:0", staging_bytes=4 * SLOT, slot_bytes=SLOT, timeout_s=20) as receiver:
        yield receiver


@pytest.fixture
def sender(segments: Callable[[], list[str]]) -> Iterator[Sender]:
    with Sender(ALWAYS) as sender:
        yield sender


def random_bytes(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def raw(tensor: Any) -> bytes:
    assert tensor.is_cuda
    assert tensor.is_contiguous()
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()) if tensor.numel() else b""


def hold(torch: Any, stream: Any, milliseconds: int = 20) -> None:
    """Keep ``stream`` busy for about that long."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(milliseconds * 1_500_000)


@pytest.mark.parametrize("nbytes", EDGES)
def test_edge_sizes(sender: Sender, receiver: Receiver, nbytes: int) -> None:
    source = random_bytes(nbytes, nbytes)
    for data in (sender.send(source), TensorData("uint8", (nbytes,), Inline(source.tobytes()))):
        tensor = receiver.receive(data)
        assert str(tensor.device) == "cuda:0"
        assert raw(tensor) == source.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3, 4), (5, 1, 7)])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_keeps_its_bits_and_shape(
    sender: Sender, receiver: Receiver, dtype: str, shape: tuple[int, ...]
) -> None:
    bits = random_bytes(DTYPES[dtype] * math.prod(shape), 3) & (1 if dtype == "bool" else 255)
    tensor = receiver.receive(TensorData(dtype, shape, sender.send(bits).payload))
    assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}")
    assert raw(tensor) == bits.tobytes()


def test_random_batches(sender: Sender, receiver: Receiver) -> None:
    rng = np.random.default_rng(5)
    for round_ in range(40):
        sizes = rng.integers(0, 3 * SLOT, rng.integers(1, 9)).tolist()
        sources = [random_bytes(n, round_ * 10 + i) for i, n in enumerate(sizes)]
        items = {
            str(i): sender.send(s) if i % 3 else TensorData("uint8", s.shape, Inline(s.tobytes()))
            for i, s in enumerate(sources)
        }
        got = receiver.receive(items)
        assert [raw(got[str(i)]) for i in range(len(sources))] == [s.tobytes() for s in sources]


def test_the_callers_stream_sees_the_bytes_without_a_host_wait(torch: Any, sender: Sender, receiver: Receiver) -> None:
    stream = torch.cuda.Stream()
    for seed in range(200):
        source = random_bytes(3 * SLOT + seed, seed)
        if seed % 10 == 0:
            hold(torch, receiver._destination._copy_stream, 2)  # type: ignore[attr-defined]
        with torch.cuda.stream(stream):
            tensor = receiver.receive(sender.send(source))
            total = tensor.sum(dtype=torch.int64)  # queued behind the copies on the caller's stream
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


def test_slots_are_not_refilled_under_a_slow_copy_stream(torch: Any, sender: Sender, receiver: Receiver) -> None:
    copy_stream = receiver._destination._copy_stream  # type: ignore[attr-defined]
    for round_ in range(10):
        hold(torch, copy_stream)
        # Twice the ring: the second half must wait for the first half's copies.
        sources = [random_bytes(SLOT, round_ * 10 + i) for i in range(8)]
        tensors = receiver.receive([sender.send(s) for s in sources])
        assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]


def test_destinations_reused_by_the_allocator_under_a_held_stream(
    torch: Any, sender: Sender, receiver: Receiver
) -> None:
    """Memory freed on the caller's stream with work pending is handed out again at once: that work must come first."""
    torch.cuda.empty_cache()
    for seed in range(100):
        old = torch.zeros(2 * SLOT, dtype=torch.uint8, device="cuda:0")
        hold(torch, torch.cuda.current_stream(), 2)
        old.fill_(255)  # queued behind the hold, on memory that is freed now
        del old
        source = random_bytes(2 * SLOT, seed)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_tensors_dropped_at_once_do_not_harm_the_next(torch: Any, sender: Sender, receiver: Receiver) -> None:
    for seed in range(200):
        receiver.receive(sender.send(random_bytes(SLOT, seed)))
        fresh = torch.full((SLOT,), 7, dtype=torch.uint8, device="cuda:0")
        assert int(fresh.sum(dtype=torch.int64)) == 7 * SLOT


def test_two_threads_share_a_receiver(torch: Any, sender: Sender, receiver: Receiver) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(60):
                source = random_bytes(1 + (i * 131071) % (6 * SLOT), seed * 1000 + i)
                if raw(receiver.receive(sender.send(source))) != source.tobytes():
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_pinned_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch, sender: Sender, receiver: Receiver) -> None:
    import cupy

    def refuse(*_: object) -> None:
        raise AssertionError("a receive allocated pinned memory")

    monkeypatch.setattr(cupy.cuda, "PinnedMemory", refuse)
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refuse)
    for seed in range(50):
        source = random_bytes(seed * 100_003 % (9 * SLOT), seed)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_errors_in_the_middle_give_slots_and_segments_back(
    torch: Any, sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = receiver._destination._ring  # type: ignore[attr-defined]
    runtime = receiver._destination._runtime  # type: ignore[attr-defined]
    source = random_bytes(6 * SLOT, 1)

    class Failing:
        """cupy's runtime, whose n-th copy is refused."""

        def __init__(self, n: int) -> None:
            self.n = n

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def memcpyAsync(self, *args: Any) -> None:
            self.n -= 1
            if self.n == 0:
                raise runtime.CUDARuntimeError(1)
            runtime.memcpyAsync(*args)

    for n in (1, 3, 6):
        monkeypatch.setattr(receiver._destination, "_runtime", Failing(n))
        with pytest.raises(DeviceError, match="cuda:0 refused a copy"):
            receiver.receive([sender.send(source), sender.send(source)])
        assert len(ring._free) == 4
    monkeypatch.setattr(receiver._destination, "_runtime", runtime)
    assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_bad_segments_leave_nothing(sender: Sender, receiver: Receiver) -> None:
    good = sender.send(random_bytes(5 * SLOT, 1))
    with pytest.raises(SegmentNotFoundError):
        receiver.receive([good, TensorData("uint8", (4,), ShmHandle("mmcopy-missing", 0, 4))])
    short = sender.send(random_bytes(100, 1))
    assert isinstance(short.payload, ShmHandle)
    with pytest.raises(SegmentSizeError, match="200"):
        receiver.receive(TensorData("uint8", (200,), ShmHandle(short.payload.name, 0, 200)))


def test_a_held_copy_stream_is_a_timeout(torch: Any, sender: Sender) -> None:
    with Receiver("cuda:0", staging_bytes=2 * SLOT, slot_bytes=SLOT, timeout_s=0.05) as receiver:
        copy_stream = receiver._destination._copy_stream  # type: ignore[attr-defined]
        hold(torch, copy_stream, 1000)
        with pytest.raises(ReceiveTimeoutError, match="staging slot"):
            receiver.receive(sender.send(random_bytes(6 * SLOT, 1)))
        copy_stream.synchronize()
        torch.cuda.synchronize()
        source = random_bytes(6 * SLOT, 2)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_a_full_device_is_one_error_with_the_numbers(torch: Any, sender: Sender, receiver: Receiver) -> None:
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(0)
    limit = 2 << 30
    torch.cuda.set_per_process_memory_fraction(limit / total, 0)
    try:
        ballast = torch.empty(limit - (64 << 20) - torch.cuda.memory_reserved(0), dtype=torch.uint8, device="cuda:0")
        with pytest.raises(DeviceMemoryError, match=rf"wanted {128 << 20} bytes"):
            receiver.receive(sender.send(np.zeros(128 << 20, np.uint8)))
        del ballast
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        torch.cuda.empty_cache()
    source = random_bytes(SLOT, 2)
    assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_memory_is_flat_over_many_receives(torch: Any, sender: Sender, receiver: Receiver) -> None:
    rng = np.random.default_rng(9)
    sizes = rng.integers(1, 2 * SLOT, 1000).tolist()
    for n in sizes[:100]:
        receiver.receive(sender.send(np.zeros(n, np.uint8)))
    gc.collect()
    locked, allocated = locked_kib(), torch.cuda.memory_allocated(0)
    for n in sizes[100:]:
        receiver.receive(sender.send(np.zeros(n, np.uint8)))
    gc.collect()
    assert torch.cuda.memory_allocated(0) == allocated
    assert locked_kib() <= locked


def locked_kib() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("VmLck", "VmPin")))


def test_after_close_and_devices_that_do_not_exist(torch: Any, sender: Sender) -> None:
    receiver = Receiver("cuda:0", staging_bytes=2 * SLOT, slot_bytes=SLOT)
    source = random_bytes(3 * SLOT, 4)
    tensor = receiver.receive(sender.send(source))
    receiver.close()
    receiver.close()
    assert raw(tensor) == source.tobytes()
    with pytest.raises(ClosedError):
        receiver.receive(sender.send(source))
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=rf"cuda:{count} does not exist: torch finds {count} CUDA devices"):
        Receiver(f"cuda:{count}")
