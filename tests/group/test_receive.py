"""Receiving on a group of 2 and of 4 ranks: equal bytes on every rank, whatever the strategy, and nothing left."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, Sender, TensorData, TransportConfig
from mmcopy.tensors import DTYPES
from tests.rigs.ranks import Ranks, as_json, wanted
from tests.rigs.waiting import settle

STRATEGIES = ["each", "broadcast", "scatter"]
ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "shm").mkdir()
    with Ranks(request.param, directory) as ranks:
        options = {"shm_dir": str(directory / "shm"), "timeout_s": 20}
        for name in STRATEGIES:
            ranks.all("make", name=name, options=options, parallel={"strategy": name})
        ranks.all(
            "make",
            name="auto",
            options=options,
            parallel={"broadcast_min_bytes": 400_000, "scatter_min_bytes": 4_000_000},
        )
        ranks.shm_dir = directory / "shm"  # type: ignore[attr-defined]
        yield ranks


@pytest.fixture
def shm(ranks: Ranks) -> Iterator[pathlib.Path]:
    """The ranks' shared memory, empty at the end of a test."""
    path: pathlib.Path = ranks.shm_dir  # type: ignore[attr-defined]
    yield path
    assert settle(lambda: list(path.iterdir()) == []), list(path.iterdir())


@pytest.fixture
def sender(shm: pathlib.Path) -> Iterator[Sender]:
    with Sender(ALWAYS, shm_dir=shm) as sender:
        yield sender


def bits(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bytes of that many elements, as an array of the shape, of unsigned integers or bytes."""
    raw = np.random.default_rng(seed).integers(0, 256, DTYPES[dtype] * math.prod(shape), np.uint8)
    raw &= 1 if dtype == "bool" else 255
    return raw


def told(raw: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {**wanted(raw, dtype), "shape": list(shape)}


def published(
    sender: Sender, dtype: str, shape: tuple[int, ...], raw: np.ndarray[Any, Any], *, inline: bool
) -> TensorData:
    payload = Inline(raw.tobytes()) if inline or not len(raw) else sender.send(raw).payload
    return TensorData(dtype, shape, payload)


SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("bfloat16", (300, 1176)), ("int64", (1, 3)), ("float32", ()), ("uint8", (0,)), ("float16", (0, 5)),
    ("uint8", (1,)), ("bool", (7,)), ("float8_e4m3fn", (257,)), ("int32", (64, 4)), ("uint8", (100_003,)),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("inline", ["none", "all", "every other"])
def test_mixed_dtypes_uneven_sizes_empty_and_0d(ranks: Ranks, sender: Sender, strategy: str, inline: str) -> None:
    raws = [bits(dtype, shape, seed) for seed, (dtype, shape) in enumerate(SHAPES)]
    items = [
        published(sender, dtype, shape, raw, inline=inline == "all" or (inline == "every other" and n % 2 == 1))
        for n, ((dtype, shape), raw) in enumerate(zip(SHAPES, raws, strict=True))
    ]
    answers = ranks.receive(items, receiver=strategy)
    expected = [told(raw, dtype, shape) for raw, (dtype, shape) in zip(raws, SHAPES, strict=True)]
    assert [answer.get("tensors", answer) for answer in answers] == [expected] * ranks.size


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 1023, 1024, 1025, 65536, (1 << 20) + 1])
def test_edge_sizes(ranks: Ranks, sender: Sender, strategy: str, nbytes: int) -> None:
    raw = bits("uint8", (nbytes,), nbytes)
    answers = ranks.receive([published(sender, "uint8", (nbytes,), raw, inline=False)], receiver=strategy)
    assert [answer["tensors"] for answer in answers] == [[told(raw, "uint8", (nbytes,))]] * ranks.size


def test_no_items(ranks: Ranks, shm: pathlib.Path) -> None:
    for name in [*STRATEGIES, "auto"]:
        assert [answer["tensors"] for answer in ranks.receive([], receiver=name)] == [[]] * ranks.size


def test_only_the_elected_source_reads(ranks: Ranks, sender: Sender) -> None:
    """Bytes that the kernel counts as read by each process: all, one rank's, or a share each."""
    nbytes = 4 << 20
    raw = bits("uint8", (nbytes,), 1)
    shares = {
        "each": [nbytes] * ranks.size,
        "broadcast": [nbytes] + [0] * (ranks.size - 1),
        "scatter": [nbytes // ranks.size] * ranks.size,
    }
    for strategy, expected in shares.items():
        answers = ranks.receive([published(sender, "uint8", (nbytes,), raw, inline=False)], receiver=strategy)
        assert [answer["tensors"] for answer in answers] == [[told(raw, "uint8", (nbytes,))]] * ranks.size
        for answer, least in zip(answers, expected, strict=True):
            assert least <= answer["read"] < least + (256 << 10)  # the sockets' bytes are not counted there


def test_the_strategy_follows_the_sizes_and_is_counted(ranks: Ranks, sender: Sender) -> None:
    before = ranks.receive([], receiver="auto")[-1]["metrics"]["group_receives"]
    for nbytes, strategy in [(50_000, "each"), (300_000, "broadcast"), (3_000_000, "scatter")]:
        raw = bits("uint8", (nbytes,), nbytes)
        answers = ranks.receive([published(sender, "uint8", (nbytes,), raw, inline=False)], receiver="auto")
        assert [answer["tensors"] for answer in answers] == [[told(raw, "uint8", (nbytes,))]] * ranks.size
        counted = answers[-1]["metrics"]["group_receives"]
        assert counted[strategy] == before.get(strategy, 0) + 1
        before = counted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_out_is_filled(ranks: Ranks, sender: Sender, strategy: str) -> None:
    raws = [bits("uint8", (n,), n) for n in (100_000, 0, 5)]
    items = [published(sender, "uint8", raw.shape, raw, inline=False) for raw in raws]
    answers = ranks.receive(items, receiver=strategy, out="right")
    assert [answer["tensors"] for answer in answers] == [[told(raw, "uint8", raw.shape) for raw in raws]] * ranks.size


def test_ten_thousand_small_receives_without_growth(ranks: Ranks, shm: pathlib.Path) -> None:
    count = 10_000 if ranks.size == 2 else 200
    for answer in ranks.all("many", receiver="each", shm_dir=str(shm), count=count):
        assert answer["wrong"] == 0
        early, late = answer["states"]
        assert (late["descriptors"], late["threads"]) == (early["descriptors"], early["threads"])
        assert late["rss_kib"] - early["rss_kib"] < 8 << 10


def test_one_rank_with_other_items_is_the_same_error_on_all(ranks: Ranks, sender: Sender) -> None:
    raw = bits("uint8", (5000,), 5)
    for strategy in STRATEGIES:
        for change in ("missing", "order", "size", "dtype"):
            items = [published(sender, "uint8", (5000,), raw, inline=False) for _ in range(3)]
            others = {
                "missing": items[:2],
                "order": [items[1], items[0], items[2]],
                "size": [
                    *items[:2],
                    TensorData("uint8", (4999,), type(items[2].payload)(items[2].payload.name, 0, 4999)),
                ],
                "dtype": [*items[:2], TensorData("int8", (5000,), items[2].payload)],
            }[change]
            commands = [
                {"do": "receive", "receiver": strategy, "items": [as_json(each) for each in given]}
                for given in [items] * (ranks.size - 1) + [others]
            ]
            answers = ranks.each(commands)
            assert {answer["error"] for answer in answers} == {"ParallelMismatchError"}
            assert len({answer["message"] for answer in answers}) == 1
            if change == "missing":
                assert f"3 items of 15000 bytes, rank {ranks.size - 1} 2 items of 10000 bytes" in answers[0]["message"]
    answers = ranks.receive([published(sender, "uint8", (5000,), raw, inline=False)], receiver="scatter")
    assert [answer["tensors"] for answer in answers] == [[told(raw, "uint8", (5000,))]] * ranks.size
