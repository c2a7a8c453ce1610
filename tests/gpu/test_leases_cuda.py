"""Leases onto cuda:0: read in place, given back behind the copy, and never before it."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mmcopy import (
    Inline,
    Metrics,
    ParallelOptions,
    Receiver,
    Sender,
    ShmHandle,
    TensorData,
    TransportConfig,
    WorkerSpec,
)
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import LeaseError
from mmcopy.metrics import Counter
from mmcopy.receive import in_place
from mmcopy.receive.cuda import registration
from mmcopy.receive.in_place import Run
from mmcopy.receive.plan import place
from mmcopy.receive.request import RequestOpener
from mmcopy.receive.staging import StagingOptions
from mmcopy.tensors import DTYPES
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.waiting import settle

from .test_receiver_cuda import copy_stream_of, destination, hold, raw

pytestmark = pytest.mark.gpu

EDGES = [1, 255, 256, 257, 65536, MIB - 1, MIB + 1, 9 * MIB + 5, 33 * MIB]
ALWAYS = TransportConfig(mode="auto", shm_min_bytes=1)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def endpoint(tmp_path: pathlib.Path) -> Iterator[WorkerEndpoint]:
    with WorkerEndpoint(tmp_path / "s") as endpoint:
        yield endpoint


ALONE_AND_ON_GROUPS = pytest.mark.parametrize("receiver", [None, "each", "broadcast", "scatter"], indirect=True)
"""A receiver without a group, and one with each strategy on a group of one rank."""


@pytest.fixture
def receiver(request: pytest.FixtureRequest, endpoint: WorkerEndpoint) -> Iterator[Receiver]:
    strategy = getattr(request, "param", None)
    options: dict[str, Any] = {}
    if strategy is not None:
        options = {"group": request.getfixturevalue("world"), "parallel": ParallelOptions(strategy=strategy)}
    with Receiver("cuda:0", staging=StagingOptions(4 * MIB), timeout_s=20, endpoint=endpoint, **options) as receiver:
        if strategy is not None:  # the communicator comes with the first collective
            receiver.receive(TensorData("uint8", (4,), Inline(b"warm")))
        yield receiver


@pytest.fixture
def nothing_staged(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error for a receive that uses a slot of the ring."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was staged")

    monkeypatch.setattr(destination(receiver).ring, "take", refuse)


@pytest.fixture
def worker(endpoint: WorkerEndpoint) -> WorkerSpec:
    return WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": endpoint.path})


@pytest.fixture
def sender(receiver: Receiver, worker: WorkerSpec, segments: Callable[[], list[str]]) -> Iterator[Sender]:
    with Sender(ALWAYS, arena_bytes=64 * MIB) as sender:
        sender.connect(worker, timeout_s=20)
        yield sender
        assert settle(lambda: sender.leases_out == 0)
    assert segments() == []


@ALONE_AND_ON_GROUPS
@pytest.mark.usefixtures("nothing_staged")
@pytest.mark.parametrize("nbytes", EDGES)
def test_edge_sizes(sender: Sender, receiver: Receiver, worker: WorkerSpec, nbytes: int) -> None:
    source = random_bytes(nbytes, nbytes)
    data = sender.send(source, worker=worker)
    assert data.path == "lease"
    assert raw(receiver.receive(data)) == source.tobytes()
    assert destination(receiver).arenas.num_registered == 1


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(sender: Sender, receiver: Receiver, worker: WorkerSpec, dtype: str) -> None:
    bits = random_bytes(DTYPES[dtype] * 35, 3) & (1 if dtype == "bool" else 255)
    tensor = receiver.receive(TensorData(dtype, (5, 7), sender.send(bits, worker=worker).payload))
    assert (tuple(tensor.shape), str(tensor.dtype)) == ((5, 7), f"torch.{dtype}")
    assert raw(tensor) == bits.tobytes()


@pytest.fixture
def copies(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy that is queued out of an arena from now on."""
    copies: list[int] = []
    stream = destination(receiver).copy_stream
    copy_all = stream.copy_all

    def counted(runs: Sequence[Run]) -> None:
        copies.extend(nbytes for _, _, nbytes in runs)
        copy_all(runs)

    monkeypatch.setattr(stream, "copy_all", counted)
    return copies


@ALONE_AND_ON_GROUPS
@pytest.mark.usefixtures("nothing_staged")
def test_one_request_is_one_copy(sender: Sender, receiver: Receiver, worker: WorkerSpec, copies: list[int]) -> None:
    sources = [random_bytes(65536 + 8 * n, n) for n in range(64)]
    tensors = receiver.receive(sender.send_many(sources, worker=worker))
    assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]
    assert len(copies) == 1


@pytest.mark.usefixtures("nothing_staged")
def test_nothing_between_the_callers_tensors_is_written(
    sender: Sender, receiver: Receiver, worker: WorkerSpec, copies: list[int]
) -> None:
    sources = [random_bytes(65536 + 8 * n, n) for n in range(64)]
    out = [destination_like(source) for source in sources]
    receiver.receive(sender.send_many(sources[::-1], worker=worker), out=out[::-1])
    assert [raw(t) for t in out] == [s.tobytes() for s in sources]
    assert sum(copies) == sum(len(s) for s in sources)


@pytest.mark.parametrize("num_tensors", [3, 4, 5, 300])
def test_scattered_leases(
    sender: Sender, receiver: Receiver, worker: WorkerSpec, num_tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[bool] = []
    stream = destination(receiver).copy_stream
    copy_batch = type(stream).copy_batch

    def noted(self: Any, runs: Sequence[Run]) -> bool:
        batches.append(copy_batch(self, runs))
        return batches[-1]

    monkeypatch.setattr(type(stream), "copy_batch", noted)
    order = np.random.default_rng(5).permutation(num_tensors)
    sources = [random_bytes(65536 + int(n), int(n)) for n in order]
    sent = {int(n): sender.send(sources[int(n)], worker=worker) for n in order}
    for out in (False, True):
        items = [sent[n] for n in range(num_tensors)]
        tensors = receiver.receive(items, out=[destination_like(s) for s in sources] if out else None)
        assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]
        sent = {int(n): sender.send(sources[int(n)], worker=worker) for n in order}
    assert receiver.release(list(sent.values())) == num_tensors
    if num_tensors == 300:
        assert batches == [True, True]
    assert all(batches)


def test_a_driver_that_refuses_batches_gets_single_copies(
    sender: Sender, receiver: Receiver, worker: WorkerSpec, caplog: pytest.LogCaptureFixture
) -> None:
    stream = destination(receiver).copy_stream
    stream.driver = Replacing(stream.driver, cuMemcpyBatchAsync=lambda *_: (801,))  # CUDA_ERROR_NOT_SUPPORTED
    with caplog.at_level(logging.WARNING):
        for seed in range(2):
            sources = [random_bytes(65536, seed * 10 + n) for n in range(8)]
            items = [sender.send(source, worker=worker) for source in sources]
            assert [raw(t) for t in receiver.receive(items[::-1])] == [s.tobytes() for s in sources[::-1]]
    assert len([r for r in caplog.records if "one by one" in r.getMessage()]) == 1


def test_an_arena_in_several_parts(
    endpoint: WorkerEndpoint, receiver: Receiver, worker: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that reach over the edges of registrations, one by one, in batches and as they are written."""
    for module in (registration, in_place):
        monkeypatch.setattr(module, "PART_BYTES", MIB)
    with Sender(ALWAYS, arena_bytes=64 * MIB) as sender:
        sender.connect(worker, timeout_s=20)
        for nbytes in EDGES:
            source = random_bytes(nbytes, nbytes)
            assert raw(receiver.receive(sender.send(source, worker=worker))) == source.tobytes()
        sources = [random_bytes(700_001, n) for n in range(40)]
        items = [sender.send(source, worker=worker) for source in sources]
        assert [raw(t) for t in receiver.receive(items[::-1])] == [s.tobytes() for s in sources[::-1]]
        sending = sender.send_streaming(random_bytes(20 * MIB, 1), worker=worker)
        assert raw(receiver.receive(sending.data)) == random_bytes(20 * MIB, 1).tobytes()
        sending.wait(20)
        assert destination(receiver).arenas.num_parts >= 64
        assert settle(lambda: sender.leases_out == 0)


def test_what_was_registered_before_a_refusal_is_let_go(
    endpoint: WorkerEndpoint, worker: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import runtime

    for module in (registration, in_place):
        monkeypatch.setattr(module, "PART_BYTES", MIB)
    registered: list[tuple[int, int]] = []

    def refuse_the_fourth(address: int, nbytes: int, flags: int) -> None:
        if len(registered) == 3:
            raise runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation
        runtime.hostRegister(address, nbytes, flags)
        registered.append((address, nbytes))

    with Receiver("cuda:0", endpoint=endpoint) as receiver, Sender(ALWAYS, arena_bytes=16 * MIB) as sender:
        arenas = destination(receiver).arenas
        monkeypatch.setattr(arenas, "runtime", Replacing(runtime, hostRegister=refuse_the_fourth))
        sender.connect(worker, timeout_s=20)
        source = random_bytes(5 * MIB, 1)
        assert raw(receiver.receive(sender.send(source, worker=worker))) == source.tobytes()
        assert arenas.num_registered == 0
        assert len(registered) == 3
        for address, nbytes in registered:  # CUDA refuses what is registered already
            runtime.hostRegister(address, nbytes, 8)  # cudaHostRegisterReadOnly
            runtime.hostUnregister(address)


@ALONE_AND_ON_GROUPS
def test_leases_segments_and_inline_in_one_request(sender: Sender, receiver: Receiver, worker: WorkerSpec) -> None:
    """What is staged between leases is not written over what was copied straight, in either order."""
    rng = np.random.default_rng(11)
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1)) as plain:
        for round_ in range(40):
            largest = int(rng.choice([300, 70_000, 3 * MIB]))
            sources = [random_bytes(int(n), round_) for n in rng.integers(1, largest, rng.integers(1, 9))]
            items, streams = [], []
            for source, kind in zip(sources, rng.integers(0, 4, len(sources)), strict=True):
                if kind == 0:
                    items.append(sender.send(source, worker=worker))
                elif kind == 1:
                    items.append(plain.send(source))
                elif kind == 2:
                    items.append(TensorData("uint8", source.shape, Inline(source.tobytes())))
                else:
                    streams.append(sender.send_streaming(source, worker=worker))
                    items.append(streams[-1].data)
            assert [raw(t) for t in receiver.receive(items)] == [s.tobytes() for s in sources]
            for sending in streams:
                sending.wait(20)


def test_windows_cut_leases_and_each_goes_back_once(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    """What a rank of a larger group reads: parts, of which two can be of one lease; and of one lease nothing."""
    sources = [random_bytes(n, n) for n in (5 * MIB + 1, 300, 2 * MIB, 700)]
    opener = RequestOpener("/dev/shm", ["mmcopy-"], receiver.metrics, endpoint=receiver.endpoint, timeout_s=20)
    starts, end = [], 0
    for source in sources:
        starts.append(end)
        end += -(-len(source) // 256) * 256
    windows = [(512, MIB), (3 * MIB, 5 * MIB + 512 + 256), (6 * MIB, 6 * MIB + 256)]
    for round_ in range(10):
        sent = [n for n in range(3) if n != 1 or round_ % 2 == 0]
        items = [*sender.send_many([sources[n] for n in sent], worker=worker), sender.send(sources[3], worker=worker)]
        if round_ % 2:
            items.insert(1, TensorData("uint8", (300,), Inline(sources[1].tobytes())))
        request = opener.request(items)
        request.open_all()
        base = destination(receiver).allocate(end)
        base.zero_()
        hold(torch, copy_stream_of(receiver), 3)
        layout = place(request.sizes, tuple(starts))
        destination(receiver).fill(request, layout, [base], tuple(windows))
        request.close("received")
        got = np.frombuffer(raw(base), np.uint8)
        expected = np.zeros(end, np.uint8)
        for start, source in zip(starts, sources, strict=True):
            expected[start : start + len(source)] = source
        for first, last in windows:  # what lies between the tensors is anything
            for start, source in zip(starts, sources, strict=True):
                part = slice(max(first, start), min(last, start + len(source)))
                assert (got[part] == expected[part]).all()
        outside = np.ones(end, bool)
        for first, last in windows:
            outside[first:last] = False
        assert (got[outside] == 0).all()
        assert settle(lambda: sender.leases_out == 0)
    assert receiver.metrics.get(Counter.LEASES_RELEASED, "received") == 5 * 4 + 5 * 3


@ALONE_AND_ON_GROUPS
def test_a_lease_comes_back_behind_its_copy_and_not_before(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    hold(torch, copy_stream_of(receiver), 300)
    data = sender.send(random_bytes(MIB, 1), worker=worker)
    tensor = receiver.receive(data)  # returns while the copy waits
    time.sleep(0.05)
    assert sender.leases_out == 1
    assert raw(tensor) == random_bytes(MIB, 1).tobytes()
    assert settle(lambda: sender.leases_out == 0)
    assert receiver.metrics.get(Counter.LEASES_RELEASED, "received") == 1


@ALONE_AND_ON_GROUPS
def test_blocks_are_not_reused_under_a_slow_copy_stream(
    torch: Any, endpoint: WorkerEndpoint, receiver: Receiver, worker: WorkerSpec
) -> None:
    """An arena of four blocks: the fifth lease must wait for the first one's copy, hundreds of times."""
    with Sender(ALWAYS, arena_bytes=4 * MIB, arena_wait_s=20) as sender:
        sender.connect(worker, timeout_s=20)
        for round_ in range(60):
            hold(torch, copy_stream_of(receiver), 3)
            sources = [random_bytes(MIB, round_ * 10 + n) for n in range(8)]
            tensors = []
            for source in sources:
                data = sender.send(source, worker=worker)
                assert data.path == "lease"
                tensors.append(receiver.receive(data))
            assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]
        assert settle(lambda: sender.leases_out == 0)


@ALONE_AND_ON_GROUPS
def test_the_callers_stream_sees_the_bytes_without_a_host_wait(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    stream = torch.cuda.Stream()
    for seed in range(200):
        source = random_bytes(MIB + seed, seed)
        if seed % 10 == 0:
            hold(torch, copy_stream_of(receiver), 2)
        with torch.cuda.stream(stream):
            total = receiver.receive(sender.send(source, worker=worker)).sum(dtype=torch.int64)
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


@ALONE_AND_ON_GROUPS
def test_a_stream_of_steps_is_followed(sender: Sender, receiver: Receiver, worker: WorkerSpec) -> None:
    for seed in range(20):
        source = random_bytes(20 * MIB + seed, seed)
        sending = sender.send_streaming(source, worker=worker)
        assert raw(receiver.receive(sending.data)) == source.tobytes()
        sending.wait(20)


def test_without_writes_by_the_stream_an_event_gives_leases_back(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    destination(receiver).copy_stream.writes_words = False
    hold(torch, copy_stream_of(receiver), 200)
    tensor = receiver.receive(sender.send(random_bytes(MIB, 1), worker=worker))
    time.sleep(0.05)
    assert sender.leases_out == 1
    assert raw(tensor) == random_bytes(MIB, 1).tobytes()
    assert settle(lambda: sender.leases_out == 0)  # nobody calls the receiver again


def test_an_arena_that_cannot_be_registered_is_staged_with_one_warning(
    endpoint: WorkerEndpoint,
    worker: WorkerSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from cupy.cuda import runtime

    def refuse(*_: Any) -> None:
        raise runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation

    with Receiver("cuda:0", endpoint=endpoint) as receiver:
        monkeypatch.setattr(destination(receiver).arenas, "runtime", Replacing(runtime, hostRegister=refuse))
        with caplog.at_level(logging.WARNING), Sender(ALWAYS, arena_bytes=16 * MIB) as sender:
            sender.connect(worker, timeout_s=20)
            for seed in range(3):
                source = random_bytes(3 * MIB, seed)
                assert raw(receiver.receive(sender.send(source, worker=worker))) == source.tobytes()
            sending = sender.send_streaming(random_bytes(5 * MIB, 9), worker=worker)
            assert raw(receiver.receive(sending.data)) == random_bytes(5 * MIB, 9).tobytes()
            assert settle(lambda: sender.leases_out == 0)
    assert len([r for r in caplog.records if "in place" in r.getMessage()]) == 1


class Replacing:
    """A module, but for some of its functions."""

    def __init__(self, module: Any, **functions: Callable[..., Any]) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def destination_like(source: Any) -> Any:
    import torch

    return torch.empty(source.shape, dtype=torch.uint8, device="cuda:0")


SENDER = """
import os, sys, time
import numpy as np
from mmcopy import Sender, TransportConfig, WorkerSpec
worker = WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": sys.argv[1]})
sender = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=64 << 20)
sender.connect(worker, timeout_s=20)
whole = sender.send(np.full(1 << 20, 7, np.uint8), worker=worker).payload
(half,) = sender.arena.take([8 << 20], [0], timeout_s=5.0)
for handle in (whole, half):
    print(handle.name, handle.offset, handle.nbytes, handle.owner_id, flush=True)
time.sleep(60)
"""


def test_a_sender_that_is_killed(receiver: Receiver, endpoint: WorkerEndpoint) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SENDER), endpoint.path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None

        def handle() -> TensorData:
            name, offset, nbytes, owner = process.stdout.readline().split()  # type: ignore[union-attr]
            return TensorData("uint8", (int(nbytes),), ShmHandle(name, int(offset), int(nbytes), owner))

        whole, half = handle(), handle()
        tensor = receiver.receive(whole)
        assert settle(lambda: destination(receiver).arenas.num_registered == 1)
        timer = threading.Timer(0.3, os.kill, args=(process.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(LeaseError, match=r"has gone after .* of 8388608"):
            receiver.receive(half)
        timer.join()
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
    assert raw(tensor) == b"\x07" * MIB
    assert settle(lambda: destination(receiver).arenas.num_registered == 0)


def test_a_thousand_receives_allocate_nothing_pinned(
    sender: Sender, receiver: Receiver, worker: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    def forbidden(*_: Any) -> None:
        raise AssertionError("pinned memory was allocated in a receive")

    receiver.receive(sender.send(random_bytes(1, 1), worker=worker))
    for name in ("hostAlloc", "mallocHost", "hostRegister"):
        if hasattr(cupy.cuda.runtime, name):
            monkeypatch.setattr(cupy.cuda.runtime, name, forbidden)
    rng = np.random.default_rng(4)
    source = random_bytes(2 * MIB, 5)
    for _ in range(1000):
        n = int(rng.integers(1, 2 * MIB))
        tensor = receiver.receive(sender.send(source[:n], worker=worker))
    assert raw(tensor) == source[:n].tobytes()
    assert isinstance(receiver.metrics, Metrics)
