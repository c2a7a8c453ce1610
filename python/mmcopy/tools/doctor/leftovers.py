"""Segments in shared memory that will not be read any more. Counted, never unlinked."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmcopy.tools.units import bytes_text

from .line import Line, Status

__all__ = ["Found", "find", "judge", "lines"]

OLD_S = 60.0
"""A segment is read within moments of its message; an older one was missed by its consumer."""

OURS = re.compile(r"mmcopy-([0-9a-f]{16})-[0-9]+")
SMG = re.compile(r"smg-tokenspeed-.+")


@dataclass(frozen=True, slots=True)
class Found:
    """Segments of one kind of sender: all of them, and those that seem forgotten."""

    count: int = 0
    nbytes: int = 0
    forgotten_count: int = 0
    forgotten_nbytes: int = 0


def lines(shm_dir: str) -> Iterator[Line]:
    ours, smg = find(shm_dir, now=time.time())
    yield judge(
        "leftovers mmcopy",
        ours,
        what="their sender is gone",
        advice="nothing to do: the next mmcopy sender or worker of their user that starts on this machine removes them",
    )
    yield judge(
        "leftovers SMG",
        smg,
        what=f"older than {OLD_S:.0f} s",
        advice=(
            "no worker took them, and a stock gateway removes only those of gateways that have ended. When no "
            f"request is running: find {shm_dir} -maxdepth 1 -name 'smg-tokenspeed-*' -mmin +1 -delete"
        ),
    )


def find(shm_dir: str, *, now: float) -> tuple[Found, Found]:
    """mmcopy's segments and SMG's.

    A sender of mmcopy is alive while it holds the lock of its lock file, which is tried here for an instant. SMG's
    names hold a process id, which means nothing in another container, so there only age counts.
    """
    ours: list[tuple[os.stat_result, bool]] = []
    smg: list[tuple[os.stat_result, bool]] = []
    alive: dict[tuple[str, int], bool | None] = {}
    try:
        paths = list(Path(shm_dir).iterdir())
    except OSError:  # the line "shm mount" reports it
        return Found(), Found()
    for path in paths:
        sender = OURS.fullmatch(path.name)
        if not sender and not SMG.fullmatch(path.name):
            continue
        try:
            status = path.lstat()
        except OSError:
            continue  # consumed since it was listed
        if not stat.S_ISREG(status.st_mode):
            continue
        old = now - status.st_mtime > OLD_S
        if sender is None:
            smg.append((status, old))
            continue
        whose = sender[1], status.st_uid
        if whose not in alive:
            alive[whose] = _holds_lock(path.with_name(f"mmcopy-{whose[0]}.lock"), status.st_uid)
        # No lock file: the sender closed properly, and the consumer still has its minute.
        ours.append((status, alive[whose] is False or (alive[whose] is None and old)))
    return _sum(ours), _sum(smg)


def _sum(files: Iterable[tuple[os.stat_result, bool]]) -> Found:
    files = list(files)
    forgotten = [status for status, is_forgotten in files if is_forgotten]
    return Found(
        count=len(files),
        nbytes=sum(status.st_size for status, _ in files),
        forgotten_count=len(forgotten),
        forgotten_nbytes=sum(status.st_size for status in forgotten),
    )


def _holds_lock(path: Path, uid: int) -> bool | None:
    """Whether some process holds the lock of the file ``path``; None when the user ``uid`` has no such file.

    A file that cannot be opened counts as held.
    """
    try:
        if path.lstat().st_uid != uid:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def judge(name: str, found: Found, *, what: str, advice: str) -> Line:
    """Judge the segments of one kind of sender."""
    if found.count == 0:
        return Line(name, Status.GOOD, "none")
    text = f"{found.count} segments, {bytes_text(found.nbytes)}"
    if found.forgotten_count == 0:
        return Line(name, Status.GOOD, f"none; {text} in flight")
    text += f"; {found.forgotten_count} of them, {bytes_text(found.forgotten_nbytes)}, are left over ({what})"
    return Line(name, Status.WARNING, text, advice)
