"""The classes of mmcopy.errors: exported, raised somewhere, and with Python's standard classes."""

from __future__ import annotations

import copy
import pathlib
import pickle
import re

import pytest

import mmcopy
from mmcopy import errors
from mmcopy.errors import MmcopyError, MmcopyTimeoutError

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFINED = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


def test_every_class_is_public_and_in_the_tree() -> None:
    assert sorted(DEFINED) == sorted(errors.__all__)
    assert all(issubclass(kind, MmcopyError) for kind in DEFINED.values())
    assert mmcopy.MmcopyError is MmcopyError


def test_every_class_is_raised_somewhere() -> None:
    """Named in an expression of the package, imports and handlers aside, or in the table of the native module."""
    sources = [path for path in (ROOT / "python/mmcopy").rglob("*.py") if path.name != "errors.py"]
    raising = re.compile(r"(?:raise|return|=|else|if|,|\() (\w+Error)\b|[(\s](\w+Error)\(|: (\w+Error),$", re.MULTILINE)
    table = (ROOT / "rust/python/errors.rs").read_text()
    raised = set(re.findall(r'"(\w+Error)"', table))
    for path in sources:
        raised.update(name for match in raising.findall(path.read_text()) for name in match)
    assert set(DEFINED) - raised == set()
    assert set(re.findall(r'"(\w+Error)"', table)) <= set(DEFINED)


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("ArenaMemoryError", MemoryError),
        ("ArrayTypeError", TypeError),
        ("ConfigError", ValueError),
        ("DeviceMemoryError", MemoryError),
        ("DtypeError", ValueError),
        ("EndpointError", OSError),
        ("EndpointGoneError", ConnectionError),
        ("EndpointRefusedError", PermissionError),
        ("LeaseError", ValueError),
        ("MissingDependencyError", ImportError),
        ("MmcopyTimeoutError", TimeoutError),
        ("NoSpaceError", OSError),
        ("PayloadError", ValueError),
        ("PeerLostError", ConnectionError),
        ("SegmentError", OSError),
        ("SegmentNotFoundError", FileNotFoundError),
        ("SegmentPermissionError", PermissionError),
        ("SegmentSizeError", ValueError),
        ("UnknownFamilyError", LookupError),
        ("WorkerUnreachableError", ConnectionError),
    ],
)
def test_standard_classes(name: str, standard: type[Exception]) -> None:
    assert issubclass(DEFINED[name], standard)


def test_a_timeout_says_what_was_waited_for_and_can_be_copied() -> None:
    error = MmcopyTimeoutError("prewarm", "image 8x8: still running")
    error.report = "as far as it came"
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (each.what, str(each)) == ("prewarm", "prewarm: image 8x8: still running")
        assert (each.report, each.errno) == ("as far as it came", None)
