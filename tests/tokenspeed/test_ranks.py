"""mmcopy's stand-in for TokenSpeed's transport on two ranks of one host; tests/test_parallel_hosts.py has two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.ranks import Ranks

STRATEGIES = ["each", "broadcast", "scatter"]
SHAPES = [[100, 1176], [3], [64, 64]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture
def features(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """What rank 0 has published; nothing of it is left at the end."""
    published = ranks.each([{"do": "ts_publish", "shapes": SHAPES}, None])[0]
    yield published
    left = ranks.each([{"do": "surroundings"}, None])[0]["left"]
    assert not {name for name, _, _ in published["features"]} & set(left)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_have_all_features(ranks: Ranks, features: dict[str, Any], strategy: str) -> None:
    answers = ranks.all("ts_move", features=features["features"], parallel={"strategy": strategy})
    assert [answer.get("tensors", answer) for answer in answers] == [features["told"]] * 2
    counted = [answer["metrics"].get("group_receives", {}) for answer in answers]
    assert (
        counted == [{} if strategy == "each" else {strategy: 1}] * 2
    )  # nothing to agree on where nobody needs another


def test_a_rank_without_the_segment_gets_it_from_the_other(ranks: Ranks, features: dict[str, Any]) -> None:
    answers = ranks.all("ts_move", features=features["features"], parallel={"strategy": "broadcast"}, detached=1)
    assert [answer.get("tensors", answer) for answer in answers] == [features["told"]] * 2


def test_prepare_finds_what_no_rank_has(ranks: Ranks, features: dict[str, Any]) -> None:
    answers = ranks.all("ts_prepare", features=[*features["features"], ["smg-tokenspeed-gone", [1], "uint8"]])
    assert [answer["error"] for answer in answers] == ["SegmentNotFoundError"] * 2
    assert "'smg-tokenspeed-gone' is not reachable from any of the 2 ranks" in answers[1]["message"]


def test_prepare_with_other_requests_on_one_rank(ranks: Ranks, features: dict[str, Any]) -> None:
    given = features["features"]
    answers = ranks.each([{"do": "ts_prepare", "features": each} for each in (given, given[:-1])])
    assert [answer["error"] for answer in answers] == ["ParallelMismatchError"] * 2


def test_prepare_says_who_can_open_what(ranks: Ranks, features: dict[str, Any]) -> None:
    answers = ranks.all("ts_prepare", features=features["features"])
    assert answers == [{"cross": [False] * 3, "source": [0] * 3, "reachable": [[True, True]] * 3}] * 2


def test_a_bad_name_is_the_same_error_on_both(ranks: Ranks, features: dict[str, Any]) -> None:
    answers = ranks.all("ts_prepare", features=[*features["features"], ["passwd", [1], "uint8"]])
    assert [answer["error"] for answer in answers] == ["PayloadError"] * 2
    assert {answer["message"][:30] for answer in answers} == {"rank 0 of the group: segment '"}
