"""tools/venv.py: when a virtual environment is used again, and when it is replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("venv_setup", ROOT / "tools" / "venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def venv(tmp_path: pathlib.Path, setup: types.ModuleType) -> pathlib.Path:
    """A usable one without its packages: a real interpreter, and the first line of a pip."""
    path = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=60)
    (path / "bin" / "pip").write_text(f"#!{path}/bin/python\n")
    assert setup.why_unusable(path) is None, "made by hand, it is taken as it is"
    (path / setup.ORIGIN).write_text(json.dumps(setup.origin_here(path)))
    assert setup.why_unusable(path) is None
    return path


def test_a_moved_one_is_of_no_use(setup: types.ModuleType, venv: pathlib.Path) -> None:
    moved = venv.with_name("elsewhere")
    venv.rename(moved)
    assert f"it was made for {venv}" in setup.why_unusable(moved)
    (moved / setup.ORIGIN).unlink()
    assert "its pip" in setup.why_unusable(moved)


def test_one_of_another_python_is_of_no_use(setup: types.ModuleType, venv: pathlib.Path) -> None:
    (venv / setup.ORIGIN).write_text(f'{{"venv": "{venv}", "python": "3.10"}}')
    assert "made for 3.10" in setup.why_unusable(venv)
    (venv / setup.ORIGIN).write_text("{")
    assert "damaged" in setup.why_unusable(venv)


def test_one_whose_python_is_gone_is_of_no_use(setup: types.ModuleType, venv: pathlib.Path) -> None:
    for name in ("python", "python3"):
        (venv / "bin" / name).unlink()
        (venv / "bin" / name).symlink_to("/nowhere/python3")
    assert "does not run" in setup.why_unusable(venv)


def test_one_without_pip_is_of_no_use(setup: types.ModuleType, venv: pathlib.Path) -> None:
    (venv / "bin" / "pip").unlink()
    assert "its pip" in setup.why_unusable(venv)


def test_a_folder_that_is_no_venv_is_left_alone(setup: types.ModuleType, tmp_path: pathlib.Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").touch()
    with pytest.raises(SystemExit, match="is no virtual environment; move it away"):
        setup.ensure_venv(tmp_path / ".venv")
    assert (tmp_path / ".venv" / "precious").exists()


def test_what_is_missing_is_named_with_its_package(
    setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    told = "\n".join(setup.missing_tools())
    for words in ("apt-get install python3-venv", "cargo", "apt-get install gcc"):
        assert words in told
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert "3.9.2" in setup.missing_tools()[0]


def test_a_missing_tool_ends_the_set_up_with_a_message_and_no_traceback(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "venv.py", tmp_path / "tools")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "tools" / "venv.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("mmcopy set-up: this machine lacks\n  - cargo")
    assert not (tmp_path / ".venv").exists()


def copy_of_the_build_files(folder: pathlib.Path) -> pathlib.Path:
    for name in ("pyproject.toml", "Cargo.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "rust").mkdir()
    (folder / "rust" / "lib.rs").write_text("// a")
    return folder


def test_packages_are_renewed_when_what_they_come_from_changes(setup: types.ModuleType, tmp_path: pathlib.Path) -> None:
    root = copy_of_the_build_files(tmp_path)
    key = setup.packages_key(root, "demo")
    assert setup.packages_key(root, "demo") == key
    assert setup.packages_key(root, "dev") != key
    (root / "rust" / "lib.rs").write_text("// b")
    assert setup.packages_key(root, "demo") == key
    (root / "constraints.txt").write_text("numpy==1.26.0\n")
    assert setup.packages_key(root, "demo") != key


def test_the_extension_is_renewed_when_sources_or_the_file_itself_change(
    setup: types.ModuleType, tmp_path: pathlib.Path
) -> None:
    root = copy_of_the_build_files(tmp_path)
    built = root / setup.NATIVE
    built.parent.mkdir(parents=True)
    built.write_bytes(b"release")
    keys = [setup.native_key(root)]
    assert setup.native_key(root) == keys[0]
    (root / "rust" / "lib.rs").write_text("// b")
    keys.append(setup.native_key(root))
    (root / "rust" / "new.rs").touch()
    keys.append(setup.native_key(root))
    built.write_bytes(b"a debug build")
    keys.append(setup.native_key(root))
    built.unlink()
    keys.append(setup.native_key(root))
    assert len(set(keys)) == len(keys)


def test_dev_takes_in_demo_and_torch(setup: types.ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert setup.included(project, "dev") >= {"dev", "demo", "torch", "smg"}
    assert "torch" not in setup.included(project, "demo")


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
