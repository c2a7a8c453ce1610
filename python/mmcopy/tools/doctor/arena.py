"""The arena: whether a sender can make one here, what memory it gets, and whether a worker takes it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass

from mmcopy._native import Arena, memory_budget
from mmcopy.errors import MmcopyError
from mmcopy.send.leases import DEFAULT_ARENA_BYTES
from mmcopy.tools.units import MIB, bytes_text

from .line import Line, Status
from .machine import soft_limit

__all__ = ["TRIAL_BYTES", "Trial", "huge_pages", "lines", "locked", "room", "seals"]

TRIAL_BYTES = 2 * MIB
"""The size of an arena that is only made to examine it, or to offer it to a worker."""
_MOST_EIGHTHS = 7
"""An arena takes at most this share of the available memory (rust/arena/budget.rs)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a small arena looks like. ``error``: why it could not be made ("" when it could)."""

    error: str = ""
    is_read_only: bool = True
    is_noexec: bool = True
    huge_pages_setting: str = "unknown"


def lines(*, has_gpu: bool) -> Iterator[Line]:
    trial = _try()
    yield seals(trial)
    if not trial.error:
        yield huge_pages(trial.huge_pages_setting)
    yield room(memory_budget()["available"])
    if has_gpu:
        yield locked(soft_limit(resource.RLIMIT_MEMLOCK))


def _try() -> Trial:
    try:
        arena = Arena(TRIAL_BYTES)
    except MmcopyError as error:
        return Trial(str(error))
    report = arena.report()
    arena.close(1.0)
    return Trial("", bool(report["read_only"]), bool(report["noexec"]), str(report["huge_pages_setting"]))


def seals(trial: Trial) -> Line:
    """Judge whether an arena can be made, and whether its seals keep workers from writing to it."""
    name = "arena"
    if trial.error:
        return Line(
            name,
            Status.WARNING,
            f"no: {trial.error}",
            "senders use segments, which move at a fraction of an arena's speed: let processes use memfd_create and "
            "file seals (a seccomp profile, vm.memfd_noexec), and see the memory below",
        )
    text = f"yes: a memfd of {bytes_text(TRIAL_BYTES)}, sealed in its size"
    text += " and against execution" if trial.is_noexec else " (this kernel does not know the seal against execution)"
    if not trial.is_read_only:
        return Line(
            name,
            Status.WARNING,
            f"{text}, but workers could write to it",
            "use it only with workers that you trust, or a kernel of 5.1 or newer, which keeps them from writing",
        )
    return Line(name, Status.GOOD, f"{text}; read-only for workers")


def huge_pages(setting: str) -> Line:
    """Report whether the arena's memory is in huge pages; what they gain has not been measured."""
    name = "arena pages"
    setting_text = f"shmem_enabled is {setting}"
    if setting in ("always", "within_size", "advise", "force"):
        return Line(name, Status.GOOD, f"huge where the kernel finds some ({setting_text})")
    return Line(name, Status.GOOD, f"small ({setting_text}; advise is enough for the arena)")


def room(available_bytes: int | None) -> Line:
    """Judge whether a sender's default arena fits into the free memory of the machine and its control groups."""
    name = "arena memory"
    wanted = bytes_text(DEFAULT_ARENA_BYTES)
    if available_bytes is None:
        return Line(name, Status.GOOD, f"a sender takes {wanted}; how much is free is unknown")
    text = f"a sender takes {wanted} with its first worker, {bytes_text(available_bytes)} are free"
    most = available_bytes // 8 * _MOST_EIGHTHS
    if most < DEFAULT_ARENA_BYTES:
        return Line(
            name,
            Status.WARNING,
            f"{text}, of which an arena may take {bytes_text(most)}",
            "such a sender gets no arena and uses segments: free memory, raise the control group's limit, or make it "
            "smaller (Sender(arena_bytes=...))",
        )
    return Line(name, Status.GOOD, text)


def locked(limit_bytes: int | None) -> Line:
    """Judge RLIMIT_MEMLOCK of a worker with a GPU, which registers the arenas of all its senders with CUDA."""
    name = "arena locked"
    if limit_bytes is None:
        return Line(name, Status.GOOD, "no limit (RLIMIT_MEMLOCK) to what a worker registers with CUDA")
    text = f"at most {bytes_text(limit_bytes)} (RLIMIT_MEMLOCK), a sender's arena has {bytes_text(DEFAULT_ARENA_BYTES)}"
    if limit_bytes < DEFAULT_ARENA_BYTES:
        return Line(
            name,
            Status.WARNING,
            text,
            "registering an arena can then fail, and its tensors are staged (the worker warns once): "
            "ulimit -l unlimited; docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
        )
    return Line(name, Status.GOOD, text)
