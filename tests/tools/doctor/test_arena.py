"""Judgements of whether an arena can be made, on machines that are not at hand."""

from __future__ import annotations

import pytest

from mmcopy.send.leases import DEFAULT_ARENA_BYTES
from mmcopy.tools.doctor import Status, arena
from mmcopy.tools.units import MIB

GOOD, WARNING = Status.GOOD, Status.WARNING


@pytest.mark.parametrize(
    ("trial", "status", "found"),
    [
        (arena.Trial(), GOOD, "sealed in its size and against execution; read-only for workers"),
        (arena.Trial(is_noexec=False), GOOD, "(this kernel does not know the seal against execution); read-only"),
        (arena.Trial(is_read_only=False), WARNING, "but workers could write to it"),
        (arena.Trial("memfd_create: errno 1"), WARNING, "no: memfd_create: errno 1"),
    ],
)
def test_an_arena_is_judged_by_its_seals(trial: arena.Trial, status: Status, found: str) -> None:
    line = arena.seals(trial)
    assert line.status is status
    assert found in line.found


@pytest.mark.parametrize(
    ("setting", "found"),
    [("advise", "huge where"), ("force", "huge where"), ("never", "small"), ("deny", "small"), ("unknown", "small")],
)
def test_the_arenas_pages_are_told(setting: str, found: str) -> None:
    line = arena.huge_pages(setting)
    assert line.status is GOOD
    assert line.found.startswith(found)
    assert f"shmem_enabled is {setting}" in line.found


LEAST = DEFAULT_ARENA_BYTES // 7 * 8 + 64


@pytest.mark.parametrize(
    ("available", "status"), [(LEAST, GOOD), (LEAST - 4096, WARNING), (None, GOOD), (MIB, WARNING), (0, WARNING)]
)
def test_the_default_arena_has_to_fit(available: int | None, status: Status) -> None:
    line = arena.room(available)
    assert line.status is status
    assert "512 MiB" in line.found


@pytest.mark.parametrize(
    ("limit", "status"), [(None, GOOD), (DEFAULT_ARENA_BYTES, GOOD), (DEFAULT_ARENA_BYTES - 1, WARNING), (0, WARNING)]
)
def test_a_worker_with_a_gpu_has_to_lock_an_arena(limit: int | None, status: Status) -> None:
    assert arena.locked(limit).status is status


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_limit_of_locked_memory_is_for_gpus(has_gpu: bool) -> None:
    names = [line.name for line in arena.lines(has_gpu=has_gpu)]
    assert names == ["arena", "arena pages", "arena memory", *["arena locked"] * has_gpu]


def test_without_an_arena_its_pages_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "TRIAL_BYTES", 1 << 60)
    first, second = arena.lines(has_gpu=False)
    assert (first.name, first.status, second.name) == ("arena", WARNING, "arena memory")
