"""Lines, the text that they make, and the exit code."""

from __future__ import annotations

import pathlib
import types

import pytest

from mmcopy.tools.doctor import Line, Status, as_text, examine, exit_code, gpu, shm, versions

GOOD, WARNING, PROBLEM = Status.GOOD, Status.WARNING, Status.PROBLEM


def test_a_fault_without_advice_is_refused() -> None:
    with pytest.raises(ValueError, match="'shm space' is a warning"):
        Line("shm space", WARNING, "8 MiB")


def test_only_a_problem_makes_the_exit_code_1() -> None:
    good, warning = Line("a", GOOD, "x"), Line("b", WARNING, "y", "do")
    assert exit_code([good, warning]) == 0
    assert exit_code([good, warning, Line("c", PROBLEM, "z", "do")]) == 1


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [(versions, "lines", "versions"), (gpu, "find_gpus", "GPUs"), (shm, "writable", "shared memory")],
)
def test_a_check_that_breaks_becomes_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, shm_dir: pathlib.Path, module: types.ModuleType, function: str, name: str
) -> None:
    def broken(*arguments: object) -> object:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(module, function, broken)
    monkeypatch.setattr(gpu, "_is_importable", lambda name: False)
    lines = examine(shm_dir=str(shm_dir))
    (line,) = [line for line in lines if line.status is PROBLEM]
    assert line.name == name
    assert line.found == "this check failed: RuntimeError: no such thing"
    told = {line.name for line in lines}
    assert {"shm space", "leftovers SMG", "memory"} < told, "the others, and what came before the failure"


def test_the_text_keeps_to_its_width_and_puts_advice_below() -> None:
    text = as_text([Line("cores", GOOD, "2"), Line("shm space", WARNING, "few " * 40, "get more " * 30)], width=80)
    rows = text.splitlines()
    assert max(map(len, rows)) <= 80
    assert rows[0] == "good     cores      2"
    assert rows[1].startswith("warning  shm space  few few")
    assert any(row.startswith("                    -> get more") for row in rows)
    assert rows[-1] == "1 good, 1 warning, 0 problems"
