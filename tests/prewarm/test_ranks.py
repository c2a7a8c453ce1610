"""Tensor-parallel ranks, as processes with gloo: they encode the same shapes, go smaller together, end together."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mmcopy.errors import ConfigError
from mmcopy.prewarm.ranks import Ranks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By scenario, what each rank found, in the order of ranks."""
    command = [sys.executable, "-m", "tests.rigs.prewarm_ranks", str(tmp_path_factory.mktemp("ranks") / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            for line in map(json.loads, out.splitlines()):
                found.setdefault(line["scenario"], []).append(line)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


Found = dict[str, list[dict[str, Any]]]


def test_all_ranks_encode_the_same_shapes_and_go_smaller_together(ranks: Found) -> None:
    first, second = ranks["out-of-memory"]
    assert first["encoded"] == second["encoded"] == [[8, 8], [8, 16], [32, 32], [23, 23], [16, 16]]
    for each in (first, second):
        assert (each["status"], each["ready"]) == ("warm", "ready")
        assert each["shapes"][-1] == ["image 16x16", "warm"]
        assert each["notes"][-1] == "out of memory at image 32x32; out of memory at image 23x23"


def test_a_receiver_on_the_group_is_warmed_on_all_ranks(ranks: Found) -> None:
    assert [(each["warnings"], each["received"]) for each in ranks["receives"]] == [([], 2)] * 2


def test_a_rank_that_fails_fails_the_shape_on_all(ranks: Found) -> None:
    for each in ranks["raises"]:
        assert each["status"] == "incomplete"
        assert each["shapes"] == [["image 8x8", "warm"], ["image 8x16", "failed"], ["image 32x32", "not run"]]
        assert each["encoded"] == [[8, 8], [8, 16]]
    notes = [each["notes"][1] for each in ranks["raises"]]
    assert notes == ["rank 1: RuntimeError: bad kernel", "RuntimeError: bad kernel"]


def test_ranks_that_do_not_agree_are_told_what_differs(ranks: Found) -> None:
    assert len(ranks["disagree"]) == 2
    for each in ranks["disagree"]:
        assert "do not agree on what to encode: at 4 rank 0 has 'image 8x24', rank 1 has 'image 8x16'" in each["error"]
        assert (each["encoded"], each["ready"]) == ([], "failed")


def test_a_rank_with_nothing_to_encode_is_told_to_the_others(ranks: Found) -> None:
    nothing = "at 0 rank 0 has 'aggregated', rank 1 has 'nothing: a decode worker encodes nothing'"
    for each in ranks["decodes"]:
        assert nothing in each["error"]
        assert (each["encoded"], each["ready"]) == ([], "failed")


def test_a_rank_that_cannot_begin_is_told_to_the_others_and_has_its_own_error(ranks: Found) -> None:
    why = "the image encoder visual has no weights yet, device is cpu"
    first, second = (each["error"] for each in sorted(ranks["elsewhere"], key=lambda each: len(each["error"])))
    assert first == why
    assert f"rank 0 has 'aggregated', rank 1 has 'ConfigError: {why}'" in second


def test_ranks_encode_each_shape_as_often(ranks: Found) -> None:
    for each in ranks["repeats"]:
        assert "rank 0 has 'repeats 1', rank 1 has 'repeats 2'" in each["error"]


def test_a_rank_that_settles_alone_ends_with_its_deadline(ranks: Found) -> None:
    assert [each["shapes"] for each in ranks["alone"]] == [[["warm", False]]] * 2
    assert {each["late"] for each in ranks["alone"]} == {False, True}


def test_a_rank_that_comes_late_begins_nothing_on_the_others(ranks: Found) -> None:
    for each in ranks["comes-late"]:
        assert (each["status"], each["received"], each["encoded"]) == ("incomplete", 0, 0)
    assert {each["reason"] for each in ranks["comes-late"]} == {
        "the deadline of 1 s passed",
        "another rank's deadline passed",
    }


def test_a_rank_that_hangs_ends_the_wait_of_all(ranks: Found) -> None:
    assert len(ranks["hangs"]) == 2
    for each in ranks["hangs"]:
        assert (each["status"], each["ready"]) == ("incomplete", "ready")
        assert each["shapes"] == [["image 8x8", "warm"], ["image 8x16", "hung"], ["image 32x32", "not run"]]


def test_a_group_for_another_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(ConfigError, match=r"group has the backend nccl, want one for the CPU"):
        Ranks(object())
    alone = Ranks(None)
    assert alone.gather(3) == [3]
    assert alone.rank == 0
