"""What a benchmark is asked for: sizes, batches, rounds, and the order in which paths take turns."""

from __future__ import annotations

import pytest

from mmcopy.errors import ConfigError, NoSpaceError
from mmcopy.tools.bench.plan import (
    DEFAULT_BATCHES,
    DEFAULT_SIZES,
    Case,
    Effort,
    check_space,
    parse_batches,
    parse_counts,
    parse_sizes,
    thread_counts,
    turn,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def test_the_defaults_are_the_promised_cases() -> None:
    assert parse_sizes(DEFAULT_SIZES, setting="x") == (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
    assert parse_batches(DEFAULT_BATCHES, setting="x") == (Case(64 * KIB, 256), Case(MIB, 64), Case(16 * MIB, 8))
    batches = parse_batches(DEFAULT_BATCHES, setting="x")
    assert [case.label for case in batches] == [
        "256 x 64 KiB",
        "64 x 1 MiB",
        "8 x 16 MiB",
    ]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64KiB", 64 * KIB), (" 2 mib ", 2 * MIB), ("1GiB", GIB), ("4096", 4096), ("7B", 7), ("64k", 64 * KIB)],
)
def test_a_size_in_each_unit(text: str, nbytes: int) -> None:
    assert parse_sizes(text, setting="x") == (nbytes,)


@pytest.mark.parametrize("text", ["", "64KB", "1.5MiB", "-1KiB", "0MiB", "KiB", "1MiB2", "0x10"])
def test_a_bad_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--sizes is '{text}', want a number of bytes, 1 or more"):
        parse_sizes(text, setting="--sizes")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("64KiB", "COUNTxSIZE"),
        ("0x1MiB", "'0'"),
        ("ax1MiB", "'a'"),
        ("2x", "--batches is ''"),
        ("2x1MB", "--batches is '1MB'"),
    ],
)
def test_a_bad_batch_is_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_batches(f"2x1KiB,{text}", setting="--batches")


def test_lists_keep_their_order_and_drop_what_is_there_already() -> None:
    assert parse_sizes("1MiB,64KiB,1024KiB", setting="x") == (MIB, 64 * KIB)
    assert parse_counts("8,1,8", setting="x") == (8, 1)
    assert parse_sizes("none", setting="x") == parse_batches(" None ", setting="x") == ()
    with pytest.raises(ConfigError, match="'0'"):
        parse_counts("1,0", setting="x")


def test_each_round_begins_one_path_further_and_runs_each_once() -> None:
    paths = ["a", "b", "c"]
    assert [turn(paths, number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert turn([], 3) == []


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 12, 16))])
def test_thread_counts_stay_within_the_cores(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts


def test_effort_is_repeats_or_else_time_within_bounds() -> None:
    assert [Effort(repeats=3).is_enough(rounds, 1e9) for rounds in (2, 3)] == [False, True]
    timed = Effort(seconds=2.0, min_rounds=7, max_rounds=10)
    assert not timed.is_enough(6, 99.0)
    assert timed.is_enough(7, 2.0)
    assert not timed.is_enough(9, 1.9)
    assert timed.is_enough(10, 0.1)


def test_a_case_that_does_not_fit_is_refused_with_the_numbers() -> None:
    cases = [Case(4096), Case(1, 3)]
    check_space(cases, free_bytes=3 * 4096, shm_dir="/shm")
    with pytest.raises(NoSpaceError, match=r"/shm has 8 KiB free \(8192 bytes\) and the case 3 x 1 B takes 12 KiB"):
        check_space(cases, free_bytes=2 * 4096, shm_dir="/shm")
