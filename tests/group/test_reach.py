"""Ranks that do not see the same shared memory: what one cannot open comes from one that can.

Here each rank has a folder of its own in place of ``/dev/shm``; tests/test_parallel_hosts.py has real namespaces.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcopy import Inline, Receiver, Sender, ShmHandle, TensorData, TransportConfig, _native
from mmcopy.errors import ConfigError
from mmcopy.receive.group.owned import plan_transfers
from tests.rigs.ranks import Ranks, as_json, wanted
from tests.rigs.waiting import settle

STRATEGIES = ["each", "broadcast", "scatter"]
ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)
SIZE = 3
HOSTS = [0, 1, 1]
"""The host of each rank."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    return [tmp_path_factory.mktemp("shm") for _ in range(2)]


@pytest.fixture(scope="module")
def ranks(hosts: list[pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(SIZE, tmp_path_factory.mktemp("ranks")) as ranks:
        for name in STRATEGIES:
            ranks.each(
                [
                    {"do": "make", "name": name, "parallel": {"strategy": name},
                     "options": {"shm_dir": str(hosts[host]), "timeout_s": 10}}
                    for host in HOSTS
                ]
            )  # fmt: skip
        yield ranks


@pytest.fixture
def send(hosts: list[pathlib.Path]) -> Iterator[Callable[[np.ndarray[Any, Any], int], TensorData]]:
    """Publish on one of the hosts; both are empty at the end of a test."""
    senders = [Sender(ALWAYS, shm_dir=host) for host in hosts]
    yield lambda array, host: senders[host].send(array)
    for sender, host in zip(senders, hosts, strict=True):
        sender.close()
        assert settle(lambda host=host: list(host.iterdir()) == []), list(host.iterdir())  # type: ignore[misc]


Send = Callable[[np.ndarray[Any, Any], int], TensorData]


def arrays(*sizes: int) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)]


def inlined(array: np.ndarray[Any, Any]) -> TensorData:
    return TensorData("uint8", array.shape, Inline(array.tobytes()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, None, 1, 0], [None, 0, 0, None, 1]])
def test_every_rank_gets_all(ranks: Ranks, send: Send, strategy: str, where: list[int | None]) -> None:
    given = arrays(100_001, 5, 300_000, 65_536, 7)
    items = [inlined(a) if host is None else send(a, host) for a, host in zip(given, where, strict=True)]
    answers = ranks.receive(items, receiver=strategy)
    expected = [wanted(a, "uint8") for a in given]
    assert [answer.get("tensors", answer) for answer in answers] == [expected] * SIZE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_out_is_filled_also_from_elsewhere(ranks: Ranks, send: Send, strategy: str) -> None:
    given = arrays(100_001, 5)
    answers = ranks.receive([send(a, 1) for a in given], receiver=strategy, out="right")
    assert [answer.get("tensors", answer) for answer in answers] == [[wanted(a, "uint8") for a in given]] * SIZE


def test_more_items_than_one_exchange_has_bits(ranks: Ranks, send: Send) -> None:
    """8,000 items; the last is on the second host alone."""
    given = [np.full(1, n % 251, np.uint8) for n in range(8000)]
    items = [*(inlined(a) for a in given[:-2]), send(given[-2], 0), send(given[-1], 1)]
    answers = ranks.receive(items, receiver="each")
    expected = [wanted(a, "uint8") for a in given]
    assert all(answer["tensors"] == expected for answer in answers)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_reaches_it(ranks: Ranks, send: Send, strategy: str) -> None:
    items = [
        send(arrays(1000)[0], 0),
        send(arrays(500)[0], 1),
        TensorData("uint8", (4,), ShmHandle("smg-tokenspeed-gone", 0, 4)),
    ]
    answers = ranks.receive(items, receiver=strategy)
    assert [answer["error"] for answer in answers] == ["SegmentNotFoundError"] * SIZE
    message = "segment 'smg-tokenspeed-gone', item 2 of 3: none of the 3 ranks can open it"
    assert {answer["message"] for answer in answers} == {message}


def test_a_source_that_fails_while_it_reads_for_others(ranks: Ranks, send: Send, hosts: list[pathlib.Path]) -> None:
    item = send(arrays(300_000)[0], 1)
    assert isinstance(item.payload, ShmHandle)
    given = {"do": "receive", "receiver": "each", "items": [as_json(item)]}
    answers = ranks.each([given, {**given, "cut": str(hosts[1] / item.payload.name)}, given])
    assert [answer["error"] for answer in answers] == ["SegmentSizeError"] * SIZE


def test_an_owned_item_goes_to_its_owner_alone(ranks: Ranks, send: Send) -> None:
    given = arrays(400_000, 70_000, 0, 300_001, 9, 65_537)
    where = [0, 1, 1, 0, None, 1]
    owners = [1, 0, 0, 0, 2, 2]
    items = [inlined(a) if host is None else send(a, host) for a, host in zip(given, where, strict=True)]
    answers = ranks.receive(items, receiver="each", owners=owners)
    for rank, answer in enumerate(answers):
        expected = [wanted(a, "uint8") if owner == rank else None for a, owner in zip(given, owners, strict=True)]
        assert answer.get("tensors") == expected, answer
    # Rank 0 reads its own 300,001 bytes and rank 1's 400,000; rank 1 reads rank 0's 70,000; rank 2 reads its own.
    for answer, least in zip(answers, [700_001, 70_000, 65_537], strict=True):
        assert least <= answer["read"] < least + 60_000
    received = sum(answer["metrics"]["tensors_received"].get("segment", 0) for answer in answers)
    assert received >= 4


def test_an_empty_segment_of_another_host(ranks: Ranks, send: Send, hosts: list[pathlib.Path]) -> None:
    """A gateway writes files of no bytes, too; there is nothing to send of one."""
    full = arrays(70_000)[0]
    for options in ({}, {"owners": [1, 1]}, {"owners": [0, 1]}):
        _native.write_segment(hosts[0], "smg-tokenspeed-empty", b"")
        items = [send(full, 0), TensorData("int64", (0, 3), ShmHandle("smg-tokenspeed-empty", 0, 0))]
        expected = [wanted(full, "uint8"), wanted(np.zeros((0, 3), np.int64), "int64")]
        answers = ranks.receive(items, receiver="each", **options)
        owners: Any = options.get("owners")
        for rank, answer in enumerate(answers):
            mine = [each if owners is None or owners[n] == rank else None for n, each in enumerate(expected)]
            assert answer.get("tensors") == mine, answer


def test_owned_items_of_one_host_need_no_message(ranks: Ranks, send: Send) -> None:
    given = arrays(100_000, 200_000)
    answers = ranks.receive([send(a, 1) for a in given], receiver="each", owners=[2, 1])
    right = [wanted(a, "uint8") for a in given]
    assert [answer.get("tensors") for answer in answers] == [[None, None], [None, right[1]], [right[0], None]]


@pytest.mark.parametrize("owners", [[0], [0, 3], [0, -1]])
def test_owners_that_do_not_fit(ranks: Ranks, send: Send, owners: list[int]) -> None:
    answers = ranks.receive([send(a, 0) for a in arrays(9, 10)], receiver="each", owners=owners)
    assert [answer["error"] for answer in answers] == ["ConfigError"] * SIZE
    assert "want one rank of 0 to 2 for each of 2 items" in answers[2]["message"]


@pytest.mark.parametrize("owners", [0, {"0": 0, "1": 1}])
def test_owners_in_another_form_than_the_items(ranks: Ranks, send: Send, owners: Any) -> None:
    answers = ranks.receive([send(a, 0) for a in arrays(9, 10)], receiver="each", owners=owners)
    assert [answer["error"] for answer in answers] == ["ConfigError"] * SIZE
    assert f"owners is {type(owners).__name__}, want a sequence of ranks" in answers[2]["message"]


def test_other_owners_on_one_rank(ranks: Ranks, send: Send) -> None:
    items = [as_json(send(a, 0)) for a in arrays(9, 10)]
    given = {"do": "receive", "receiver": "each", "items": items}
    answers = ranks.each([{**given, "owners": owners} for owners in ([0, 1], [0, 1], [1, 0])])
    assert [answer["error"] for answer in answers] == ["ParallelMismatchError"] * SIZE


def test_owned_items_need_a_group(tmp_path: pathlib.Path) -> None:
    with Sender(ALWAYS, shm_dir=tmp_path) as sender, Receiver("cpu", framework="numpy", shm_dir=tmp_path) as receiver:
        with pytest.raises(ConfigError, match="needs a group"):
            receiver.receive_owned([sender.send(np.ones(9, np.uint8))], [0])
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@given(st.integers(1, 5), st.lists(st.integers(0, 2000), max_size=12), st.data())
def test_each_missing_item_is_in_one_message_and_messages_do_not_overlap(
    size: int, sizes: list[int], data: st.DataObject
) -> None:
    owners = [data.draw(st.integers(0, size - 1)) for _ in sizes]
    reachable = [[data.draw(st.booleans()) for _ in sizes] for _ in range(size)]
    for item in range(len(sizes)):
        reachable[data.draw(st.integers(0, size - 1))][item] = True
    transfers = plan_transfers(sizes, owners, reachable)
    pairs = [(transfer.source, transfer.owner) for transfer in transfers]
    assert pairs == sorted(set(pairs))
    carried = []
    for transfer in transfers:
        end = 0
        for item, start in zip(transfer.items, transfer.starts, strict=True):
            assert reachable[transfer.source][item]
            assert owners[item] == transfer.owner
            assert start >= end
            end = start + sizes[item]
            carried.append(item)
        assert end <= transfer.nbytes
    missing = [n for n, owner in enumerate(owners) if sizes[n] and not reachable[owner][n]]
    assert sorted(carried) == missing
