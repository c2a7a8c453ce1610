"""Limits, cores and memory."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from .cgroup import CgroupLimits, read_limits
from .line import MIB, Line, Status, bytes_text

__all__ = ["cores", "lines", "memlock", "memory", "memory_available", "open_files"]

USUAL_MEMLOCK_BYTES = 8 * MIB
"""What the kernel and systemd give by default. Less means that somebody or something lowered it."""
WORKER_MEMLOCK_BYTES = 256 * MIB
"""More than a receiver's pinned staging memory, with room for what else is locked on a worker."""
OPEN_FILES = 1024
LOW_MEMORY_BYTES = 512 * MIB


def lines(*, has_gpu: bool, shm_dir: str) -> Iterator[Line]:
    yield memlock(_soft(resource.RLIMIT_MEMLOCK), has_gpu=has_gpu)
    yield open_files(_soft(resource.RLIMIT_NOFILE))
    limits = read_limits()
    yield cores(len(os.sched_getaffinity(0)), limits.num_cpus)
    try:
        room = os.statvfs(shm_dir)
        shm_bytes = room.f_blocks * room.f_frsize
    except OSError:
        shm_bytes = 0
    yield memory(memory_available(Path("/proc/meminfo").read_text(encoding="utf-8")), limits, shm_bytes=shm_bytes)


def _soft(which: int) -> int | None:
    """The soft limit, None when there is none."""
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
    """Judge RLIMIT_NOFILE: a request in flight holds one descriptor a segment while it is read."""
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


def cores(num_affinity: int, num_quota: float | None) -> Line:
    """Judge how many cores the copy threads have: the scheduler's affinity, and the control group's quota."""
    name = "cores"
    text = f"{num_affinity} by affinity, " + (
        "no quota" if num_quota is None else f"{num_quota:g} by the control group's quota"
    )
    if min(num_affinity, num_quota or num_affinity) < 2:
        return Line(
            name,
            Status.WARNING,
            text,
            "with one core a copy and its request wait for each other: give the process two cores or more "
            "(taskset, docker run --cpus, a Kubernetes CPU limit)",
        )
    return Line(name, Status.GOOD, text)


def memory_available(meminfo: str) -> int | None:
    """MemAvailable of /proc/meminfo in bytes."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def memory(available: int | None, limits: CgroupLimits, *, shm_bytes: int) -> Line:
    """Judge the memory. Shared memory counts against the control group of whoever writes it first."""
    name = "memory"
    text = "unknown" if available is None else f"{bytes_text(available)} available"
    limit = limits.memory_bytes
    if limit is None:
        text += ", no control group limit"
        room = available
    else:
        used = limits.memory_used_bytes
        text += f", control group limit {bytes_text(limit)}" + (f" ({bytes_text(used)} used)" if used else "")
        room = limit - (used or 0) if available is None else min(available, limit - (used or 0))
    if room is not None and room < LOW_MEMORY_BYTES:
        return Line(
            name,
            Status.WARNING,
            text,
            f"little is left ({bytes_text(max(room, 0))}), and segments in shared memory are memory: "
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
