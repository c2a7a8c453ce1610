"""Who reads what on a group: TokenSpeed's own cases, the table of the docs, and every byte read once."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy.errors import ConfigError
from mmcopy.receive.group import ItemFacts, ParallelOptions, Strategy, choose_strategy, plan_group
from mmcopy.receive.group.plan import capacity_bytes, first_unreached
from mmcopy.receive.plan import ALIGN_BYTES
from tests.rigs.arrays import MIB

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = ParallelOptions(scatter_min_bytes=1 << 60)
"""Without the strategy that TokenSpeed does not have."""


def shared(nbytes: int, dtype: str = "bfloat16") -> ItemFacts:
    return ItemFacts(nbytes, dtype, True)


def inline(nbytes: int, dtype: str = "bfloat16") -> ItemFacts:
    return ItemFacts(nbytes, dtype, False)


@pytest.mark.parametrize(
    ("size", "items", "strategy"),
    [
        (2, [shared(128 * MIB)], Strategy.BROADCAST),
        (2, [shared(128 * MIB - 2)], Strategy.EACH),
        (4, [shared(8 * MIB)] * 8, Strategy.BROADCAST),
        (4, [shared(32 * MIB), shared(32 * MIB, "float16")], Strategy.EACH),
        (4, [shared(64 * MIB), inline(2)], Strategy.EACH),
        (1, [shared(1 << 40)], Strategy.EACH),
        (8, [], Strategy.EACH),
    ],
)
def test_the_cases_of_tokenspeed(size: int, items: list[ItemFacts], strategy: Strategy) -> None:
    assert choose_strategy(items, size=size, options=SEED) is strategy


def test_scatter_has_its_own_threshold_and_takes_any_dtype() -> None:
    options = ParallelOptions(scatter_min_bytes=1000)
    mixed = [shared(200), shared(50, "int64"), inline(10)]
    assert choose_strategy(mixed, size=4, options=options) is Strategy.SCATTER
    assert choose_strategy(mixed, size=3, options=options) is Strategy.EACH  # 250 shared bytes, wanted 333
    assert choose_strategy([inline(1 << 30)], size=4, options=options) is Strategy.EACH  # it is everywhere already
    assert choose_strategy([shared(1000)], size=1, options=options) is Strategy.EACH


@pytest.mark.parametrize("name", ["each", "broadcast", "scatter"])
def test_a_strategy_can_be_forced(name: str) -> None:
    options = ParallelOptions(strategy=name)
    for size in (1, 2, 8):
        for items in ([shared(1)], [shared(1 << 40)], [inline(5), shared(7, "int64")]):
            assert choose_strategy(items, size=size, options=options) is Strategy(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "spread"}, "ParallelOptions.strategy is 'spread', want one of each, broadcast, scatter"),
        ({"broadcast_min_bytes": -1}, "ParallelOptions.broadcast_min_bytes is -1"),
        ({"scatter_min_bytes": "1x"}, "ParallelOptions.scatter_min_bytes is '1x'"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ParallelOptions(**given)


def decision_table() -> list[list[str]]:
    """The rows of the table in README.md, as the code decides."""
    sizes = {"64 KiB": 64 << 10} | {
        f"{n} MiB" if n < 1024 else "1 GiB": n * MIB for n in (1, 16, 32, 64, 128, 256, 512, 1024)
    }
    return [
        [
            text,
            *(choose_strategy([shared(nbytes)], size=n, options=ParallelOptions()).value for n in (1, 2, 4, 8)),
        ]
        for text, nbytes in sizes.items()
    ]


def test_the_table_in_the_readme_is_what_the_code_decides() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("| one tensor in shared memory |")[1].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in table] == decision_table()


def check(
    items: list[ItemFacts], size: int, options: ParallelOptions, reachable: tuple[tuple[bool, ...], ...] | None
) -> None:
    plan = plan_group(tuple(items), size=size, options=options, reachable=reachable)
    assert plan.nbytes <= capacity_bytes(items, size=size)
    owner = np.full(plan.nbytes, -1)
    for n, (start, item) in enumerate(zip(plan.starts, items, strict=True)):
        assert start % ALIGN_BYTES == 0
        assert (owner[start : start + item.nbytes] == -1).all(), "tensors overlap"
        owner[start : start + item.nbytes] = n
    edges = [edge for section in plan.sections for edge in (section.start, section.stop)]
    assert edges == sorted(edges)
    assert (not edges and plan.nbytes == 0) or (edges[0], edges[-1]) == (0, plan.nbytes)
    for rank in range(size):
        read = np.zeros(plan.nbytes, bool)
        for start, stop in plan.windows(rank):
            assert not read[start:stop].any()
            read[start:stop] = True
        for n in set(owner[read].tolist()) - {-1}:
            assert reachable is None or reachable[rank][n], "a rank reads what it cannot reach"
        there = read.copy()
        for section in plan.sections:
            if section.strategy is Strategy.BROADCAST:
                there[section.start : section.stop] = True
                assert rank != section.source or read[section.start : section.stop].all()
            if section.strategy is Strategy.SCATTER:
                start, stop = plan.share(section, rank)
                assert (start % ALIGN_BYTES, stop % ALIGN_BYTES) == (0, 0)
                assert not read[section.start : start].any()
                assert not read[stop : section.stop].any()
                there[section.start : section.stop] = True
        assert there.all()


FACTS = st.builds(
    ItemFacts, st.one_of(st.integers(0, 5000), st.sampled_from([0, 255, 256, 257])), st.sampled_from(["a", "b"]),
    st.booleans(),
)  # fmt: skip
OPTIONS = st.builds(
    ParallelOptions,
    strategy=st.sampled_from([None, *Strategy]),
    broadcast_min_bytes=st.integers(0, 20000),
    scatter_min_bytes=st.integers(0, 20000),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FACTS, max_size=9), st.integers(1, 8), OPTIONS, st.data())
def test_every_byte_gets_to_every_rank_and_nothing_overlaps(
    items: list[ItemFacts], size: int, options: ParallelOptions, data: st.DataObject
) -> None:
    reachable = None
    if data.draw(st.booleans()):
        rows = st.lists(st.booleans(), min_size=len(items), max_size=len(items))
        matrix = [data.draw(rows) for _ in range(size)]
        for n, item in enumerate(items):
            for row in matrix:
                row[n] |= not item.is_shared
            matrix[data.draw(st.integers(0, size - 1))][n] = True
        reachable = tuple(map(tuple, matrix))
        assert first_unreached(reachable) is None
    check(items, size, options, reachable)


def test_another_host_gets_one_broadcast_a_source() -> None:
    items = (shared(1000), inline(24), shared(5000), shared(300), shared(10))
    both, first, second = (True, True), (True, False), (False, True)
    reachable = tuple(zip(first, both, second, first, both, strict=True))
    plan = plan_group(items, size=2, options=ParallelOptions(), reachable=reachable)
    assert [(s.strategy.value, s.source, s.stop - s.start) for s in plan.sections] == [
        ("each", 0, 512), ("broadcast", 0, 1536), ("broadcast", 1, 5120),
    ]  # fmt: skip
    assert plan.label == "mixed"
    forced = plan_group(items, size=2, options=ParallelOptions(strategy="broadcast"), reachable=reachable)
    assert [(s.strategy.value, s.source) for s in forced.sections] == [("broadcast", 0), ("broadcast", 1)]
    scattered = plan_group(items, size=2, options=ParallelOptions(strategy="scatter"), reachable=reachable)
    assert [s.strategy.value for s in scattered.sections] == ["scatter", "broadcast", "broadcast"]


def test_what_no_rank_reaches_is_found() -> None:
    assert first_unreached([[True, False, True], [True, False, True]]) == 1
    assert first_unreached([[True, False], [False, True]]) is None
    assert first_unreached([[], []]) is None
