"""Judgements of versions that are not installed."""

from __future__ import annotations

import pytest

from mmcopy.tools.doctor import Status, versions

GOOD, WARNING, PROBLEM = Status.GOOD, Status.WARNING, Status.PROBLEM


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.26.0", GOOD), ("2.4.6+local", GOOD), ("1.25.9", PROBLEM), ("1.26rc1", GOOD), ("1", PROBLEM), (None, GOOD)],
)
def test_an_optional_package_may_be_missing_but_not_too_old(version: str | None, status: Status) -> None:
    assert versions.package("numpy", version, oldest=(1, 26), needed_by="mmcopy").status is status


@pytest.mark.parametrize(
    ("installed", "built", "debug", "status"),
    [
        ("0.1.0", "0.1.0", False, GOOD),
        (None, "0.1.0", False, GOOD),
        ("0.1.0", "0.1.0", True, WARNING),
        ("0.2.0", "0.1.0", False, PROBLEM),
    ],
)
def test_package_and_native_module_are_of_one_build(
    installed: str | None, built: str, debug: bool, status: Status
) -> None:
    assert versions.extension(installed=installed, built=built, debug=debug, path="x.so").status is status
