"""Makes or mends the project's .venv: ``python3 tools/venv.py [EXTRA...]``; the Makefile calls it before every target.

What it does, each step only when it is needed:

1. Check that Python, its venv module, a C compiler and cargo are there, and say which Debian package has them.
2. Create .venv. One that cannot be used (its Python is gone or another minor version, or the folder was moved or
   copied from elsewhere) is replaced.
3. Build the extension in place, unless it is the one built last from the same sources.
4. Install mmcopy, editable, with the extras named, at the versions in constraints.txt. A stamp in .venv holds a hash
   of all that this depends on, so nothing is installed twice.

Standard library only. Everything is printed to standard error: standard output belongs to the target's own program.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

WANTED = (3, 11)
NATIVE = "python/mmcopy/_native.abi3.so"
ORIGIN = "mmcopy-origin.json"
"""In the venv: where it was made and by which Python. A venv holds absolute paths, so it works only there."""


def fail(message: str) -> NoReturn:
    sys.exit(f"mmcopy set-up: {message}")


def say(message: str) -> None:
    print(f"==> {message}", file=sys.stderr, flush=True)


def missing_tools() -> list[str]:
    """What this machine lacks, each with the way to get it; empty when the set-up can go on."""
    missing = []
    if sys.version_info < WANTED:
        found = ".".join(map(str, sys.version_info[:3]))
        missing.append(
            f"Python {WANTED[0]}.{WANTED[1]} or newer: {sys.executable} is {found}; try make PYTHON=python3.11"
        )
    elif not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        missing.append("Python's venv module: apt-get install python3-venv")
    if shutil.which("cargo") is None:
        missing.append("cargo: a stable Rust toolchain, for example by rustup, with its bin folder in PATH")
    if shutil.which("cc") is None:
        missing.append("a C compiler, which Rust links with: apt-get install gcc libc6-dev")
    return missing


def origin_here(venv: Path) -> dict[str, str]:
    return {"venv": str(venv), "python": "{}.{}".format(*sys.version_info)}


def why_unusable(venv: Path) -> str | None:
    """Why the venv at ``venv`` cannot be used as it is; None when it can.

    Starts the venv's Python, so that one whose interpreter was removed is found as well.
    """
    python = venv / "bin" / "python"
    ask = "import json, sys; print(json.dumps({'venv': sys.prefix, 'python': '{}.{}'.format(*sys.version_info)}))"
    try:
        answer = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"its Python does not run ({type(error).__name__})"
    try:
        found = json.loads((venv / ORIGIN).read_text())
    except FileNotFoundError:
        pass  # made by hand: what its Python says of itself has to do
    except ValueError:
        return "its record is damaged"
    for key, here in origin_here(venv).items():
        if found.get(key) != here:
            return f"it was made for {found.get(key)}, not {here}"
    if not _pip_is_of(venv):
        return "its pip is missing or belongs to another place"
    return None


def _pip_is_of(venv: Path) -> bool:
    try:
        with (venv / "bin" / "pip").open("rb") as script:
            first_line = script.readline()
    except OSError:
        return False
    return str(venv / "bin").encode() in first_line or first_line.startswith(b"#!/bin/sh")


def ensure_venv(venv: Path) -> None:
    """Create ``venv`` unless a usable one is there."""
    if venv.exists() or venv.is_symlink():
        reason = why_unusable(venv)
        if reason is None:
            return
        if venv.is_symlink():
            fail(f"{venv} is a link to {venv.readlink()} and cannot be used: {reason}; remove the link")
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            fail(f"{venv} is no virtual environment; move it away")
        say(f"replacing {venv}: {reason}")
        shutil.rmtree(venv)
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    run([sys.executable, "-m", "venv", str(venv)])
    (venv / ORIGIN).write_text(json.dumps(origin_here(venv)) + "\n")


def digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def packages_key(root: Path, extra: str) -> str:
    """A hash of everything that decides which packages belong in the venv for ``extra``."""
    project = read_toml(root / "pyproject.toml")
    parts = {
        "project": project["project"],
        "build": project["build-system"],
        "maturin": project["tool"]["maturin"],
        "version": read_toml(root / "Cargo.toml")["package"]["version"],
        "constraints": (root / "constraints.txt").read_text(),
        "python": sys.version_info[:2],
        "root": str(root),
        "extra": extra,
    }
    return digest(parts)


def native_key(root: Path) -> str:
    """A hash of everything that decides what the extension is, and of which file was built last."""
    sources = [path for path in (root / "rust").rglob("*") if path.is_file()]
    sources += [root / "Cargo.toml", root / "Cargo.lock", root / "pyproject.toml"]
    parts = {str(path.relative_to(root)): path.read_bytes().hex() for path in sources if path.exists()}
    compiler = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, timeout=60, check=True).stdout
    return digest([parts, compiler, os.environ.get("RUSTFLAGS"), file_mark(root / NATIVE)])


def file_mark(path: Path) -> list[int] | None:
    """Changes whenever somebody else, such as ``maturin develop``, puts another file there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # not at the top: older Pythons lack it, and they have to get as far as their error message

    return tomllib.loads(path.read_text(encoding="utf-8"))


def included(project: dict[str, Any], extra: str) -> set[str]:
    """``extra`` and the extras of this project that it takes in."""
    found = {extra}
    for requirement in project["project"]["optional-dependencies"].get(extra, []):
        name, bracket, rest = requirement.partition("[")
        if bracket and name == project["project"]["name"]:
            for inner in rest.rstrip("]").split(","):
                found |= included(project, inner.strip())
    return found


def ensure_packages(root: Path, venv: Path, extras: list[str]) -> None:
    """Install what the build needs, build, then install mmcopy with ``extras``: each unless its stamp says it was."""
    project = read_toml(root / "pyproject.toml")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-c", "constraints.txt"]
    if not sys.stderr.isatty():
        pip.append("-q")

    def stamp(name: str) -> Path:
        return venv / f"mmcopy-{name}.stamp"

    def is_done(name: str) -> bool:
        return stamp(name).exists() and stamp(name).read_text() == packages_key(root, name)

    if not is_done("build"):
        requires = project["build-system"]["requires"]
        say("installing what the build needs: " + ", ".join(requires))
        run([*pip, *requires])
        stamp("build").write_text(packages_key(root, "build"))

    native_stamp = stamp("native")
    if not native_stamp.exists() or native_stamp.read_text() != native_key(root):
        say("building the extension")
        build(root, [str(venv / "bin" / "maturin"), "develop", "--release", "--skip-install"], venv)
        native_stamp.write_text(native_key(root))

    wanted = [extra for extra in extras if not is_done(extra)]
    if wanted:
        taken_in = set().union(*(included(project, extra) for extra in wanted))
        has_torch = any(venv.glob("lib/python*/site-packages/torch"))
        size = ": about 3 GB with torch and CUDA's libraries, which takes minutes"
        size = size if "torch" in taken_in and not has_torch else ""
        say(f"installing mmcopy[{','.join(wanted)}]{size}")
        build(root, [*pip, "--no-build-isolation", "-e", f".[{','.join(wanted)}]"], venv)
        native_stamp.write_text(native_key(root))
        for extra in taken_in:
            stamp(extra).write_text(packages_key(root, extra))


def build(root: Path, command: list[str], venv: Path) -> None:
    """Run a command that writes the extension. A program that runs with the old one keeps it: writing over its file
    would kill that program."""
    (root / NATIVE).unlink(missing_ok=True)
    path = os.pathsep.join(
        [str(venv / "bin"), os.environ.get("PATH", os.defpath)]
    )  # pip's build looks for maturin there
    environ = os.environ | {"VIRTUAL_ENV": str(venv), "PATH": path}
    environ.pop("CONDA_PREFIX", None)
    run(command, environ=environ)


def run(command: list[str], *, environ: dict[str, str] | None = None) -> None:
    """Run ``command`` with its output on standard error; end the set-up when it fails."""
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environ, check=True)
    except subprocess.CalledProcessError as error:
        fail(f"exit code {error.returncode} from: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make or mend the project's .venv.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="demo, dev, cuda13, ...; none: only build")
    extras = parser.parse_args().extras
    root = Path(__file__).resolve().parent.parent
    venv = root / ".venv"
    base = getattr(sys, "_base_executable", sys.executable)
    if Path(sys.prefix) == venv and base != sys.executable:
        os.execv(base, [base, *sys.argv])  # started by the venv's own Python, which may have to be replaced
    missing = missing_tools()
    if missing:
        fail("this machine lacks\n" + "\n".join(f"  - {line}" for line in missing))
    os.chdir(root)
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up in this folder")
        fcntl.flock(lock, fcntl.LOCK_EX)
    ensure_venv(venv)
    ensure_packages(root, venv, extras)


if __name__ == "__main__":
    main()
