"""The set-up by make: when a virtual environment is used again, and when it is replaced."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def set_up(folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {"PYTHON": sys.executable, **variables}.items()]
    command = ["make", "--no-print-directory", "-C", str(folder), "venv", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_venv_is_used_again_and_replaced_when_its_folder_moved_or_its_python_has_gone(tmp_path: pathlib.Path) -> None:
    here = tmp_path / "here"
    (here / "rust").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", here)
    made = set_up(here)
    assert made.returncode == 0, made.stderr
    assert made.stderr == "==> making .venv\n"
    (here / ".venv" / "mine").touch()
    assert set_up(here).stderr == ""
    assert (here / ".venv" / "mine").exists()

    there = here.rename(tmp_path / "there")
    assert set_up(there).stderr == "==> making .venv\n"
    assert not (there / ".venv" / "mine").exists()
    python = (there / ".venv" / "bin" / "pip").read_text().splitlines()[0].removeprefix("#!")
    assert pathlib.Path(python).is_relative_to(there)

    for path in (there / ".venv" / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("/nowhere/python3")
    assert set_up(there).stderr == "==> making .venv\n"


def test_what_is_missing_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rust").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    missing = set_up(tmp_path, PYTHON="python9.9")
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[0] == (
        "set-up: python9.9 is not Python 3.11 or newer with its venv module: "
        "apt-get install python3-venv, or make PYTHON=..."
    )
    assert not (tmp_path / ".venv").exists()
