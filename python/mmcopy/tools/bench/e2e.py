"""``mmcopy bench e2e``: from the sender's private array to a synchronised tensor on the device, in two processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmcopy.config import TransportConfig
from mmcopy.send.sender import Sender
from mmcopy.tools.units import time_text

from . import baselines
from .h2d import CONNECT_LIMIT_S, SHM_DIR
from .load import BytesDifferError, Load
from .paths import Leases, Path, Role, Segments, arena_bytes_for, free_bytes
from .peer import Limit, Peer, Receive, Received, digest
from .place import CudaPlace, HostPlace
from .plan import Case, Effort, check_space
from .report import Row, case_table, median_and_iqr, rows_of
from .table import Table
from .timing import take_turns

__all__ = ["E2eResult", "e2e_notes", "e2e_table", "run_e2e"]


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


@dataclass(slots=True)
class _Times:
    total_s: list[float]
    receive_s: list[float]
    cpu_s: list[float]


def run_e2e(
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    effort: Effort | None = None,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> E2eResult:
    """Measure ``cases`` one after the other: this process sends, another receives. Paths take turns.

    Args:
        cases: What to measure.
        device: Where the other process receives.
        num_threads: Copy threads on either side.
        effort: Rounds per case.
        poll: Called where stopping leaves nothing behind; may raise.
        say: Called with what was done.

    Raises:
        BytesDifferError: A path delivered wrong bytes.
        LeftBehindError: A path left a segment or a lease; it is gone when this returns.
        NoSpaceError: /dev/shm is too small.
        PeerError: The other process failed.
    """
    check_space(cases, free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    effort = effort or Effort()
    rows: list[E2eRow] = []
    roles: dict[str, Role] = {}
    with (
        Peer(device, num_threads=num_threads, shm_dir=SHM_DIR) as peer,
        Sender(
            TransportConfig(mode="shm", shm_min_bytes=0),
            shm_dir=SHM_DIR,
            num_threads=num_threads,
            arena_bytes=arena_bytes_for(cases),
        ) as sender,
    ):
        sender.connect(peer.worker, timeout_s=CONNECT_LIMIT_S)
        say(peer.header)
        for number, case in enumerate(cases, 1):
            load = Load(case, HostPlace(), seed=number)
            paths = _paths(load, sender, peer, limit=_limit_name(device))
            times = _measure(paths, load, peer, effort, poll=poll)
            rows += _rows(case, paths, times)
            roles.update({path.name: path.role for path in paths})
            say(f"[{number}/{len(cases)}] {case.label}: rounds {len(times[paths[0].name].total_s)}")
        return E2eResult(peer.header, _limit_name(device), tuple(rows), roles)


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
            "versus: speed over the fastest baseline. CPU s/GiB: of all threads of the receiving process.",
        )
    )


def _limit_name(device: str) -> str:
    return (HostPlace if device == "cpu" else CudaPlace).limit_name


def _paths(load: Load, sender: Sender, peer: Peer, *, limit: str) -> list[Path]:
    segments = Segments(sender, load, shm_dir=SHM_DIR)
    leases = Leases(sender, peer.worker, load)
    streamed = Leases(sender, peer.worker, load, is_streamed=True)

    def receive(name: str) -> Callable[[Any], Any]:
        return lambda message: peer.ask(Receive(name, message))

    def publish_named() -> list[baselines.Named]:
        return baselines.publish_shared_memory(load.parts)

    total = load.case.total_bytes
    return [
        Path(limit, Role.LIMIT, lambda: None, lambda _: peer.ask(Limit(total))),
        Path("lease", Role.OURS, leases.publish, receive("lease"), leases.settle, leases.cancel),
        Path(
            "lease_streamed", Role.OURS, streamed.publish, receive("lease_streamed"), streamed.settle, streamed.cancel
        ),
        Path("segment", Role.OURS, segments.publish, receive("segment"), segments.settle, segments.cancel),
        Path(
            "shared_memory_staged",
            Role.BASELINE,
            publish_named,
            receive("shared_memory_staged"),
            cancel=baselines.unlink_shared_memory,
        ),
        Path("inline", Role.BASELINE, lambda: [part.tobytes() for part in load.parts], receive("inline")),
    ]


def _measure(
    paths: Sequence[Path], load: Load, peer: Peer, effort: Effort, *, poll: Callable[[], None]
) -> dict[str, _Times]:
    """Each path's bytes are compared, one round warms up, then the paths are timed in turns."""

    def deliver(path: Path) -> tuple[float, Received]:
        start = time.perf_counter()
        with path.message() as message:
            received: Received = path.receive(message)
            seconds = time.perf_counter() - start
        return received.seconds if path.role is Role.LIMIT else seconds, received

    def check(path: Path) -> None:
        if path.role is not Role.LIMIT:
            load.change()
            _check(path, load, peer)

    found = take_turns(paths, check=check, deliver=deliver, is_enough=effort.is_enough, poll=poll)
    return {
        path.name: _Times(
            [seconds for seconds, _ in rounds],
            [received.seconds for _, received in rounds],
            [received.cpu_s for _, received in rounds],
        )
        for path, rounds in zip(paths, found, strict=True)
    }


def _check(path: Path, load: Load, peer: Peer) -> None:
    with path.message() as message:
        received = peer.ask(Receive(path.name, message, check=True))
    wanted = (load.case.total_bytes, digest(load.parts))
    if (received.nbytes, received.digest) != wanted:
        raise BytesDifferError(
            f"{path.name}, {load.case.label}: {received.nbytes} bytes with digest {received.digest} arrived, "
            f"{wanted[0]} with {wanted[1]} were sent"
        )


def _rows(case: Case, paths: Sequence[Path], times: dict[str, _Times]) -> list[E2eRow]:
    gib = case.total_bytes / (1 << 30)
    rows = rows_of(case, paths, {name: kept.total_s for name, kept in times.items()})
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
            median_and_iqr(times[row.path].receive_s)[0],
            # The mean: the clock of processor time can be coarse.
            sum(times[row.path].cpu_s) / len(times[row.path].cpu_s) / gib,
        )
        for row in rows
    ]
