"""``mmcopy bench copy``: which number of copy threads and which slot size receive fastest on this machine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcopy.config import TransportConfig
from mmcopy.receive.receiver import Receiver
from mmcopy.receive.staging import StagingOptions
from mmcopy.send.sender import Sender
from mmcopy.tools.units import bytes_text

from .h2d import SHM_DIR
from .load import Load
from .machine import describe
from .paths import Segments, free_bytes, segment_path
from .place import framework_for, place_for
from .plan import Case, Effort, check_space
from .report import median_and_iqr
from .table import Table
from .timing import measure

__all__ = ["Setting", "SweepResult", "SweepRow", "advice", "best_setting", "run_sweep", "sweep_notes", "sweep_table"]

NEAR_ENOUGH = 0.97
"""Settings whose score is within 3 % of the best are taken as equal: the one with the fewest threads is advised."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What a Receiver is made with. ``slot_bytes`` None: its own default (host memory has no slots)."""

    num_threads: int
    slot_bytes: int | None = None

    @property
    def label(self) -> str:
        """As a Receiver takes it, and unique for each setting."""
        threads = f"num_threads={self.num_threads}"
        return (
            threads if self.slot_bytes is None else f"{threads}, staging=StagingOptions(slot_bytes={self.slot_bytes})"
        )


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One setting and one tensor size."""

    num_threads: int
    slot_bytes: int | None
    nbytes: int
    median_s: float
    iqr_s: float
    gbps: float

    @property
    def setting(self) -> Setting:
        """The setting of this row."""
        return Setting(self.num_threads, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What was measured, on what, and what to use."""

    header: str
    rows: tuple[SweepRow, ...]
    best: Setting


def run_sweep(
    sizes: Sequence[int],
    *,
    device: str,
    threads: Sequence[int],
    slots: Sequence[int],
    effort: Effort | None = None,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> SweepResult:
    """Receive a new segment with every pair of ``threads`` and ``slots``, in turns, size by size. Blocks.

    On the CPU there are no slots, and only ``threads`` are tried. One receiver per setting is open at once, each
    with its own staging memory. Raises what :func:`run_h2d` raises; nothing is left in /dev/shm.
    """
    cases = [Case(nbytes) for nbytes in sizes]
    check_space(cases, free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    settings = [Setting(n, slot) for n in threads for slot in (slots if device != "cpu" else [None])]
    rows: list[SweepRow] = []
    with contextlib.ExitStack() as stack:
        receivers = {setting: stack.enter_context(_receiver(device, setting)) for setting in settings}
        sender = stack.enter_context(Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=SHM_DIR))
        place = place_for(device)
        header = describe(device)
        say(header)
        for number, case in enumerate(cases, 1):
            load = Load(case, place, seed=number)
            segments = Segments(sender, load, shm_dir=SHM_DIR)
            paths = [segment_path(setting.label, receivers[setting], segments) for setting in settings]
            seconds = measure(paths, load, effort or Effort(), poll=poll)
            for setting in settings:
                median, iqr = median_and_iqr(seconds[setting.label])
                gbps = case.nbytes / median / 1e9
                rows.append(SweepRow(setting.num_threads, setting.slot_bytes, case.nbytes, median, iqr, gbps))
            say(f"[{number}/{len(cases)}] {case.label}: rounds {len(seconds[settings[0].label])}")
            del load, segments, paths  # before the next case takes its memory
    return SweepResult(header, tuple(rows), best_setting(rows))


def _receiver(device: str, setting: Setting) -> Receiver:
    if setting.slot_bytes is None:
        return Receiver(device, framework=framework_for(device), shm_dir=SHM_DIR, num_threads=setting.num_threads)
    return Receiver(
        device,
        framework=framework_for(device),
        shm_dir=SHM_DIR,
        num_threads=setting.num_threads,
        staging=StagingOptions(slot_bytes=setting.slot_bytes),
    )


def scores(rows: Sequence[SweepRow]) -> dict[Setting, float]:
    """By setting: the geometric mean, over the sizes, of its speed over the size's best. 1.0 is best at every size."""
    best = {row.nbytes: max(r.gbps for r in rows if r.nbytes == row.nbytes) for row in rows}
    return {
        setting: math.exp(
            sum(math.log(row.gbps / best[row.nbytes]) for row in rows if row.setting == setting) / len(best)
        )
        for setting in dict.fromkeys(row.setting for row in rows)
    }


def best_setting(rows: Sequence[SweepRow]) -> Setting:
    """The setting to use: of those that are near enough to the best score, fewest threads, then the best score."""
    scored = scores(rows)
    top = max(scored.values())
    near = [setting for setting, score in scored.items() if score >= NEAR_ENOUGH * top]
    return min(near, key=lambda setting: (setting.num_threads, -scored[setting]))


def advice(best: Setting) -> str:
    """``"use Receiver(num_threads=8, staging=StagingOptions(slot_bytes=2097152))  # slots of 2 MiB"``"""
    slots = "" if best.slot_bytes is None else f"  # slots of {bytes_text(best.slot_bytes)}"
    return f"use Receiver({best.label}){slots}"


def sweep_notes(result: SweepResult) -> str:
    """What the columns mean, and what to use."""
    return (
        "Columns of sizes: GB/s, 1e9 bytes a second, median of the rounds.\n"
        "score: speed over the size's best, geometric mean over the sizes.\n"
        f"best here: {advice(result.best)}"
    )


def sweep_table(result: SweepResult) -> Table:
    """One row per setting, one column of GB/s per size; the last is the score."""
    sizes = list(dict.fromkeys(row.nbytes for row in result.rows))
    table = Table(("threads", "slot", *(bytes_text(nbytes) for nbytes in sizes), "score"), left=0)
    scored = scores(result.rows)
    for setting, score in scored.items():
        cells = {row.nbytes: row for row in result.rows if row.setting == setting}
        table.add(
            str(setting.num_threads),
            "-" if setting.slot_bytes is None else bytes_text(setting.slot_bytes),
            *(f"{cells[nbytes].gbps:.2f}" for nbytes in sizes),
            f"{score:.2f}",
            strong=setting == result.best,
        )
    return table
