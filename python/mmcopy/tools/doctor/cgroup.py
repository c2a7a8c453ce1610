"""What the control group allows this process, in either version of the kernel's interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CgroupLimits", "read_limits"]

UNLIMITED_V1 = 1 << 60
"""Version 1 says "no limit" by a number near 2**63, rounded down to a page."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None means no limit."""

    num_cpus: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Of the group that has the limit, without file pages that nobody has used lately: those would be given up first
    (as rust/arena/budget.rs counts)."""


def read_limits(proc_self: Path = Path("/proc/self")) -> CgroupLimits:
    """The tightest limits on the way from this process's group to the root; of memory, that which leaves least."""
    groups = _parse_groups(_read(proc_self / "cgroup") or "")
    mounts = _parse_mounts(_read(proc_self / "mountinfo") or "")
    cpus: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for folder in _folders("", groups, mounts):
        cpus += _quota(*((_read(folder / "cpu.max") or "").split() or ["max", "1"]))
        memory += _memory(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _folders("cpu", groups, mounts):
        quota, period = (_read(folder / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period"))
        cpus += _quota(quota, period)
    for folder in _folders("memory", groups, mounts):
        memory += _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = min(memory, key=lambda pair: pair[0] - (pair[1] or 0)) if memory else (None, None)
    return CgroupLimits(min(cpus, default=None), limit, used)


def _folders(controller: str, groups: dict[str, str], mounts: dict[str, tuple[str, Path]]) -> Iterator[Path]:
    """The folders of ``controller`` ("" is version 2), this process's group first, the root last."""
    if controller not in groups or controller not in mounts:
        return
    root, point = mounts[controller]
    group = groups[controller]
    # A container can see its own group as the root of the mount while its path still starts at the host's root.
    inside = group.removeprefix(root.rstrip("/")) if group.startswith(root.rstrip("/") + "/") else ""
    if root == group:
        inside = ""
    folder = point / inside.strip("/")
    while folder != point:
        yield folder
        folder = folder.parent
    yield point


def _parse_groups(text: str) -> dict[str, str]:
    groups = {}
    for row in text.splitlines():
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if ".." not in path.split("/"):
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _parse_mounts(text: str) -> dict[str, tuple[str, Path]]:
    mounts: dict[str, tuple[str, Path]] = {}
    for row in text.splitlines():
        head, _, tail = row.partition(" - ")
        fields, types = head.split(), tail.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        place = (fields[3], Path(fields[4]))
        if types[0] == "cgroup2":
            mounts.setdefault("", place)
        elif types[0] == "cgroup":
            for controller in types[2].split(","):
                mounts.setdefault(controller, place)
    return mounts


def _quota(quota: str, period: str = "") -> list[float]:
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return [int(quota) / int(period)]
    return []


def _memory(folder: Path, limit_name: str, used_name: str, idle_key: str) -> list[tuple[int, int | None]]:
    limit, used = _read(folder / limit_name) or "", _read(folder / used_name) or ""
    if not limit.isdigit() or int(limit) >= UNLIMITED_V1:
        return []
    if not used.isdigit():
        return [(int(limit), None)]
    rows = (row.split() for row in (_read(folder / "memory.stat") or "").splitlines())
    idle = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == idle_key and row[1].isdigit()), 0)
    return [(int(limit), max(0, int(used) - idle))]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None
