"""Limits, cores and memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmcopy._native import available_cores, memory_budget
from mmcopy.tools.units import MIB, bytes_text

from .line import Line, Status

if TYPE_CHECKING:
    from mmcopy._native import MemoryBudget

__all__ = ["cores", "lines", "memlock", "memory", "open_files", "soft_limit"]

USUAL_MEMLOCK_BYTES = 8 * MIB
"""What the kernel and systemd give by default. Less means that it was lowered."""
WORKER_MEMLOCK_BYTES = 256 * MIB
"""More than a receiver's pinned staging memory, with room for what else a worker locks."""
OPEN_FILES = 1024
LOW_MEMORY_BYTES = 512 * MIB


def lines(*, has_gpu: bool, shm_dir: str) -> Iterator[Line]:
    yield memlock(soft_limit(resource.RLIMIT_MEMLOCK), has_gpu=has_gpu)
    yield open_files(soft_limit(resource.RLIMIT_NOFILE))
    yield cores(len(os.sched_getaffinity(0)), available_cores())
    try:
        room = os.statvfs(shm_dir)
        shm_bytes = room.f_blocks * room.f_frsize
    except OSError:
        shm_bytes = 0
    yield memory(memory_budget(), shm_bytes=shm_bytes)


def soft_limit(which: int) -> int | None:
    """The soft limit of a resource (``resource.RLIMIT_*``), None when there is none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock(limit_bytes: int | None, *, has_gpu: bool) -> Line:
    """Judge RLIMIT_MEMLOCK. Only a worker locks memory, so on a machine without a GPU the usual default will do."""
    name = "locked memory"
    if limit_bytes is None:
        return Line(name, Status.GOOD, "no limit (RLIMIT_MEMLOCK)")
    wanted = WORKER_MEMLOCK_BYTES if has_gpu else USUAL_MEMLOCK_BYTES
    text = f"at most {bytes_text(limit_bytes)} (RLIMIT_MEMLOCK)"
    if limit_bytes < wanted:
        return Line(
            name,
            Status.WARNING,
            f"{text}, want {bytes_text(wanted)} or more",
            "pinning memory for the GPU or for RDMA can fail on a worker: ulimit -l unlimited; "
            "docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
        )
    return Line(name, Status.GOOD, text)


def open_files(limit: int | None) -> Line:
    """Judge RLIMIT_NOFILE: a request holds one descriptor per segment while it is read."""
    name = "open files"
    if limit is None:
        return Line(name, Status.GOOD, "no limit (RLIMIT_NOFILE)")
    text = f"at most {limit} (RLIMIT_NOFILE)"
    if limit < OPEN_FILES:
        return Line(
            name,
            Status.WARNING,
            f"{text}, want {OPEN_FILES} or more",
            "requests with many pictures can run out of descriptors: ulimit -n 65536; "
            "docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536",
        )
    return Line(name, Status.GOOD, text)


def cores(num_affinity: int, num_usable: int) -> Line:
    """Judge how many cores the copy threads have: the scheduler's affinity, and the control group's quota."""
    name = "cores"
    text = f"{num_affinity} by affinity, " + (
        "no quota below that" if num_usable >= num_affinity else f"{num_usable} by the control group's quota"
    )
    if num_usable < 2:
        return Line(
            name,
            Status.WARNING,
            text,
            "with one core a copy and its request wait for each other: give the process two cores or more "
            "(taskset, docker run --cpus, a Kubernetes CPU limit)",
        )
    return Line(name, Status.GOOD, text)


def memory(budget: MemoryBudget, *, shm_bytes: int) -> Line:
    """Judge the memory. Shared memory counts against the control group of the process that writes it first."""
    name = "memory"
    machine, limit, left = budget["machine"], budget["limit"], budget["available"]
    text = "unknown" if machine is None else f"{bytes_text(machine)} available"
    if limit is None:
        text += ", no control group limit"
    else:
        used = budget["used"]
        text += f", control group limit {bytes_text(limit)}" + (f" ({bytes_text(used)} used)" if used else "")
    if left is not None and left < LOW_MEMORY_BYTES:
        return Line(
            name,
            Status.WARNING,
            text,
            f"little is left ({bytes_text(left)}), and segments in shared memory are memory: "
            "end other programs or raise the limit",
        )
    if limit is not None and shm_bytes > limit:
        return Line(
            name,
            Status.WARNING,
            f"{text}, less than the {bytes_text(shm_bytes)} that shared memory may grow to",
            "a burst of segments would get the process killed before shared memory is full: "
            "make /dev/shm smaller or the limit larger",
        )
    return Line(name, Status.GOOD, text)
