"""Two hosts, as far as one kernel can make them: network namespaces, a veth pair between them, a /dev/shm each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.rigs.private_shm import private_shm
from tests.rigs.ranks import Ranks

pytestmark = pytest.mark.root

STRATEGIES = ["each", "broadcast", "scatter"]
SIZES = [3_000_000, 100_001, 7]


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces whose ends of the pair are called ``cable`` and have 10.99.0.1 and 10.99.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2)")
    names = [f"smg-tokenspeed-{os.getpid()}-{n}" for n in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for n, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.99.0.{n}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except OSError as error:
        remove(names)
        pytest.skip(f"cannot make network namespaces: {error}")
    yield names
    remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def ranks(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(
        2,
        tmp_path_factory.mktemp("ranks"),
        prefixes=[["ip", "netns", "exec", name, *private_shm("mode=1777")] for name in hosts],
        environment=[{"GLOO_SOCKET_IFNAME": "cable"}] * 2,
    ) as ranks:
        for name in STRATEGIES:
            ranks.all("make", name=name, options={"timeout_s": 20}, parallel={"strategy": name})
        yield ranks


def test_the_hosts_are_apart(ranks: Ranks) -> None:
    first, second = ranks.all("surroundings")
    assert first["shm"] != second["shm"]
    assert first["links"] == second["links"] == ["cable", "lo"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("host", [0, 1])
def test_tensors_of_one_host_reach_the_other(ranks: Ranks, strategy: str, host: int) -> None:
    before = ranks.all("surroundings")
    sent = ranks.each([{"do": "publish", "sizes": SIZES} if n == host else None for n in range(2)])[host]
    answers = ranks.all("receive", receiver=strategy, items=sent["items"])
    assert [answer.get("tensors", answer) for answer in answers] == [sent["told"]] * 2
    after = ranks.all("surroundings")
    assert [each["left"] for each in after] == [[], []]
    crossed = [b["sent"] - a["sent"] for a, b in zip(before, after, strict=True)]
    assert crossed[host] > sum(SIZES)
    assert crossed[1 - host] < 500_000


def test_tensors_of_both_hosts_in_one_receive(ranks: Ranks) -> None:
    sent = ranks.all("publish", sizes=SIZES)
    items = [each for answer in sent for each in answer["items"]]
    answers = ranks.all("receive", receiver="each", items=items)
    expected = [each for answer in sent for each in answer["told"]]
    assert [answer.get("tensors", answer) for answer in answers] == [expected] * 2
    assert [each["left"] for each in ranks.all("surroundings")] == [[], []]


def test_an_owned_tensor_crosses_only_where_its_owner_is_elsewhere(ranks: Ranks) -> None:
    before = ranks.all("surroundings")
    sent = ranks.each([{"do": "publish", "sizes": SIZES}, None])[0]
    answers = ranks.all("receive", receiver="each", items=sent["items"], owners=[0, 1, 1])
    first, *others = sent["told"]
    assert [answer.get("tensors", answer) for answer in answers] == [[first, None, None], [None, *others]]
    after = ranks.all("surroundings")
    assert [each["left"] for each in after] == [[], []]
    assert SIZES[1] < after[0]["sent"] - before[0]["sent"] < SIZES[0]


def test_what_neither_host_has(ranks: Ranks) -> None:
    sent = ranks.each([{"do": "publish", "sizes": SIZES}, None])[0]
    gone = {"dtype": "uint8", "shape": [4], "handle": ["smg-tokenspeed-gone", 0, 4, ""]}
    answers = ranks.all("receive", receiver="broadcast", items=[*sent["items"], gone])
    assert [answer["error"] for answer in answers] == ["SegmentNotFoundError"] * 2
    assert [each["left"] for each in ranks.all("surroundings")] == [[], []]


SHAPES = [[300, 1000], [3], [64, 64]]


def test_tokenspeed_features_of_one_host_reach_the_other(ranks: Ranks) -> None:
    published = ranks.each([None, {"do": "ts_publish", "shapes": SHAPES}])[1]
    answers = ranks.all("ts_move", features=published["features"])
    assert [answer.get("tensors", answer) for answer in answers] == [published["told"]] * 2
    assert [each["left"] for each in ranks.all("surroundings")] == [[], []]


def test_tokenspeed_items_are_routed_to_owners_that_cannot_open_them(ranks: Ranks) -> None:
    first, second = ranks.all("ts_publish", shapes=SHAPES)
    answers = ranks.all("ts_prepare", features=first["features"])
    assert answers == [{"cross": [True] * 3, "source": [0] * 3, "reachable": [[True, False]] * 3}] * 2
    first = ranks.each([{"do": "ts_publish", "shapes": SHAPES}, None])[0]
    features, told = first["features"] + second["features"], first["told"] + second["told"]
    answers = ranks.all("ts_route", features=features, owned=[[0, 3, 4], [1, 5, 2]])
    assert answers[0] == {
        "remote": [False, False, False, True, True, False],
        "tensors": [told[0], None, None, told[3], told[4], None],
    }
    assert answers[1] == {
        "remote": [False, True, True, False, False, False],
        "tensors": [None, told[1], told[2], None, None, told[5]],
    }
    assert [each["left"] for each in ranks.all("surroundings")] == [[], []]


def test_tokenspeed_owners_that_do_not_fit(ranks: Ranks) -> None:
    published = ranks.each([{"do": "ts_publish", "shapes": SHAPES}, None])[0]
    answers = ranks.all("ts_route", features=published["features"], owned=[[0], [1], [2]])
    assert [answer["error"] for answer in answers] == ["ValueError"] * 2
    assert [each["left"] for each in ranks.all("surroundings")] == [[], []]
