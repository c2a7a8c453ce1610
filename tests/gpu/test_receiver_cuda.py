"""Receiving onto cuda:0: equal bytes in stream order, slots and sources reused under slow streams, nothing left."""

from __future__ import annotations

import gc
import math
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, Metrics, Receiver, Sender, ShmHandle, TensorData, TransportConfig
from mmcopy.errors import (
    ClosedError,
    DeviceError,
    DeviceMemoryError,
    MmcopyTimeoutError,
    SegmentNotFoundError,
    SegmentSizeError,
)
from mmcopy.receive.staging import StagingOptions
from mmcopy.tensors import DTYPES
from tests.rigs.arrays import random_bytes

pytestmark = pytest.mark.gpu

ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)
SLOT = 1 << 20
EDGES = [0, 1, 4095, 4096, 65537, SLOT - 1, SLOT, SLOT + 1, 4 * SLOT, 4 * SLOT + 1, 11 * SLOT + 5]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("cuda:0", staging=StagingOptions(4 * SLOT, SLOT), timeout_s=20) as receiver:
        yield receiver


@pytest.fixture
def sender(segments: Callable[[], list[str]]) -> Iterator[Sender]:
    with Sender(ALWAYS) as sender:
        yield sender


def raw(tensor: Any) -> bytes:
    assert tensor.is_cuda
    assert tensor.is_contiguous()
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()) if tensor.numel() else b""


def destination(receiver: Receiver) -> Any:
    return receiver.destination


def copy_stream_of(receiver: Receiver) -> Any:
    return destination(receiver).copy_stream.stream


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
            hold(torch, copy_stream_of(receiver), 2)
        with torch.cuda.stream(stream):
            tensor = receiver.receive(sender.send(source))
            total = tensor.sum(dtype=torch.int64)  # queued behind the copies on the caller's stream
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


def test_slots_are_not_refilled_under_a_slow_copy_stream(torch: Any, sender: Sender, receiver: Receiver) -> None:
    copy_stream = copy_stream_of(receiver)
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


@pytest.mark.parametrize("held", ["copy stream", "caller's stream"])
def test_races_thousands_of_times(torch: Any, sender: Sender, receiver: Receiver, held: str) -> None:
    """A spinning kernel holds a stream while slots, removed sources and dropped destinations are used again."""
    stream = torch.cuda.Stream()
    sources = [random_bytes(3 * SLOT // 2 + 4097 * n, n) for n in range(8)]
    sums = [int(source.sum(dtype=np.int64)) for source in sources]
    pending: list[tuple[Any, int]] = []
    for round_ in range(2000):
        n = round_ % len(sources)
        if round_ % 50 == 0:
            hold(torch, stream if held == "caller's stream" else copy_stream_of(receiver), 3)
        with torch.cuda.stream(stream):
            tensor = receiver.receive(sender.send(sources[n]))
            pending.append((tensor.sum(dtype=torch.int64), sums[n]))
            del tensor  # its memory goes to the next receive, behind the sum on this stream
        if len(pending) == 100:
            stream.synchronize()
            assert [int(total) for total, _ in pending] == [wanted for _, wanted in pending]
            pending.clear()


def test_out_is_filled_where_it_is(torch: Any, sender: Sender, receiver: Receiver) -> None:
    sizes = [1, 100, SLOT, 3 * SLOT + 5, 0]
    out = [torch.zeros(n, dtype=torch.uint8, device="cuda:0") for n in sizes]
    addresses = [tensor.data_ptr() for tensor in out]
    for round_ in range(20):
        sources = [random_bytes(n, round_ * 10 + i) for i, n in enumerate(sizes)]
        hold(torch, torch.cuda.current_stream(), 1)
        seen = [tensor.clone() for tensor in out]  # queued behind the hold: the next receive must come after
        before = [raw(tensor) for tensor in out] if round_ % 5 == 0 else None
        got = receiver.receive([sender.send(source) for source in sources], out=out)
        assert [raw(tensor) for tensor in got] == [source.tobytes() for source in sources]
        if before is not None:
            assert [raw(tensor) for tensor in seen] == before
    assert [tensor.data_ptr() for tensor in out] == addresses
    for bad in (torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int8, device="cuda:0"), None):
        with pytest.raises(DeviceError, match="out 0 is"):
            receiver.receive([sender.send(b"x")], out=[bad])


def test_receive_async_is_safe_on_the_stream_it_was_asked_on(torch: Any, sender: Sender, receiver: Receiver) -> None:
    stream = torch.cuda.Stream()
    for seed in range(50):
        source = random_bytes(2 * SLOT + seed, seed)
        hold(torch, copy_stream_of(receiver), 1)
        with torch.cuda.stream(stream):
            tensor = receiver.receive_async(sender.send(source)).wait(20)
            total = tensor.sum(dtype=torch.int64)
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


def test_many_small_tensors_come_in_one_transfer(
    monkeypatch: pytest.MonkeyPatch, sender: Sender, receiver: Receiver
) -> None:
    copies = destination(receiver).copy_stream
    count = 0
    copy = copies.copy

    def counted(*args: int) -> None:
        nonlocal count
        count += 1
        copy(*args)

    monkeypatch.setattr(copies, "copy", counted)
    sources = [random_bytes(1000 + n, n) for n in range(100)]
    items = [
        sender.send(source) if n % 2 else TensorData("uint8", source.shape, Inline(source.tobytes()))
        for n, source in enumerate(sources)
    ]
    assert [raw(tensor) for tensor in receiver.receive(items)] == [source.tobytes() for source in sources]
    assert count == 1


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
    ring = destination(receiver).ring
    copies = destination(receiver).copy_stream
    runtime = copies.runtime
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
        monkeypatch.setattr(copies, "runtime", Failing(n))
        with pytest.raises(DeviceError, match="cuda:0 refused a copy"):
            receiver.receive([sender.send(source), sender.send(source)])
        assert ring.num_free == ring.num_slots
    monkeypatch.setattr(copies, "runtime", runtime)
    assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_bad_segments_leave_nothing(sender: Sender, receiver: Receiver) -> None:
    good = sender.send(random_bytes(5 * SLOT, 1))
    with pytest.raises(SegmentNotFoundError):
        receiver.receive([good, TensorData("uint8", (4,), ShmHandle("smg-tokenspeed-missing", 0, 4))])
    short = sender.send(random_bytes(100, 1))
    assert isinstance(short.payload, ShmHandle)
    with pytest.raises(SegmentSizeError, match="200"):
        receiver.receive(TensorData("uint8", (200,), ShmHandle(short.payload.name, 0, 200)))


def test_a_held_copy_stream_is_a_timeout(torch: Any, sender: Sender) -> None:
    with Receiver("cuda:0", staging=StagingOptions(2 * SLOT, SLOT), timeout_s=0.05) as receiver:
        copy_stream = copy_stream_of(receiver)
        hold(torch, copy_stream, 1000)
        with pytest.raises(MmcopyTimeoutError, match="staging slot"):
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
    receiver = Receiver("cuda:0", staging=StagingOptions(2 * SLOT, SLOT))
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


def test_a_ring_larger_than_memory_is_smaller_with_a_warning(
    sender: Sender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr("mmcopy.receive.cuda.pinned.available_bytes", lambda: 40 * SLOT)  # half of that would be pinned
    pinned = cupy.cuda.PinnedMemory

    def refuse_large(nbytes: int) -> Any:
        if nbytes > 6 * SLOT:
            raise cupy.cuda.runtime.CUDARuntimeError(2)
        return pinned(nbytes)

    monkeypatch.setattr(cupy.cuda, "PinnedMemory", refuse_large)
    with Receiver("cuda:0", staging=StagingOptions(1 << 50, SLOT)) as receiver:
        (message,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert message.startswith(f"pinned {5 * SLOT} bytes of staging memory, {1 << 50} were asked for")
        source = random_bytes(5 * SLOT, 1)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_nvtx_and_timings(sender: Sender) -> None:
    metrics = Metrics(timings=True)
    with Receiver("cuda:0", staging=StagingOptions(2 * SLOT, SLOT), metrics=metrics, nvtx=True) as receiver:
        source = random_bytes(9 * SLOT, 1)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()
    assert {"receive", "open", "move", "close"} <= metrics.timings().keys()


ON_THE_SECOND = """
import sys, numpy, torch, mmcopy
always = mmcopy.TransportConfig(mode="shm", shm_min_bytes=0)
with mmcopy.Sender(always) as sender, mmcopy.Receiver("cuda:1") as receiver:
    source = numpy.arange(1 << 22, dtype=numpy.int32)
    tensor = receiver.receive(sender.send(source))
    assert str(tensor.device) == "cuda:1"
    assert torch.equal(tensor.cpu(), torch.from_numpy(source))
    pending = receiver.receive_async(sender.send(source)).wait(20)
    assert torch.equal(pending.cpu(), torch.from_numpy(source))
    out = torch.empty_like(tensor)
    receiver.receive(sender.send(source), out=out)
    assert torch.equal(out.cpu(), torch.from_numpy(source))
    print("received", flush=True)
    sys.stdin.read()
"""


def used_mib(index: int) -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(index)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_no_context_on_another_device(torch: Any, segments: Callable[[], list[str]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before = used_mib(0)
    child = subprocess.Popen(
        [sys.executable, "-c", ON_THE_SECOND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "received\n"
        assert used_mib(0) - before < 64  # a context takes some hundred MiB
    finally:
        child.communicate("", timeout=60)
    assert child.returncode == 0


def test_two_devices_at_once(torch: Any, sender: Sender) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = {"staging": StagingOptions(4 * SLOT, SLOT)}
    with Receiver("cuda:0", **options) as first, Receiver("cuda:1", **options) as second:  # type: ignore[arg-type]
        for seed in range(50):
            sources = [random_bytes(3 * SLOT + seed, seed * 2 + n) for n in range(2)]
            tensors = [r.receive(sender.send(s)) for r, s in zip((first, second), sources, strict=True)]
            assert [str(tensor.device) for tensor in tensors] == ["cuda:0", "cuda:1"]
            assert [raw(tensor) for tensor in tensors] == [source.tobytes() for source in sources]
            assert torch.cuda.current_device() == 0
