"""Leases on a group of two ranks: each rank is a process with an endpoint, and a consumer, of its own."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from mmcopy import Inline, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.ranks import Ranks, as_json, wanted
from tests.rigs.waiting import settle

STRATEGIES = ["each", "broadcast", "scatter"]


class Group(NamedTuple):
    """Ranks, whose receivers are called by strategy; ``workers[rank]`` is a rank as a sender sees it."""

    ranks: Ranks
    workers: list[WorkerSpec]


def started(directory: pathlib.Path, *, size: int = 2, timeout_s: float = 20.0) -> Group:
    """By name, receivers with an endpoint on every rank; by ``"<name> 1"`` with none on rank 0."""
    ranks = Ranks(size, directory)
    paths: list[str] = []
    for name in STRATEGIES:
        made: dict[str, Any] = {"do": "make", "parallel": {"strategy": name}, "options": {"timeout_s": timeout_s}}
        with_endpoint = [{**made, "endpoint": str(directory / f"sockets{rank}")} for rank in range(size)]
        paths = [answer["endpoint"] for answer in ranks.each([{**each, "name": name} for each in with_endpoint])]
        ranks.each([{**each, "name": f"{name} 1"} for each in [made, *with_endpoint[1:]]])
    return Group(
        ranks, [WorkerSpec(f"grpc://127.0.0.1:{n}", labels={"mmcopy_endpoint": p}) for n, p in enumerate(paths)]
    )


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = started(tmp_path_factory.mktemp("ranks"))
    with group.ranks:
        yield group


@pytest.fixture
def sender(group: Group, segments: Callable[[], list[str]]) -> Iterator[Sender]:
    """Both ranks have its arena, which is empty at the end of a test."""
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=32 * MIB, num_threads=2) as sender:
        for worker in group.workers:
            sender.connect(worker, timeout_s=20)
        yield sender
        assert settle(lambda: sender.leases_out == 0)
    assert segments() == []


def released(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["metrics"].get("leases_released", {}).get("received", 0) for answer in answers]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_has_all_and_gives_its_own_back(group: Group, sender: Sender, strategy: str) -> None:
    arrays = [random_bytes(n) for n in (100_001, 1, 3 * MIB, 256)]
    before = released(group.ranks.receive([], receiver=strategy))
    items = sender.send_many(arrays, worker=group.workers)
    assert {item.path for item in items} == {"lease"}
    items.insert(2, TensorData("uint8", (5,), Inline(b"12345")))
    answers = group.ranks.receive(items, receiver=strategy)
    expected = [wanted(a, "uint8") for a in [*arrays[:2], np.frombuffer(b"12345", np.uint8), *arrays[2:]]]
    assert [answer.get("tensors", answer) for answer in answers] == [expected] * 2
    # Also the rank that has read nothing of it, or a part.
    assert [now - then for now, then in zip(released(answers), before, strict=True)] == [4, 4]


def test_four_ranks_and_every_kind_of_tensor(tmp_path: pathlib.Path, segments: Callable[[], list[str]]) -> None:
    """Mixed dtypes, uneven sizes, empty and 0-d, as leases for all ranks and for three of them."""
    arrays = [
        random_bytes(4 * 1176 * 30).view(np.float32).reshape(30, 1176),
        np.array([[1, 30, 40]]),
        np.float32(2.5),
        np.empty((0, 5), np.float16),
        random_bytes(257).view(np.int8),
        random_bytes(MIB + 2).view(np.uint16),
    ]
    dtypes = ["float32", "int64", "float32", "float16", "int8", "uint16"]
    expected = [
        {**wanted(np.asarray(a), dtype), "shape": list(np.shape(a))} for a, dtype in zip(arrays, dtypes, strict=True)
    ]
    group = started(tmp_path, size=4)
    with group.ranks, Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=8 * MIB) as sender:
        for worker in group.workers:
            sender.connect(worker, timeout_s=20)
        for strategy in STRATEGIES:
            for receiver, workers in [(strategy, group.workers), (f"{strategy} 1", group.workers[1:])]:
                items = sender.send_many(arrays, worker=workers)
                assert [item.path for item in items] == ["lease"] * 3 + ["inline"] + ["lease"] * 2
                answers = group.ranks.receive(items, receiver=receiver)
                assert [answer.get("tensors", answer) for answer in answers] == [expected] * 4
                assert settle(lambda: sender.leases_out == 0)
    assert segments() == []


def test_a_thousand_leases_without_growth(group: Group, sender: Sender) -> None:
    array = random_bytes(5000)
    states = []
    for n in range(1000):
        data = sender.send(array, worker=group.workers)
        assert data.path == "lease"
        answers = group.ranks.receive([data], receiver=STRATEGIES[n % 3])
        assert [answer.get("tensors", answer) for answer in answers] == [[wanted(array, "uint8")]] * 2
        if n in (100, 999):
            states.append(group.ranks.all("tell_state"))
    for early, late in zip(*states, strict=True):
        assert (late["descriptors"], late["threads"]) == (early["descriptors"], early["threads"])
        assert late["rss_kib"] - early["rss_kib"] < 8 << 10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_is_followed(group: Group, sender: Sender, strategy: str) -> None:
    for seed in range(3):
        array = random_bytes(9 * MIB + 5, seed)
        sending = sender.send_streaming(array, worker=group.workers)
        answers = group.ranks.receive([sending.data], receiver=strategy)
        assert [answer.get("tensors", answer) for answer in answers] == [[wanted(array, "uint8")]] * 2
        sending.wait(20)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["no endpoint", "no arena", "not for it"])
def test_a_rank_that_cannot_claim_gets_the_bytes_from_one_that_can(
    group: Group, sender: Sender, strategy: str, where: str
) -> None:
    """Rank 1 has them: rank 0 has no endpoint, was never handed that arena, or is none of the lease's consumers."""
    arrays = [random_bytes(200_001), random_bytes(70)]
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=8 * MIB) as other:
        other.connect(group.workers[1], timeout_s=20)
        sends = other if where == "no arena" else sender
        items = sends.send_many(arrays, worker=group.workers[1])
        assert {item.path for item in items} == {"lease"}
        receiver = f"{strategy} 1" if where == "no endpoint" else strategy
        answers = group.ranks.receive([*items, TensorData("uint8", (3,), Inline(b"abc"))], receiver=receiver)
        expected = [wanted(a, "uint8") for a in [*arrays, np.frombuffer(b"abc", np.uint8)]]
        assert [answer.get("tensors", answer) for answer in answers] == [expected] * 2
        assert settle(lambda: sends.leases_out == 0)


def test_an_owner_without_the_arena_gets_its_item(group: Group, sender: Sender) -> None:
    arrays = [random_bytes(200_001), random_bytes(70), random_bytes(3000)]
    items = sender.send_many(arrays, worker=group.workers[1])
    answers = group.ranks.receive(items, receiver="each 1", owners=[0, 1, 0])
    right = [wanted(a, "uint8") for a in arrays]
    assert [answer.get("tensors", answer) for answer in answers] == [[right[0], None, right[2]], [None, right[1], None]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_no_rank_can_claim_is_one_error(group: Group, sender: Sender, strategy: str) -> None:
    good = sender.send(random_bytes(5000), worker=group.workers)
    unknown = ShmHandle("mmcopyarena-0000000000000000-0-1", 0, 10, "mmcopy:0000000000000000")
    answers = group.ranks.receive([TensorData("uint8", (10,), unknown), good], receiver=strategy)
    message = f"lease '{unknown.name}', item 0 of 2: none of the 2 ranks can open it"
    assert [(answer.get("error"), answer.get("message")) for answer in answers] == [
        ("LeaseUnknownArenaError", message)
    ] * 2
    assert settle(lambda: sender.leases_out == 0)
    good = sender.send(random_bytes(5000), worker=group.workers)
    assert isinstance(good.payload, ShmHandle)
    forged = ShmHandle(good.payload.name, good.payload.offset + 256, 5000, good.payload.owner_id)
    answers = group.ranks.receive([TensorData("uint8", (5000,), forged)], receiver=strategy)
    assert [answer.get("error") for answer in answers] == ["LeaseForgedError"] * 2
    assert sender.cancel(good)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bad_item_in_front_leaves_nothing_behind_it(group: Group, sender: Sender, strategy: str) -> None:
    """What was not opened, because an item before it failed, goes too: leases and segments."""
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1)) as plain:
        short = plain.send(random_bytes(100)).payload
        assert isinstance(short, ShmHandle)
        bad = TensorData("uint8", (200,), ShmHandle(short.name, 0, 200, short.owner_id))
        items = [bad, sender.send(random_bytes(5000), worker=group.workers), plain.send(random_bytes(600))]
        answers = group.ranks.receive(items, receiver=strategy)
        assert [answer.get("error") for answer in answers] == ["SegmentSizeError"] * 2
        assert settle(lambda: sender.leases_out == 0)


def test_ranks_with_other_items_give_their_leases_back(group: Group, sender: Sender) -> None:
    items = sender.send_many([random_bytes(5000, n) for n in range(3)], worker=group.workers)
    given: dict[str, Any] = {"do": "receive", "receiver": "scatter"}
    commands = [{**given, "items": [as_json(item) for item in each]} for each in (items, items[::-1])]
    answers = group.ranks.each(commands)
    assert [answer.get("error") for answer in answers] == ["ParallelMismatchError"] * 2
    assert settle(lambda: sender.leases_out == 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sender_that_gives_up_is_an_error_on_both(group: Group, sender: Sender, strategy: str) -> None:
    arena = sender.arena
    assert arena is not None
    good = sender.send(random_bytes(70_000), worker=group.workers)
    (writer,) = arena.take([2 * MIB], [0, 1], timeout_s=5.0)
    handle = ShmHandle(writer.name, writer.offset, writer.nbytes, writer.owner_id)
    timer = threading.Timer(0.3, writer.abort)
    timer.start()
    answers = group.ranks.receive([good, TensorData("uint8", (2 * MIB,), handle)], receiver=strategy)
    timer.join()
    assert [answer.get("error") for answer in answers] == ["LeaseError"] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_dies_holds_nothing(
    tmp_path: pathlib.Path, segments: Callable[[], list[str]], strategy: str
) -> None:
    group = started(tmp_path, timeout_s=2.0)
    with group.ranks, Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=8 * MIB) as sender:
        for worker in group.workers:
            sender.connect(worker, timeout_s=20)
        items = sender.send_many([random_bytes(200_000), random_bytes(5)], worker=group.workers)
        given = {"do": "receive", "receiver": strategy, "items": [as_json(item) for item in items]}
        group.ranks.send(1, {**given, "die_reading": True})
        group.ranks.send(0, given)
        answer = group.ranks.collect([0])[0]
        if strategy != "each":  # which needs nothing of the other
            assert answer.get("error") in ("PeerLostError", "MmcopyTimeoutError"), answer
        assert settle(lambda: sender.leases_out == 0)
