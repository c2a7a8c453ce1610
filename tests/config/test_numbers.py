"""Sizes and other numbers, and the variables of our own: strict."""

from __future__ import annotations

import pytest

from mmcopy import Sender, TransportConfig, WorkerSpec
from mmcopy.config import LONGEST_S, default_num_threads, parse_count, parse_seconds, parse_size, read_environment
from mmcopy.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (65536, 65536),
        ("65536", 65536),
        ("0", 0),
        ("64KiB", 65536),
        ("64kib", 65536),
        ("64k", 65536),
        ("64K", 65536),
        ("7B", 7),
        ("64 KiB", 65536),
        (" 1MiB\n", 1 << 20),
        ("2g", 2 << 30),
        ("18446744073709551615", 2**64 - 1),
    ],
)
def test_sizes(value: int | str, nbytes: int) -> None:
    assert parse_size(value, setting="x") == nbytes
    assert TransportConfig(shm_min_bytes=value).shm_min_bytes == nbytes
    assert WorkerSpec("w", multimodal_shm_min_bytes=value).multimodal_shm_min_bytes == nbytes


@pytest.mark.parametrize(
    "value",
    [-1, True, 1.5, 2**64, "", " ", "-1", "+1", "1.5", "1_000", "0x10", "1e3", "64KB", "64kb", "KiB", "B", "64 k iB",
     "1MiBs", "\u0661", "64\u212a", "18446744073709551616", "17179869184GiB", "9" * 5000, None, b"1", ["1"]],
)  # fmt: skip
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ConfigError, match=r"the setting is .*, want a number of bytes, 0 or more \(65536, 64KiB"):
        parse_size(value, setting="the setting")  # type: ignore[arg-type]


def test_a_size_can_have_a_least() -> None:
    assert parse_size("1", setting="x", least=1) == 1
    with pytest.raises(ConfigError, match="x is '0MiB', want a number of bytes, 1 or more"):
        parse_size("0MiB", setting="x", least=1)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1, 1), (0.5, 0.5), ("2.5", 2.5), ("30", 30), (float("inf"), LONGEST_S), (1e12, LONGEST_S)],
)
def test_seconds(value: float | str, seconds: float) -> None:
    assert parse_seconds(value, setting="x") == seconds


@pytest.mark.parametrize("value", [0, -1, True, float("nan"), "0", "1s", "-1", "inf", "nan", "", "1e3", None])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ConfigError, match=r"t is .*, want seconds, more than 0"):
        parse_seconds(value, setting="t")  # type: ignore[arg-type]


def test_counts() -> None:
    assert parse_count("8", setting="n") == 8
    for value in ("0", "08x", "1_0", 0, True, "", "9" * 30):
        with pytest.raises(ConfigError, match=r"n is .*, want a whole number, 1 or more"):
            parse_count(value, setting="n")


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"MMCOPY_NUM_THREAD": "2"}, "MMCOPY_NUM_THREAD is no variable.*did you mean 'MMCOPY_NUM_THREADS'"),
        ({"MMCOPY_TRANSPORT": "shm"}, "MMCOPY_TRANSPORT is no variable.*MMCOPY_CONFIG, MMCOPY_NUM_THREADS"),
        ({"MMCOPY_": "1"}, "MMCOPY_ is no variable"),
        ({"MMCOPY_NUM_THREADS": "many"}, "environment: MMCOPY_NUM_THREADS is 'many', want a whole number"),
        ({"MMCOPY_NUM_THREADS": ""}, "environment: MMCOPY_NUM_THREADS is ''"),
        ({"MMCOPY_PROBE_MAX_AGE_S": "0"}, "environment: MMCOPY_PROBE_MAX_AGE_S is '0', want seconds"),
        ({"MMCOPY_CONFIG": " "}, "environment: MMCOPY_CONFIG is ' ', want a file"),
    ],
)
def test_our_own_variables_are_strict(environ: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TransportConfig().resolve(environ=environ)
    with pytest.raises(ConfigError, match=why):
        Sender(environ=environ)


def test_our_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_environment(
        {"MMCOPY_NUM_THREADS": "3", "MMCOPY_PROBE_MAX_AGE_S": "2.5", "MMCOPY_CONFIG": "a.yaml"}
    ).own
    assert (found.num_threads, found.probe_max_age_s, found.config) == (3, 2.5, "a.yaml")
    assert TransportConfig().probe_max_age_in(read_environment({"MMCOPY_PROBE_MAX_AGE_S": "2.5"})) == 2.5
    assert TransportConfig(probe_max_age_s=9).probe_max_age_in(read_environment({"MMCOPY_PROBE_MAX_AGE_S": "2"})) == 9
    assert TransportConfig().probe_max_age_in(read_environment({})) == 30
    monkeypatch.setenv("MMCOPY_NUM_THREADS", "3")
    assert default_num_threads() == 3
    monkeypatch.delenv("MMCOPY_NUM_THREADS")
    for cores, wanted in ((1, 1), (3, 3), (4, 4), (5, 4), (8, 6), (16, 12), (64, 16)):
        monkeypatch.setattr("mmcopy.config.environment.available_cores", lambda cores=cores: cores)
        assert default_num_threads() == wanted
    assert default_num_threads(read_environment({"MMCOPY_NUM_THREADS": "5"})) == 5
