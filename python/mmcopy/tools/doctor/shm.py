"""The shared-memory folder: whether it is memory, how much, whether it is writable, and its namespace id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmcopy._native import Segment, SegmentOwner, shm_namespace_id
from mmcopy.errors import MmcopyError, NoSpaceError, SegmentPermissionError
from mmcopy.tools.units import GIB, MIB, bytes_text

from .line import Line, Status

__all__ = ["Mount", "huge_pages", "lines", "mount", "mount_of", "namespace", "space", "writable"]

PHOTO_BYTES = 139 * MIB
"""The pixels of one photo of 12 megapixels: 47,376 patches of 1,536 bfloat16 values are 138.8 MiB."""
ROOMY_BYTES = GIB
"""A handful of photos in flight at once."""
MORE_ROOM = (
    "give it more: docker run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm; "
    "otherwise mount -o remount,size=8g /dev/shm"
)


def lines(shm_dir: str, *, has_gpu: bool) -> Iterator[Line]:
    yield namespace(shm_namespace_id(shm_dir), shm_dir)
    try:
        room = os.statvfs(shm_dir)
    except OSError as error:
        advice = "mount a tmpfs there: mount -t tmpfs -o mode=1777 tmpfs /dev/shm; until then every tensor goes inline"
        yield Line("shm mount", Status.PROBLEM, f"{shm_dir}: {error.strerror}", advice)
        return
    table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    found = mount_of(os.path.realpath(shm_dir), table)
    yield mount(found, shm_dir)
    yield space(total=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize, shm_dir=shm_dir)
    yield writable(shm_dir)
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text(encoding="utf-8")
    except OSError:
        setting = ""
    yield huge_pages(found, setting, has_gpu=has_gpu)


@dataclass(frozen=True, slots=True)
class Mount:
    """One row of /proc/self/mountinfo."""

    point: str
    fstype: str
    options: tuple[str, ...]


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that ``path`` lies on: the deepest one, and of several at one point the last one mounted."""
    best = None
    for row in mountinfo.splitlines():
        head, separator, tail = row.partition(" - ")
        fields, types = head.split(), tail.split()
        if not separator or len(fields) < 6 or len(types) < 3:
            continue
        point = fields[4].replace(r"\040", " ").replace(r"\011", "\t").replace(r"\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            # The mount point's own options and the file system's can both say "ro".
            options = dict.fromkeys([*fields[5].split(","), *types[2].split(",")])
            if "ro" in options:
                options.pop("rw", None)
            best = Mount(point, types[0], tuple(options))
    return best


def namespace(namespace_id: str, shm_dir: str) -> Line:
    """Judge the id by which gateway and worker know that they share memory."""
    if not namespace_id:
        return Line(
            "namespace id",
            Status.WARNING,
            f"unknown: no boot id, or no {shm_dir}",
            "in transport mode auto every tensor goes inline; mount /proc and /dev/shm, or choose mode shm",
        )
    return Line("namespace id", Status.GOOD, namespace_id)


def mount(found: Mount | None, shm_dir: str) -> Line:
    """Judge what kind of file system ``shm_dir`` lies on."""
    name = "shm mount"
    if found is None:
        return Line(name, Status.WARNING, f"{shm_dir} is on no mount that is listed", "check /proc/self/mountinfo")
    text = f"{found.fstype} at {found.point} ({', '.join(found.options)})"
    if "ro" in found.options:
        return Line(name, Status.PROBLEM, text, f"it is read-only: mount -o remount,rw {found.point}")
    if found.fstype not in ("tmpfs", "ramfs", "hugetlbfs"):
        return Line(
            name,
            Status.WARNING,
            text,
            f"that is a disk, not memory: mount -t tmpfs -o mode=1777 tmpfs {shm_dir}",
        )
    return Line(name, Status.GOOD, text)


def huge_pages(found: Mount | None, shmem_enabled: str, *, has_gpu: bool) -> Line:
    """Judge how large the pages of new segments are.

    A tmpfs mount's own option ``huge=`` says; "deny" and "force" in shmem_enabled overrule it (the kernel's document
    admin-guide/mm/transhuge). Reading a new segment by 8 threads went from 21-23 to 35-38 GB/s with huge pages, and
    writing one from 3 to 6 (benches/RESULTS.md, 2026-11-30).
    """
    name = "huge pages"
    overruled = re.search(r"\[(deny|force)\]", shmem_enabled)
    if found is None or found.fstype != "tmpfs" or not shmem_enabled:
        return Line(name, Status.GOOD, "this kernel or file system offers none for segments")
    option = next((option.removeprefix("huge=") for option in found.options if option.startswith("huge=")), "never")
    if overruled:
        text = f"{overruled[1]}, for all shared memory (shmem_enabled overrules {found.point}'s huge={option})"
    else:
        text = f"huge={option} on {found.point}"
    if has_gpu and (overruled[1] == "deny" if overruled else option in ("never", "advise")):
        first = "set shmem_enabled to never, then " if overruled else ""
        return Line(
            name,
            Status.WARNING,
            text,
            f"segments above a MiB move up to twice as fast in huge pages: {first}"
            f"mount -o remount,huge=within_size {found.point}",
        )
    return Line(name, Status.GOOD, text)


def space(*, total: int, free: int, shm_dir: str) -> Line:
    """Judge the size and the room left, in bytes."""
    name = "shm space"
    text = f"{bytes_text(free)} free of {bytes_text(total)} in {shm_dir} ({free} of {total} bytes)"
    if total < PHOTO_BYTES:
        return Line(
            name, Status.PROBLEM, text, f"less than the pixels of one photo ({bytes_text(PHOTO_BYTES)}): {MORE_ROOM}"
        )
    if free < PHOTO_BYTES:
        return Line(
            name,
            Status.WARNING,
            text,
            "nearly full: tensors that do not fit go inline. See the leftovers below, and who else fills it: "
            f"du -a {shm_dir} | sort -n | tail",
        )
    if total < ROOMY_BYTES:
        return Line(
            name,
            Status.WARNING,
            text,
            f"a burst of pictures fills it ({bytes_text(ROOMY_BYTES)} is comfortable), and the rest goes inline: "
            f"{MORE_ROOM}",
        )
    return Line(name, Status.GOOD, text)


def writable(shm_dir: str) -> Line:
    """Write one segment, read it back and remove it, the way a sender and a receiver do. Leaves nothing behind."""
    name = "shm writable"
    payload = bytes(range(256)) * 256
    try:
        owner = SegmentOwner(shm_dir)
        try:
            segment_name, _ = owner.write(payload)
            with Segment.open(shm_dir, segment_name) as segment:
                back = bytearray(len(payload))
                try:
                    segment.read_into(back, 0)
                finally:
                    segment.unlink()
        finally:
            owner.close()
    except MmcopyError as error:
        return Line(name, Status.PROBLEM, f"no: {error}", _why_not_writable(error, shm_dir))
    if back != payload:
        return Line(
            name, Status.PROBLEM, "other bytes were read back than were written", "do not use this machine's memory"
        )
    return Line(name, Status.GOOD, f"yes: wrote, read and removed a segment of {bytes_text(len(payload))}")


def _why_not_writable(error: MmcopyError, shm_dir: str) -> str:
    if isinstance(error, NoSpaceError):
        return f"make room (see the leftovers below; du -a {shm_dir} | sort -n | tail), or {MORE_ROOM}"
    if isinstance(error, SegmentPermissionError):
        return (
            f"as user {os.geteuid()}: it must be mounted read-write and writable by everybody "
            f"(mount -o remount,rw,mode=1777 {shm_dir}); until then every tensor goes inline"
        )
    return "until this is fixed every tensor goes inline"
