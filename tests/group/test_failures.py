"""Ranks that fail, die, are late or were given other settings: one error on every rank in time, and nothing left."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, Receiver, Sender, ShmHandle, TensorData, TransportConfig
from mmcopy.errors import ConfigError
from tests.rigs.ranks import Ranks, as_json, wanted
from tests.rigs.waiting import settle

STRATEGIES = ["each", "broadcast", "scatter"]
ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)
SIZE = 3
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def shm_of_all(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("shm")


def started(directory: pathlib.Path, shm: pathlib.Path) -> Ranks:
    ranks = Ranks(SIZE, directory)
    options = {"shm_dir": str(shm), "timeout_s": LIMIT_S}
    for name in STRATEGIES:
        ranks.all("make", name=name, options=options, parallel={"strategy": name})
    return ranks


@pytest.fixture(scope="module")
def ranks(shm_of_all: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with started(tmp_path_factory.mktemp("ranks"), shm_of_all) as ranks:
        yield ranks


@pytest.fixture
def mortal_ranks(shm: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Ranks]:
    with started(tmp_path, shm) as ranks:
        yield ranks


@pytest.fixture
def shm(shm_of_all: pathlib.Path) -> Iterator[pathlib.Path]:
    yield shm_of_all
    assert settle(lambda: list(shm_of_all.iterdir()) == []), list(shm_of_all.iterdir())


@pytest.fixture
def sender(shm: pathlib.Path) -> Iterator[Sender]:
    with Sender(ALWAYS, shm_dir=shm) as sender:
        yield sender


RAW = np.random.default_rng(1).integers(0, 256, 300_001, np.uint8)
RIGHT = [wanted(RAW, "uint8")]


def commands(strategy: str, items: list[TensorData], *special: dict[str, Any]) -> list[dict[str, Any] | None]:
    """The same receive on every rank; ``special[rank]`` is added to it."""
    given = {"do": "receive", "receiver": strategy, "items": [as_json(item) for item in items]}
    return [{**given, **(special[rank] if rank < len(special) else {})} for rank in range(SIZE)]


def check_works(ranks: Ranks, sender: Sender) -> None:
    for strategy in STRATEGIES:
        answers = ranks.receive([sender.send(RAW)], receiver=strategy)
        assert [answer.get("tensors", answer) for answer in answers] == [RIGHT] * SIZE


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            ShmHandle("smg-tokenspeed-missing", 0, 4),
            "SegmentNotFoundError",
            "segment 'smg-tokenspeed-missing', item 1 of 2: none of the 3",
        ),
        (ShmHandle("passwd", 0, 4), "PayloadError", 'rank 0 of the group: segment "passwd" is refused'),
        (None, "SegmentSizeError", "rank 0 of the group: "),
    ],
)
def test_an_item_that_cannot_be_read_anywhere(
    ranks: Ranks, sender: Sender, strategy: str, bad: ShmHandle | None, error: str, message: str
) -> None:
    good = sender.send(RAW)
    if bad is None:  # a segment that is too short
        payload = sender.send(RAW[:3]).payload
        assert isinstance(payload, ShmHandle)
        bad = ShmHandle(payload.name, 0, 4)
    answers = ranks.receive([good, TensorData("uint8", (4,), bad)], receiver=strategy)
    assert [answer["error"] for answer in answers] == [error] * SIZE
    assert len({answer["message"] for answer in answers}) == 1
    assert answers[0]["message"].startswith(message)
    check_works(ranks, sender)


def test_a_segment_named_twice(ranks: Ranks, sender: Sender) -> None:
    item = sender.send(RAW)
    assert [answer["error"] for answer in ranks.receive([item, item], receiver="each")] == ["PayloadError"] * SIZE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_error_of_one_rank_is_that_of_all(ranks: Ranks, sender: Sender, strategy: str) -> None:
    answers = ranks.each(commands(strategy, [sender.send(RAW)], {}, {"out": "wrong"}, {"out": "right"}))
    assert [answer["error"] for answer in answers] == ["DeviceError"] * SIZE
    assert {answer["message"][:42] for answer in answers} == {"rank 1 of the group: out 0 is float64 [1] "}
    assert [answer["cause"] for answer in answers] == ["NoneType", "DeviceError", "NoneType"]
    check_works(ranks, sender)


@pytest.mark.parametrize("strategy", ["broadcast", "scatter"])
def test_a_file_that_is_cut_under_the_reader(ranks: Ranks, sender: Sender, shm: pathlib.Path, strategy: str) -> None:
    """The source fails when all have agreed already: the others must neither wait for it nor take its bytes."""
    item = sender.send(RAW)
    assert isinstance(item.payload, ShmHandle)
    cut = {"cut": str(shm / item.payload.name)}
    answers = ranks.each(commands(strategy, [item], *([cut] if strategy == "broadcast" else [{}, {}, cut])))
    assert [answer["error"] for answer in answers] == ["SegmentSizeError"] * SIZE
    assert len({answer["message"] for answer in answers}) == 1
    check_works(ranks, sender)


def test_other_options_on_one_rank(ranks: Ranks, sender: Sender, shm: pathlib.Path) -> None:
    options = {"shm_dir": str(shm), "timeout_s": LIMIT_S}
    made = [{"do": "make", "name": "odd", "options": options, "parallel": {"scatter_min_bytes": n}} for n in (9, 9, 8)]
    ranks.each(made)
    answers = ranks.receive([sender.send(RAW)], receiver="odd")
    assert [answer["error"] for answer in answers] == ["ParallelMismatchError"] * SIZE
    assert {answer["message"] for answer in answers} == {"ranks 0 and 2 of the group have different ParallelOptions"}


def test_a_slow_rank_is_waited_for(ranks: Ranks, sender: Sender) -> None:
    for strategy in STRATEGIES:
        answers = ranks.each(commands(strategy, [sender.send(RAW)], {}, {"delay_s": 0.4}))
        assert [answer.get("tensors", answer) for answer in answers] == [RIGHT] * SIZE


@pytest.mark.parametrize("strategy", ["each", "broadcast"])
def test_a_rank_that_is_too_slow_costs_that_receive_alone(ranks: Ranks, sender: Sender, strategy: str) -> None:
    answers = ranks.each(commands(strategy, [sender.send(RAW)], {}, {"delay_s": 2 * LIMIT_S}))
    assert [answer["error"] for answer in answers] == ["MmcopyTimeoutError"] * SIZE
    check_works(ranks, sender)


def test_ranks_that_went_on_tell_the_late_one(ranks: Ranks, sender: Sender) -> None:
    """While one rank sleeps, the others give up three receives; it is told so, and all meet again in the fourth."""
    for receive in range(4):
        for rank, command in enumerate(commands("broadcast", [sender.send(RAW)])):
            late = {"delay_s": 3.5 * LIMIT_S} if (rank, receive) == (1, 0) else {}
            ranks.send(rank, {**(command or {}), **late})
    for _ in range(3):
        answers = ranks.collect(range(SIZE))
        assert [answers[rank]["error"] for rank in range(SIZE)] == ["MmcopyTimeoutError"] * SIZE
        assert "has given it up" in answers[1]["message"]
    answers = ranks.collect(range(SIZE))
    assert [answers[rank].get("tensors", answers[rank]) for rank in range(SIZE)] == [RIGHT] * SIZE


def test_receivers_of_one_group_count_together(ranks: Ranks, sender: Sender, shm: pathlib.Path) -> None:
    """A rank is late with one receiver while the others are at another, which has had far fewer receives."""
    ranks.all("make", name="new", options={"shm_dir": str(shm), "timeout_s": LIMIT_S})
    for strategy, late in (("broadcast", {"delay_s": 1.5 * LIMIT_S}), ("new", {})):
        for rank, command in enumerate(commands(strategy, [sender.send(RAW)], {}, late)):
            ranks.send(rank, command or {})
    answers = ranks.collect(range(SIZE))
    assert [answers[rank]["error"] for rank in range(SIZE)] == ["MmcopyTimeoutError"] * SIZE
    answers = ranks.collect(range(SIZE))
    assert [answers[rank].get("tensors", answers[rank]) for rank in range(SIZE)] == [RIGHT] * SIZE


def test_a_late_rank_that_needs_nobody_gets_its_tensors(ranks: Ranks, sender: Sender) -> None:
    """The one case in which ranks differ: documented, and all are in step afterwards."""
    inline = [TensorData("uint8", RAW.shape, Inline(RAW.tobytes()))]
    answers = ranks.each(commands("each", inline, {}, {"delay_s": 1.5 * LIMIT_S}))
    assert [answer.get("error") for answer in answers] == ["MmcopyTimeoutError", None, "MmcopyTimeoutError"]
    assert answers[1]["tensors"] == RIGHT
    check_works(ranks, sender)


def test_a_rank_that_dies(mortal_ranks: Ranks, sender: Sender) -> None:
    """While the others wait for it; and what they are asked afterwards."""
    check_works(mortal_ranks, sender)
    given = commands("scatter", [sender.send(RAW)])
    answers = mortal_ranks.each([given[0], {"do": "die", "delay_s": 0.2}, given[2]])
    assert {answers[rank]["error"] for rank in (0, 2)} <= {"PeerLostError", "MmcopyTimeoutError"}
    assert max(answers[rank]["seconds"] for rank in (0, 2)) < LIMIT_S + 1
    for _ in range(2):
        given = commands("each", [sender.send(RAW)])
        answers = mortal_ranks.each([given[0], None, given[2]])
        assert {answers[rank]["error"] for rank in (0, 2)} <= {"PeerLostError", "MmcopyTimeoutError"}
        assert max(answers[rank]["seconds"] for rank in (0, 2)) < LIMIT_S + 1


def test_a_rank_that_dies_between_the_agreement_and_the_collective(mortal_ranks: Ranks, sender: Sender) -> None:
    given = commands("scatter", [sender.send(RAW)], {}, {"die_reading": True})
    for rank, command in enumerate(given):
        mortal_ranks.send(rank, command or {})
    answers = mortal_ranks.collect([0, 2])
    assert {answer["error"] for answer in answers.values()} <= {"PeerLostError", "MmcopyTimeoutError"}


@pytest.mark.parametrize("count", [1, 3])
def test_a_message_that_claims_more_than_there_can_be(ranks: Ranks, sender: Sender, count: int) -> None:
    """More bytes than can be addressed, and with three more than a digest can hold."""
    items = [TensorData("uint8", (2**63,), ShmHandle(f"smg-tokenspeed-missing{n}", 0, 2**63)) for n in range(count)]
    for answer in ranks.receive(items, receiver="broadcast"):
        assert answer["error"] == "DeviceMemoryError"
        assert f"wanted {count * 2**63 + 256 * SIZE} bytes" in answer["message"]
    check_works(ranks, sender)


@pytest.mark.parametrize(
    ("name", "error"), [("smg-tokenspeed-missing", "SegmentNotFoundError"), ("passwd", "PayloadError")]
)
def test_receives_that_fail_keep_no_memory(ranks: Ranks, name: str, error: str) -> None:
    for answer in ranks.all("many_failing", receiver="scatter", count=70, name=name):
        assert answer["errors"] == [error]
        early, late = answer["states"]
        assert late["rss_kib"] - early["rss_kib"] < 16 << 10
        assert late["descriptors"] == early["descriptors"]


def test_receive_async_is_refused_and_leaves_nothing(ranks: Ranks, sender: Sender) -> None:
    answers = ranks.all("receive_async", receiver="each", items=[as_json(sender.send(RAW))])
    assert [answer["error"] for answer in answers] == ["ConfigError"] * SIZE
    check_works(ranks, sender)


def test_groups_that_do_not_fit(ranks: Ranks) -> None:
    ranks.all("group", name="two", ranks=[0, 1])
    ranks.all("group", name="all")

    def refused(**options: Any) -> list[str | None]:
        answers = ranks.all("make", name="refused", **options)
        assert {answer.get("error") for answer in answers} <= {"ConfigError", None}
        return [answer.get("message") for answer in answers]

    assert refused(group="two") == [None, None, "this process is not in group"]
    different = "group has the ranks [0, 1, 2], cpu_group [0, 1]"
    assert refused(cpu_group="two") == [different, different, "this process is not in cpu_group"]
    assert (refused(group=7)[0] or "").startswith("group is 7, want a process group of torch.distributed: ")
    assert refused(options={"framework": "numpy"}) == ["a group gives torch tensors, framework is 'numpy'"] * SIZE
    answers = ranks.all("make", name="further", group="all", cpu_group="all")
    assert answers == [{}] * SIZE


def test_options_for_a_group_without_a_group() -> None:
    with pytest.raises(ConfigError, match="give group, too"):
        Receiver("cpu", cpu_group=object())
