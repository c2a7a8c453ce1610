"""``mmcopy bench e2e``: from the sender's private array to a synchronised tensor on the device, in two processes."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcopy.tools.units import time_text

from .e2e_paths import E2ePath, e2e_paths
from .h2d import SHM_DIR
from .pair import Delivery, Pair
from .paths import Role, free_bytes
from .peer import Setup
from .plan import Case, Effort, check_space, turn_of
from .report import Row, case_table, rows_of
from .table import Table
from .timing import take_turns

__all__ = ["MEMORY_TIMES", "E2eResult", "e2e_notes", "e2e_table", "run_e2e"]

MEMORY_TIMES = 18
"""Each path's sender keeps its own load (7), three have shared memory of that size and the limit two blocks (5),
torch's cache of pinned memory keeps one, and bytes in a message are there five times while they travel."""


@dataclass(frozen=True, slots=True)
class E2eRow(Row):
    """A path of one case, sender and receiver together."""

    receive_s: float
    """Median of the receiving process alone."""
    consumer_cpu_s_per_gib: float
    """Processor seconds of all threads of the receiving process, for 2**30 bytes."""


@dataclass(frozen=True, slots=True)
class E2eResult:
    """What was measured, on what."""

    header: str
    limit: str
    """The limit's name: ``pinned_h2d`` or ``memcpy``."""
    rows: tuple[E2eRow, ...]
    roles: dict[str, Role]


def run_e2e(
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    effort: Effort | None = None,
    paths: Sequence[E2ePath] | None = None,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> E2eResult:
    """Measure ``cases`` one after the other. Each path has two processes of its own; paths take turns.

    Host memory in use reaches about :data:`MEMORY_TIMES` times the largest case.

    Args:
        cases: What to measure.
        device: Where the receiving processes receive.
        num_threads: Copy threads on either side.
        effort: Turns per case; a turn is several deliveries, see :func:`turn_of`.
        paths: What to compare, with the limit among them; None for all.
        poll: Called where stopping leaves nothing behind; may raise.
        say: Called with what was done.

    Raises:
        BytesDifferError: A path delivered wrong bytes.
        LeftBehindError: A path left a segment or a lease; it is gone when this returns.
        NoSpaceError: /dev/shm is too small.
        DeviceError: The device does not exist.
        PeerError: One of the processes failed.
    """
    check_space(cases, free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    effort = effort or Effort()
    paths = e2e_paths(device) if paths is None else paths
    limit = next(path.name for path in paths if path.role is Role.LIMIT)
    setup = Setup(device, num_threads, room_bytes=max(case.shared_bytes for case in cases))
    rows: list[E2eRow] = []
    with contextlib.ExitStack() as stack:
        pairs: list[Pair] = []
        for path in paths:
            poll()
            pairs.append(stack.enter_context(Pair(path, setup)))
        for pair in pairs:
            stack.callback(pair.disconnect)  # all of them, before the first is waited for
        headers = [pair.ready() for pair in pairs]
        say(headers[0])
        for number, case in enumerate(cases, 1):
            for pair in pairs:
                pair.begin_case(case, seed=number)
            for pair in pairs:
                pair.answer()
            times = _measure(pairs, case, effort, poll=poll)
            rows += _rows(case, paths, times)
            say(f"[{number}/{len(cases)}] {case.label}: deliveries {len(times[limit])}")
    return E2eResult(headers[0], limit, tuple(rows), {path.name: path.role for path in paths})


def e2e_table(result: E2eResult) -> Table:
    """One group per case, one row per path."""
    columns = ("end to end", "IQR", "GB/s", "versus", "receiving", "CPU s/GiB")
    return case_table(columns, result.rows, _cells, result.roles)


def _cells(row: E2eRow) -> tuple[str, ...]:
    return (
        time_text(row.median_s),
        time_text(row.iqr_s),
        f"{row.gbps:.2f}",
        row.versus_text,
        time_text(row.receive_s),
        f"{row.consumer_cpu_s_per_gib:.3f}",
    )


def e2e_notes(result: E2eResult) -> str:
    """What the columns mean."""
    return "\n".join(
        (
            "end to end: from the sender's own array to the synchronised device of the other process, and its answer.",
            f"The limit ({result.limit}) is one copy inside the receiving process, with no sender and no answer.",
            "torch_slots: torch copies into a slot that the receiving process has registered with CUDA, as an engine's",
            "own arena does. Each path has both processes to itself and delivers several times back to back in a turn.",
            "versus: speed over the fastest baseline. CPU s/GiB: of all threads of the receiving process.",
        )
    )


def _measure(
    pairs: Sequence[Pair], case: Case, effort: Effort, *, poll: Callable[[], None]
) -> dict[str, list[Delivery]]:
    """Each path's bytes are compared, one turn warms up, then the paths are timed in turns."""
    untimed, timed = turn_of(case)
    found = take_turns(
        pairs,
        check=Pair.check,
        deliver=lambda pair: pair.deliver(untimed=untimed, timed=timed),
        is_enough=effort.is_enough,
        poll=poll,
    )
    return {pair.path.name: list(itertools.chain(*turns)) for pair, turns in zip(pairs, found, strict=True)}


def _rows(case: Case, paths: Sequence[E2ePath], times: dict[str, list[Delivery]]) -> list[E2eRow]:
    gib = case.total_bytes / (1 << 30)
    rows = rows_of(case, paths, {name: [each.total_s for each in kept] for name, kept in times.items()})
    return [
        E2eRow(
            row.path,
            row.nbytes,
            row.count,
            row.median_s,
            row.iqr_s,
            row.gbps,
            row.of_limit,
            row.versus,
            statistics.median(each.receive_s for each in times[row.path]),
            # The mean: the clock of processor time can be coarse.
            statistics.fmean(each.cpu_s for each in times[row.path]) / gib,
        )
        for row in rows
    ]
