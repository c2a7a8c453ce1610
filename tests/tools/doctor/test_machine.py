"""Judgements of limits, cores and memory that this machine does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mmcopy.tools.doctor import Status, machine
from mmcopy.tools.units import GIB, MIB

if TYPE_CHECKING:
    from mmcopy._native import MemoryBudget

GOOD, WARNING = Status.GOOD, Status.WARNING


@pytest.mark.parametrize(
    ("limit", "has_gpu", "status"),
    [
        (None, True, GOOD),
        (64 << 10, False, WARNING),
        (8 * MIB - 1, False, WARNING),
        (8 * MIB, False, GOOD),
        (8 * MIB, True, WARNING),
        (256 * MIB, True, GOOD),
        (0, False, WARNING),
    ],
)
def test_locked_memory(limit: int | None, has_gpu: bool, status: Status) -> None:
    assert machine.memlock(limit, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(("limit", "status"), [(None, GOOD), (1024, GOOD), (1023, WARNING)])
def test_open_files(limit: int | None, status: Status) -> None:
    assert machine.open_files(limit).status is status


@pytest.mark.parametrize(
    ("affinity", "usable", "status", "found"),
    [(16, 16, GOOD, "no quota"), (1, 1, WARNING, "no quota"), (16, 1, WARNING, "1 by the"), (16, 2, GOOD, "2 by the")],
)
def test_cores(affinity: int, usable: int, status: Status, found: str) -> None:
    line = machine.cores(affinity, usable)
    assert line.status is status
    assert found in line.found


@pytest.mark.parametrize(
    ("machine_bytes", "limit", "used", "shm_bytes", "status"),
    [
        (8 * GIB, None, None, 24 * GIB, GOOD),
        (None, None, None, 0, GOOD),
        (100 * MIB, None, None, GIB, WARNING),
        (8 * GIB, 4 * GIB, 0, 2 * GIB, GOOD),
        (8 * GIB, GIB, 0, 2 * GIB, WARNING),
        (8 * GIB, 4 * GIB, 4 * GIB - 1, 2 * GIB, WARNING),
        (8 * GIB, GIB, 2 * GIB, 0, WARNING),
    ],
)
def test_memory(machine_bytes: int | None, limit: int | None, used: int | None, shm_bytes: int, status: Status) -> None:
    left = [] if machine_bytes is None else [machine_bytes]
    left += [] if limit is None else [max(0, limit - (used or 0))]
    budget: MemoryBudget = {
        "available": min(left, default=None),
        "limited_by": None,
        "machine": machine_bytes,
        "limit": limit,
        "used": used,
    }
    assert machine.memory(budget, shm_bytes=shm_bytes).status is status
