"""``mmcopy bench h2d``: receiving in one process, beside its limit and plain code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcopy.config import ENDPOINT_LABEL, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.receive.receiver import Receiver
from mmcopy.send.sender import Sender
from mmcopy.tools.units import time_text

from .load import Load
from .machine import describe
from .paths import Role, arena_bytes_for, free_bytes, h2d_paths
from .place import framework_for, place_for
from .plan import Case, Effort, check_space
from .report import Row, case_table, rows_of
from .table import Table
from .timing import measure

__all__ = ["SHM_DIR", "H2dResult", "h2d_table", "run_h2d"]

SHM_DIR = "/dev/shm"
"""Where SharedMemory, and with it a baseline, looks."""

CONNECT_LIMIT_S = 60.0
"""For making an arena and handing it over."""


@dataclass(frozen=True, slots=True)
class H2dResult:
    """What was measured, on what."""

    header: str
    limit: str
    """The limit's name: ``pinned_h2d`` or ``memcpy``."""
    rows: tuple[Row, ...]
    roles: dict[str, Role]
    """By path's name."""


def run_h2d(
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    effort: Effort | None = None,
    with_baselines: bool = True,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> H2dResult:
    """Measure ``cases`` one after the other. Blocks for about ``effort.seconds`` per case, longer for large ones.

    At most one message is in /dev/shm at a time. Host memory in use reaches about four times the largest case, the
    GPU's about twice.

    Raises :class:`BytesDifferError` when a path delivers wrong bytes, :class:`LeftBehindError`, :class:`NoSpaceError`,
    :class:`DeviceError`, :class:`MissingDependencyError`; whatever is raised, nothing is left in /dev/shm.
    """
    check_space(cases, free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    effort = effort or Effort()
    rows: list[Row] = []
    roles: dict[str, Role] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-bench-") as directory,
        WorkerEndpoint(directory) as endpoint,
        Receiver(
            device, framework=framework_for(device), shm_dir=SHM_DIR, num_threads=num_threads, endpoint=endpoint
        ) as receiver,
        Sender(
            TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=SHM_DIR, arena_bytes=arena_bytes_for(cases)
        ) as sender,
    ):
        worker = WorkerSpec("bench", labels={ENDPOINT_LABEL: endpoint.path})
        sender.connect(worker, timeout_s=CONNECT_LIMIT_S)
        place = place_for(device)
        header = describe(device)
        say(header)
        for number, case in enumerate(cases, 1):
            load = Load(case, place, seed=number)
            paths = h2d_paths(load, sender, receiver, shm_dir=SHM_DIR, worker=worker)
            paths = [path for path in paths if with_baselines or path.role is not Role.BASELINE]
            seconds = measure(paths, load, effort, poll=poll)
            rows += rows_of(case, paths, seconds)
            roles.update({path.name: path.role for path in paths})
            say(f"[{number}/{len(cases)}] {case.label}: rounds {len(seconds[paths[0].name])}")
            del load, paths  # before the next case takes its memory
    return H2dResult(header, place.limit_name, tuple(rows), roles)


def h2d_table(result: H2dResult) -> Table:
    """One group per case, one row per path."""
    columns = ("median", "IQR", "GB/s", "of limit", "versus")
    return case_table(columns, result.rows, _cells, result.roles)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        time_text(row.median_s),
        time_text(row.iqr_s),
        f"{row.gbps:.2f}",
        f"{row.of_limit:.2f}",
        row.versus_text,
    )


def h2d_notes(result: H2dResult) -> str:
    """What the columns and the limit mean."""
    limit = (
        "one asynchronous copy out of memory that is pinned and filled already"
        if result.limit == "pinned_h2d"
        else "one copy between two blocks of host memory that are mapped already; it and the baselines use one thread"
    )
    lines = [f"limit ({result.limit}): {limit}."]
    if any(row.count > 1 for row in result.rows):
        lines.append("The limit of a batch is one contiguous copy of all its bytes.")
    lines += [
        "versus: speed over the fastest baseline of the case.",
        "Time runs from the message to the synchronised device; publishing is not timed. Segments are new each",
        "time; the arena that leases are in is not, it was registered once.",
        "GB/s is 1e9 bytes a second; KiB, MiB and GiB are powers of 1024.",
    ]
    return "\n".join(lines)
