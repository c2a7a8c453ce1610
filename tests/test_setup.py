"""The set-up by make: when a virtual environment is used again, and when it is replaced."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def set_up(folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {"PYTHON": sys.executable, **variables}.items()]
    command = ["make", "--no-print-directory", "-C", str(folder), "venv", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_venv_is_used_again_and_replaced_when_its_folder_moved_or_its_python_has_gone(tmp_path: pathlib.Path) -> None:
    # The path of the second folder is the end of the first one's: compared as text alone, they would be the same.
    here = tmp_path / "outer" / (tmp_path / "there").relative_to("/")
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


def test_a_folder_that_is_not_a_venv_is_left_alone(tmp_path: pathlib.Path) -> None:
    for name in ("rust", ".venv"):
        (tmp_path / name).mkdir()
    (tmp_path / ".venv" / "precious").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    refused = set_up(tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0] == "set-up: .venv is not a virtual environment: move it away"
    assert (tmp_path / ".venv" / "precious").exists()


@pytest.mark.parametrize(
    ("lacking", "line"),
    [
        ("python", "set-up: python9.9 is not Python 3.11 or newer with its venv module: "),
        ("cc", "set-up: no C compiler, which Rust links with: apt-get install gcc libc6-dev"),
        ("cargo", "set-up: no cargo in PATH: install a stable Rust toolchain, "),
    ],
)
def test_what_is_missing_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lacking: str, line: str
) -> None:
    (tmp_path / "rust").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in {"make", "sh", "find", "cc", "cargo"} - {lacking}:
        found = shutil.which(name)
        assert found, name
        (tmp_path / "bin" / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    missing = set_up(tmp_path, **({"PYTHON": "python9.9"} if lacking == "python" else {}))
    assert missing.returncode == 2
    assert missing.stderr.startswith(line)
    assert not (tmp_path / ".venv").exists()


BUILT = ("maturin develop",)
INSTALLED = ("pip install", "maturin develop")
"""What make would run: install packages, build the extension."""


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        (None, ()),
        ("rust/lib.rs", BUILT),
        ("Cargo.lock", BUILT),
        ("constraints.txt", INSTALLED),
        ("pyproject.toml", INSTALLED),
        ("Cargo.toml", INSTALLED),
    ],
)
def test_what_changed_is_installed_or_built_again(
    tmp_path: pathlib.Path, changed: str | None, runs: tuple[str, ...]
) -> None:
    native = tmp_path / "python" / "mmcopy" / "_native.abi3.so"
    shutil.copy(ROOT / "Makefile", tmp_path)
    sources = ["rust/lib.rs", "Cargo.lock", "constraints.txt", "pyproject.toml", "Cargo.toml"]
    made = [".venv/maturin.stamp", ".venv/dev.stamp", str(native.relative_to(tmp_path))]
    for seconds, name in enumerate([*sources, *made]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    if changed is not None:
        (tmp_path / changed).touch()
    assert would_run(tmp_path, made) == runs
    native.unlink()
    assert "maturin develop" in would_run(tmp_path, made)


def would_run(folder: pathlib.Path, targets: list[str]) -> tuple[str, ...]:
    command = ["make", "-n", "--no-print-directory", "-C", str(folder), f"PYTHON={sys.executable}", *targets]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return tuple(step for step in INSTALLED if step in printed)


def test_every_pinned_version_is_exact() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(set(names)) == len(names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("demo", "dev"):
        for requirement in project["optional-dependencies"][extra]:
            name = requirement.split(">=")[0].split("[")[0].lower().replace("_", "-")
            assert name in [*names, "mmcopy"], f"{name} of the extra {extra} has no pinned version"
