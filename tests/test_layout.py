"""Rules for the source tree that a program can check. Each check is also run on a tree that breaks its rule."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

import mmcopy

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "mmcopy"

NO_TORCH = {"errors", "config", "tensors", "metrics", "wire"}
ENVIRONMENT_ALLOWED = {"config", "tools"}
"""The demo passes its environment to the programs that it starts."""


def modules(package: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).with_suffix("")
        parts = [part for part in relative.parts if part != "__init__"]
        yield ".".join(["mmcopy", *parts]), path, ast.parse(path.read_text(encoding="utf-8"))


def imports(name: str, path: pathlib.Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Absolute names of what a module imports, with the line; lazy imports and those for types alone included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = package[: len(package) - (node.level - 1)] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield f"{source}.{alias.name}", node.lineno


def package_of(name: str) -> str:
    """``x`` of ``mmcopy.x.y``, and "" of ``mmcopy``."""
    return name.partition(".")[2].partition(".")[0]


def forbidden_torch_imports(package: pathlib.Path) -> list[str]:
    return [
        f"{name}:{line} imports {imported}"
        for name, path, tree in modules(package)
        if package_of(name) in NO_TORCH
        for imported, line in imports(name, path, tree)
        if imported.split(".")[0] in ("torch", "cupy")
    ]


def environment_reads(package: pathlib.Path) -> list[str]:
    faults = []
    for name, path, tree in modules(package):
        if path.relative_to(package).parts[0] in ENVIRONMENT_ALLOWED:
            continue
        for node in ast.walk(tree):
            used = None
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                used = node.attr
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                used = next((alias.name for alias in node.names if alias.name.startswith(("environ", "getenv"))), None)
            if used in ("environ", "environb", "getenv", "getenvb", "putenv"):
                faults.append(f"{name}:{node.lineno} uses os.{used}")
    return faults


def vague_names(root: pathlib.Path) -> list[str]:
    """Files and folders called utils, common, helpers or the like."""
    return [
        str(path.relative_to(root))
        for folder in ("python", "rust", "tests", "benches", "examples")
        for path in sorted((root / folder).rglob("*"))
        if re.fullmatch(r"_?(utils?|common|helpers?|misc)", path.name.split(".")[0])
    ]


def undocumented(module: object, names: list[str]) -> list[str]:
    """Public classes and functions, and the public methods of those classes, without a docstring of their own."""
    faults = []
    for name in names:
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or callable(thing)):
            continue
        text = thing.__doc__ or ""
        if not text.strip() or text.startswith(f"{name}("):  # dataclasses write a signature of their own
            faults.append(name)
        if inspect.isclass(thing) and thing.__module__.startswith("mmcopy"):
            for attribute, value in vars(thing).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if attribute.startswith("_") or not inspect.isfunction(function):
                    continue
                if not (function.__doc__ or "").strip() and attribute not in ("close", "nbytes"):
                    faults.append(f"{name}.{attribute}")
    return faults


def test_value_modules_do_not_import_torch() -> None:
    assert forbidden_torch_imports(PACKAGE) == []


def test_settings_are_read_in_one_place() -> None:
    assert environment_reads(PACKAGE) == []


def test_no_file_has_a_vague_name() -> None:
    assert vague_names(ROOT) == []


def test_every_public_name_is_documented() -> None:
    assert undocumented(mmcopy, mmcopy.__all__) == []


def test_all_lists_existing_names_once() -> None:
    assert len(set(mmcopy.__all__)) == len(mmcopy.__all__)
    assert [name for name in mmcopy.__all__ if not hasattr(mmcopy, name)] == []


def test_the_public_surface_is_small() -> None:
    assert len(mmcopy.__all__) <= 30
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 20, sorted(entries)


@pytest.mark.parametrize(
    ("file", "text", "check", "fault"),
    [
        ("errors.py", "if 0:\n    import torch.x\n", forbidden_torch_imports, "mmcopy.errors:2 imports torch.x"),
        ("sender.py", "import os\nx = os.environ['A']\n", environment_reads, "mmcopy.sender:2 uses os.environ"),
        ("ring.py", "from os import getenv\n", environment_reads, "mmcopy.ring:1 uses os.getenv"),
    ],
)  # fmt: skip
def test_a_tree_that_breaks_a_rule_is_found(
    tmp_path: pathlib.Path, file: str, text: str, check: object, fault: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert callable(check)
    faults = check(tmp_path)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_vague_names_and_missing_docstrings_are_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "utils.py").touch()
    (tmp_path / "tests" / "useful.py").touch()
    assert vague_names(tmp_path) == ["tests/utils.py"]

    class Thing:
        """Documented."""

        def act(self) -> None: ...

    Thing.__module__ = "mmcopy.thing"
    holder = type("holder", (), {"Thing": Thing, "work": lambda: None, "NUMBER": 1})
    assert undocumented(holder, ["Thing", "work", "NUMBER"]) == ["Thing.act", "work"]


# -- the commands that the documents promise


def make_targets() -> tuple[set[str], set[str]]:
    """All targets of the Makefile, and those that ``make help`` lists."""
    rules = re.findall(r"^([a-z][a-z-]*):(?!=)(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    help_text = subprocess.run(
        ["make", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    return {name for name, _ in rules}, set(re.findall(r"^  make ([a-z-]+) ", help_text, re.MULTILINE))


def test_make_help_lists_what_people_need() -> None:
    targets, listed = make_targets()
    assert listed <= targets
    assert listed >= {
        "help", "demo", "test", "test-rust", "test-python", "test-gpu", "lint", "format", "typecheck", "bench", "wheel",
        "clean",
    }  # fmt: skip


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_every_make_command_in_the_documents_is_a_listed_target(document: str) -> None:
    _, listed = make_targets()
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:^|^\$ |`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= listed, f"{document} names {named - listed}"
    if document == "README.md":
        assert {"demo", "test"} <= named


@pytest.mark.parametrize("caller", [".ci/run", ".pre-commit-config.yaml"])
def test_continuous_integration_and_pre_commit_call_listed_targets(caller: str) -> None:
    _, listed = make_targets()
    text = (ROOT / caller).read_text()
    called = set(re.findall(r"^\s*(?:entry: )?make ([a-z-]+)$", text, re.MULTILINE))
    assert called
    assert called <= listed
    if caller == ".ci/run":
        assert {"lint", "test"} <= called
