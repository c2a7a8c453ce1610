"""Which software is installed, from the packages' metadata: none is imported."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from mmcopy._native import DEBUG_BUILD, __file__, __version__

from .line import Line, Status

__all__ = ["extension", "installed", "lines", "package"]

# (package, oldest version that works, what needs it)
PACKAGES = (
    ("numpy", (1, 26), "mmcopy itself"),
    ("grpcio", (1, 78), "the worker and the wire formats: pip install 'mmcopy[smg]'"),
    ("smg-grpc-proto", (0, 4, 28), "the worker and the wire formats: pip install 'mmcopy[smg]'"),
    ("smg", (1, 13), "mmcopy demo: pip install 'mmcopy[demo]'"),
)


def lines() -> Iterator[Line]:
    yield extension(installed=installed("mmcopy"), built=__version__, debug=DEBUG_BUILD, path=__file__ or "")
    yield Line("Python", Status.GOOD, f"{platform.python_version()} ({sys.executable})")
    for name, oldest, needed_by in PACKAGES:
        yield package(name, installed(name), oldest=oldest, needed_by=needed_by)
    yield Line("kernel", Status.GOOD, f"{platform.system()} {platform.release()} {platform.machine()}")


def installed(name: str) -> str | None:
    """The version of the installed package ``name``, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def extension(*, installed: str | None, built: str, debug: bool, path: str) -> Line:
    """Judge mmcopy's own version: package and native module must be of one build."""
    if installed is not None and installed != built:
        return Line(
            "mmcopy",
            Status.PROBLEM,
            f"the package is {installed}, its native module is {built} ({path})",
            "two builds are mixed: reinstall mmcopy (in a checkout: make setup)",
        )
    if debug:
        return Line(
            "mmcopy",
            Status.WARNING,
            f"{built}, native module built without optimisation",
            "copies are many times slower: install a release build (in a checkout: make setup)",
        )
    return Line("mmcopy", Status.GOOD, f"{built}, native module optimised")


def package(name: str, version: str | None, *, oldest: tuple[int, ...], needed_by: str) -> Line:
    """Judge one optional package; it may be missing."""
    if version is None:
        return Line(name, Status.GOOD, f"not installed; only for {needed_by}")
    if _numbers(version) < oldest:
        wanted = ".".join(map(str, oldest))
        return Line(
            name, Status.PROBLEM, f"{version}, want {wanted} or newer", f"pip install --upgrade '{name}>={wanted}'"
        )
    return Line(name, Status.GOOD, version)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(ch for ch in part if ch.isdigit()) if part[:1].isdigit() else ""
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
