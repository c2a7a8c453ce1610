"""What a run left in shared memory: files that its own gateway made or that its own workers were handed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Leftover", "Leftovers", "sender_ids_of"]

SHM_DIR = Path("/dev/shm")
POLL_S = 0.02


@dataclass(frozen=True)
class Leftover:
    """A segment that is still there."""

    name: str
    nbytes: int


class Leftovers:
    """Made before a run starts. Names that existed then, and those of other programs, do not count."""

    def __init__(self, shm_dir: Path = SHM_DIR) -> None:
        self._shm_dir = shm_dir
        self._before = self._names()

    def found(
        self, *, gateway_pids: Iterable[int], handed: Iterable[str], sender_ids: Iterable[str] = ()
    ) -> list[Leftover]:
        """Segments of these gateway processes, segments that workers were handed, and all that these senders of mmcopy
        made (their lock included), which exist now."""
        prefixes = tuple(f"smg-tokenspeed-{pid}-" for pid in gateway_pids)
        prefixes += tuple(f"mmcopy-{sender_id}{end}" for sender_id in sender_ids for end in "-.")
        names = {name for name in self._names() if prefixes and name.startswith(prefixes)} | set(handed)
        sizes = {name: self._size(name) for name in sorted(names - self._before)}
        return [Leftover(name, size) for name, size in sizes.items() if size is not None]

    @staticmethod
    def settle(look: Callable[[], list[Leftover]], *, limit_s: float, poll: Callable[[], None]) -> None:
        """Waits until ``look`` finds nothing: consumers remove a segment a moment after it was reported."""
        deadline = time.monotonic() + limit_s
        while look() and time.monotonic() < deadline:
            poll()
            time.sleep(POLL_S)

    def unlink(self, leftovers: Iterable[Leftover]) -> None:
        """Unlinks them. Call it only when every process that could use them has ended."""
        for leftover in leftovers:
            (self._shm_dir / leftover.name).unlink(missing_ok=True)

    def _names(self) -> set[str]:
        return {path.name for path in self._shm_dir.iterdir()}

    def _size(self, name: str) -> int | None:
        try:
            return (self._shm_dir / name).lstat().st_size
        except OSError:
            return None


def sender_ids_of(segments: Iterable[str]) -> set[str]:
    """The senders of mmcopy that made some of ``segments``."""
    return {match[1] for name in segments if (match := re.fullmatch(r"mmcopy-([0-9a-f]{16})-.*", name))}
