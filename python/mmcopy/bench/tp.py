"""``mmcopy bench tp``: the three strategies of a group beside one rank's plain receive, on every rank of the group.

Rank 0 publishes and decides; each round's order goes to all. A round's time is the slowest rank's, from a common start
until its device is synchronised; publishing is not timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from mmcopy.config import TransportConfig
from mmcopy.doctor.line import bytes_text
from mmcopy.errors import MmcopyError, PeerFailedError
from mmcopy.parallel import ParallelOptions, Strategy
from mmcopy.receiver import Receiver
from mmcopy.sender import Sender

from .breakeven import BreakEven, find_break_even
from .h2d import SHM_DIR
from .load import Load
from .machine import describe
from .paths import Segments
from .place import place_for
from .plan import Case, Effort, turn
from .report import median_and_iqr
from .table import Table, time_text

__all__ = ["ONE", "TpResult", "TpRow", "TpSpec", "run_rank", "tp_notes", "tp_table"]

ONE = "one rank alone"
PATHS = (ONE, *(strategy.value for strategy in Strategy))


@dataclass(frozen=True, slots=True)
class TpSpec:
    """What every rank has to know."""

    sizes: tuple[int, ...]
    device: str = "cpu"
    """``cpu``, or ``cuda``: rank r takes cuda:r of its host."""
    num_threads: int | None = None
    effort: Effort = field(default_factory=Effort)
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TpRow:
    """One way and one size. Its fields are the keys of the JSON output."""

    path: str
    nbytes: int
    median_s: float
    iqr_s: float
    gbps: float
    """1e9 bytes a second that each rank gets."""
    of_one: float
    """Speed over one rank's plain receive of the same bytes, while the others rest."""


@dataclass(frozen=True, slots=True)
class TpResult:
    """What was measured, on what, and what to use."""

    header: str
    ranks: int
    rows: tuple[TpRow, ...]
    break_even: BreakEven

    def as_record(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        options = self.break_even.options
        return {
            "header": self.header,
            "ranks": self.ranks,
            "rows": [asdict(row) for row in self.rows],
            "broadcast_from_bytes": self.break_even.broadcast_bytes,
            "scatter_from_bytes": self.break_even.scatter_bytes,
            "settings": {
                "broadcast_min_bytes": options.broadcast_min_bytes,
                "scatter_min_bytes": options.scatter_min_bytes,
            },
        }


class _Peers:
    """All ranks of the default process group, which has a backend for host memory and one for the device."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.group: Any = dist.group.WORLD
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()

    def share(self, value: Any) -> Any:
        """Rank 0's value."""
        values = [value]
        self._dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values = [None] * self.size
        self._dist.all_gather_object(values, value)
        return values

    def slowest(self, seconds: float | None, error: MmcopyError | None) -> float:
        """The largest of all ranks' seconds. Where one has an error each raises: its own, or that of the peer."""
        told = self.gather((seconds, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(told):
            if text is not None:
                raise PeerFailedError(f"rank {rank} of the benchmark: {text}")
        return float(max(each or 0.0 for each, _ in told))


def run_rank(
    spec: TpSpec,
    *,
    local_rank: int,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> TpResult | None:
    """One rank's part, in a process whose default group is made; the result on rank 0, None on the others. Blocks.

    On every rank alike: raises :class:`BytesDifferError` where a rank got wrong bytes, PeerFailedError on the other
    ranks, :class:`NoSpaceError`, :class:`DeviceError`. Nothing is left in /dev/shm.
    """
    peers = _Peers()
    device = spec.device if spec.device == "cpu" else f"cuda:{local_rank}"
    cases = [Case(nbytes) for nbytes in spec.sizes]
    rows: list[TpRow] = []
    with contextlib.ExitStack() as stack:

        def receiver(**options: Any) -> Receiver:
            return stack.enter_context(
                Receiver(device, shm_dir=SHM_DIR, num_threads=spec.num_threads, timeout_s=spec.timeout_s, **options)
            )

        ways: dict[str, Receiver | None] = {ONE: receiver() if peers.rank == 0 else None}
        for strategy in Strategy:
            ways[strategy.value] = receiver(group=peers.group, parallel=ParallelOptions(strategy=strategy))
        sender = stack.enter_context(Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=SHM_DIR))
        header = f"{peers.size} ranks; {describe(device)}"
        say(header)
        for number, case in enumerate(cases, 1):
            load = Load(case, place_for(device), seed=number)
            seconds = _measure(ways, load, Segments(sender, load, shm_dir=SHM_DIR), peers, spec.effort, poll)
            rows += _rows(case, seconds)
            say(f"[{number}/{len(cases)}] {case.label}: rounds {len(seconds[ONE])}")
            del load
    if peers.rank:
        return None
    medians = {path: {row.nbytes: row.median_s for row in rows if row.path == path} for path in PATHS}
    return TpResult(header, peers.size, tuple(rows), find_break_even(peers.size, medians))


def _measure(
    ways: dict[str, Receiver | None],
    load: Load,
    segments: Segments,
    peers: _Peers,
    effort: Effort,
    poll: Callable[[], None],
) -> dict[str, list[float]]:
    """Each way's bytes checked on every rank, one round to warm up, then rounds in turns."""
    for path in PATHS:
        load.change()
        _deliver(path, ways[path], load, segments, peers, check=True)
    for path in PATHS:
        _deliver(path, ways[path], load, segments, peers)
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    started, rounds = time.perf_counter(), 0
    while True:
        poll()
        is_enough = effort.is_enough(rounds, time.perf_counter() - started)
        if peers.share(is_enough):
            return seconds
        for path in turn(PATHS, rounds):
            seconds[path].append(_deliver(path, ways[path], load, segments, peers))
        rounds += 1


def _deliver(
    path: str, receiver: Receiver | None, load: Load, segments: Segments, peers: _Peers, *, check: bool = False
) -> float:
    """One delivery; the seconds of the slowest rank that has part in it."""
    sent: list[Any] = []
    error: MmcopyError | None = None
    seconds = 0.0
    if peers.rank == 0:
        try:
            sent = segments.publish()
        except MmcopyError as failure:
            error = failure
    peers.slowest(None, error)
    try:
        items = peers.share(sent)
        load.place.synchronize()
        peers.gather(None)  # a common start
        try:
            start = time.perf_counter()
            arrays = [] if receiver is None else receiver.receive(items)
            load.place.synchronize()
            seconds = time.perf_counter() - start
            if check and receiver is not None:
                load.check(arrays, path=path)
            del arrays
        except MmcopyError as failure:
            error = failure
        slowest = peers.slowest(seconds, error)
    except BaseException:
        segments.cancel(sent)
        raise
    if peers.rank == 0:
        segments.settle(sent)
    return slowest


def _rows(case: Case, seconds: dict[str, list[float]]) -> list[TpRow]:
    timed = {path: median_and_iqr(seconds[path]) for path in PATHS}
    return [
        TpRow(path, case.nbytes, median, iqr, case.nbytes / median / 1e9, timed[ONE][0] / median)
        for path, (median, iqr) in timed.items()
    ]


def tp_table(result: TpResult) -> Table:
    """One group a size, one row a way; the fastest of a group's ways stands out."""
    table = Table(("bytes", "path", "median", "IQR", "GB/s a rank", "of one"), left=2)
    for nbytes in dict.fromkeys(row.nbytes for row in result.rows):
        rows = [row for row in result.rows if row.nbytes == nbytes]
        fastest = min((row for row in rows if row.path != ONE), key=lambda row: row.median_s)
        for n, row in enumerate(rows):
            table.add(
                "" if n else bytes_text(nbytes),
                row.path,
                time_text(row.median_s),
                time_text(row.iqr_s),
                f"{row.gbps:.2f}",
                f"{row.of_one:.2f}",
                strong=row is fastest,
            )
        table.end_group()
    return table


def tp_notes(result: TpResult) -> str:
    """What the columns mean, and what to use."""
    return (
        "Time runs from a common start until the slowest rank's device is synchronised; agreement included.\n"
        "of one: speed over one rank's plain receive while the others rest. Segments are new each time.\n"
        "GB/s is 1e9 bytes a second that each rank gets; KiB, MiB and GiB are powers of 1024.\n"
        + result.break_even.advice
    )
