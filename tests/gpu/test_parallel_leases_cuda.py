"""Leases on groups with GPUs: read where they are, in windows, and given back behind the last copy out of them."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, ParallelOptions, Receiver, Sender, TensorData, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.metrics import Counter
from tests.rigs.ranks import Ranks, wanted
from tests.rigs.waiting import settle

from .test_receiver_cuda import copy_stream_of, hold, random_bytes, raw

pytestmark = pytest.mark.gpu

ALWAYS = TransportConfig(mode="auto", shm_min_bytes=1)
STRATEGIES = ["each", "broadcast", "scatter"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(params=STRATEGIES)
def receiver(request: pytest.FixtureRequest, world: Any, tmp_path: pathlib.Path) -> Iterator[Receiver]:
    options = ParallelOptions(strategy=request.param)
    with (
        WorkerEndpoint(tmp_path / "s") as endpoint,
        Receiver(
            "cuda:0", group=world, parallel=options, staging_bytes=4 * MIB, timeout_s=20, endpoint=endpoint
        ) as receiver,
    ):
        receiver.receive(TensorData("uint8", (4,), Inline(b"warm")))  # the communicator comes with the first collective
        yield receiver


@pytest.fixture
def worker(receiver: Receiver) -> WorkerSpec:
    assert receiver.endpoint is not None
    return WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": receiver.endpoint.path})


@pytest.fixture
def sender(worker: WorkerSpec, segments: Callable[[], list[str]]) -> Iterator[Sender]:
    with Sender(ALWAYS, arena_bytes=64 * MIB) as sender:
        sender.connect(worker, timeout_s=20)
        yield sender
        assert settle(lambda: sender.leases_out == 0)
    assert segments() == []


@pytest.fixture
def nothing_staged(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error for a receive that uses a slot of the ring."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was staged")

    monkeypatch.setattr(receiver._destination._pipeline, "begin", refuse)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("nothing_staged")
@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 65536, MIB + 1, 33 * MIB])
def test_a_lease_is_read_in_place(sender: Sender, receiver: Receiver, worker: WorkerSpec, nbytes: int) -> None:
    source = random_bytes(nbytes, nbytes)
    data = sender.send(source, worker=worker)
    assert data.path == "lease"
    assert raw(receiver.receive(data)) == source.tobytes()
    assert receiver.metrics.get(Counter.LEASES_RELEASED, "received") == 1


@pytest.mark.usefixtures("nothing_staged")
def test_all_leases_of_a_request_are_read_at_once(
    sender: Sender, receiver: Receiver, worker: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    run = receiver._destination._direct.run  # type: ignore[attr-defined]

    def counted(readings: Any, **options: Any) -> None:
        taken = list(readings)
        copied.extend(nbytes for _, _, nbytes, _ in taken)
        run(taken, **options)

    monkeypatch.setattr(receiver._destination._direct, "run", counted)  # type: ignore[attr-defined]
    sources = [random_bytes(65536 + 8 * n, n) for n in range(64)]
    tensors = receiver.receive(sender.send_many(sources, worker=worker))
    assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]
    assert copied == [len(s) for s in sources]


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


@pytest.mark.usefixtures("nothing_staged")
def test_a_stream_of_steps_is_followed(sender: Sender, receiver: Receiver, worker: WorkerSpec) -> None:
    for seed in range(20):
        source = random_bytes(20 * MIB + seed, seed)
        sending = sender.send_streaming(source, worker=worker)
        assert raw(receiver.receive(sending.data)) == source.tobytes()
        sending.wait(20)


def test_a_lease_comes_back_behind_its_copy_and_not_before(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    hold(torch, copy_stream_of(receiver), 300)
    tensor = receiver.receive(sender.send(random_bytes(MIB, 1), worker=worker))  # returns while the copy waits
    time.sleep(0.05)
    assert sender.leases_out == 1
    assert raw(tensor) == random_bytes(MIB, 1).tobytes()
    assert settle(lambda: sender.leases_out == 0)


def test_blocks_are_not_reused_under_a_slow_copy_stream(torch: Any, receiver: Receiver, worker: WorkerSpec) -> None:
    """An arena of four blocks: the fifth lease must wait for the first one's copy, many times."""
    with Sender(ALWAYS, arena_bytes=4 * MIB, arena_wait_s=20) as sender:
        sender.connect(worker, timeout_s=20)
        for round_ in range(20):
            hold(torch, copy_stream_of(receiver), 3)
            sources = [random_bytes(MIB, round_ * 10 + n) for n in range(8)]
            tensors = [receiver.receive(sender.send(source, worker=worker)) for source in sources]
            assert [raw(t) for t in tensors] == [s.tobytes() for s in sources]
        assert settle(lambda: sender.leases_out == 0)


def test_the_callers_stream_sees_the_bytes_without_a_host_wait(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    stream = torch.cuda.Stream()
    for seed in range(60):
        source = random_bytes(MIB + seed, seed)
        if seed % 10 == 0:
            hold(torch, copy_stream_of(receiver), 2)
        with torch.cuda.stream(stream):
            total = receiver.receive(sender.send(source, worker=worker)).sum(dtype=torch.int64)
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


def test_windows_cut_leases_and_each_goes_back_once(
    torch: Any, sender: Sender, receiver: Receiver, worker: WorkerSpec
) -> None:
    """What a rank of a larger group reads: parts, of which two can be of one lease; and of one lease nothing."""
    sources = [random_bytes(n, n) for n in (5 * MIB + 1, 300, 2 * MIB, 700)]
    destination: Any = receiver._destination
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
        opened = receiver._opener.open_all(items)
        base = destination.allocate_packed(end)
        base.zero_()
        hold(torch, copy_stream_of(receiver), 3)
        destination.read_windows(opened, starts, base, windows, while_copying=lambda: None)
        receiver._opener.close(opened, "received")
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


# -- two GPUs


@pytest.fixture(scope="module")
def ranks(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, dict[str, list[WorkerSpec]]]]:
    """The ranks, and by strategy the two workers: an endpoint each, because a process registers a mapping once."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    directory = tmp_path_factory.mktemp("ranks")
    workers: dict[str, list[WorkerSpec]] = {}
    with Ranks(2, directory, environment=[{"RANK_BACKEND": "cpu:gloo,cuda:nccl"}] * 2) as ranks:
        for name in STRATEGIES:
            answers = ranks.each(
                [
                    {"do": "make", "name": name, "device": f"cuda:{n}", "parallel": {"strategy": name},
                     "endpoint": str(directory / f"{name}{n}"), "options": {"timeout_s": 20}}
                    for n in range(2)
                ]
            )  # fmt: skip
            workers[name] = [
                WorkerSpec(f"grpc://127.0.0.1:{n}", labels={"mmcopy_endpoint": answer["endpoint"]})
                for n, answer in enumerate(answers)
            ]
        yield ranks, workers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("consumers", [[0, 1], [0], [1]])
def test_two_gpus_have_the_same_bytes(
    ranks: tuple[Ranks, dict[str, list[WorkerSpec]]],
    segments: Callable[[], list[str]],
    strategy: str,
    consumers: list[int],
) -> None:
    """Leases for both ranks, or for one of them, which then reads for the other."""
    group, workers = ranks[0], ranks[1][strategy]
    named = [workers[n] for n in consumers]
    with Sender(ALWAYS, arena_bytes=128 * MIB) as sender:
        for worker in workers:
            sender.connect(worker, timeout_s=20)
        for seed in range(30):
            sources = [random_bytes(seed * 1_000_003 % (40 * MIB) + 1, seed), random_bytes(1001, seed)]
            items = sender.send_many(sources, worker=named, consumers=len(named))
            assert {item.path for item in items} == {"lease"}
            answers = group.receive(items, receiver=strategy)
            assert [a.get("tensors", a) for a in answers] == [[wanted(source, "uint8") for source in sources]] * 2
            sending = sender.send_streaming(sources[0], worker=named)
            answers = group.receive([sending.data], receiver=strategy)
            assert [a.get("tensors", a) for a in answers] == [[wanted(sources[0], "uint8")]] * 2
            sending.wait(20)
            assert settle(lambda: sender.leases_out == 0)
    assert segments() == []
