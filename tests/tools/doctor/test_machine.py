"""Judgements of limits, cores and memory that this machine does not have."""

from __future__ import annotations

import pytest

from mmcopy.tools.doctor import Status, machine
from mmcopy.tools.doctor.cgroup import CgroupLimits
from mmcopy.tools.doctor.line import GIB, MIB

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
    ("affinity", "quota", "status"), [(16, None, GOOD), (1, None, WARNING), (16, 0.5, WARNING), (16, 2.0, GOOD)]
)
def test_cores(affinity: int, quota: float | None, status: Status) -> None:
    assert machine.cores(affinity, quota).status is status


@pytest.mark.parametrize(
    ("available", "limits", "shm_bytes", "status"),
    [
        (8 * GIB, CgroupLimits(), 24 * GIB, GOOD),
        (None, CgroupLimits(), 0, GOOD),
        (100 * MIB, CgroupLimits(), GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=4 * GIB), 2 * GIB, GOOD),
        (8 * GIB, CgroupLimits(memory_bytes=GIB), 2 * GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=4 * GIB, memory_used_bytes=4 * GIB - 1), 2 * GIB, WARNING),
        (8 * GIB, CgroupLimits(memory_bytes=GIB, memory_used_bytes=2 * GIB), 0, WARNING),
    ],
)
def test_memory(available: int | None, limits: CgroupLimits, shm_bytes: int, status: Status) -> None:
    assert machine.memory(available, limits, shm_bytes=shm_bytes).status is status


def test_available_memory_is_read_in_bytes() -> None:
    assert machine.memory_available("MemTotal:       24684084 kB\nMemAvailable:   24000000 kB\n") == 24_576_000_000
    assert machine.memory_available("MemTotal: 1 kB\n") is None
