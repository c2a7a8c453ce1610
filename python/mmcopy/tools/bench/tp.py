"""``mmcopy bench tp``: the three strategies of a group beside one rank's plain receive, on every rank of the group.

Rank 0 publishes and decides; each round's order goes to all. A round's time is the slowest rank's, from a common start
until its device is synchronised; publishing is not timed. Leases are for all ranks that take part, each of which has an
endpoint, and they are written when the time begins.
"""

from __future__ import annotations

import contextlib
import enum
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmcopy.config import ENDPOINT_LABEL, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import MmcopyError, PeerFailedError
from mmcopy.receive.group import ParallelOptions, Strategy
from mmcopy.receive.receiver import Receiver
from mmcopy.send.sender import Sender
from mmcopy.tools.units import bytes_text, time_text

from .breakeven import BreakEven, find_break_even
from .h2d import SHM_DIR
from .load import Load
from .machine import describe
from .paths import Leases, Segments, arena_bytes_for
from .place import place_for
from .plan import Case, Effort
from .report import median_and_iqr
from .table import Table
from .timing import take_turns

__all__ = ["ONE", "Payload", "TpResult", "TpRow", "TpSpec", "run_rank", "tp_notes", "tp_table"]

ONE = "one rank alone"
PATHS = (ONE, *(strategy.value for strategy in Strategy))


class Payload(enum.StrEnum):
    """What the tensors are sent as."""

    SEGMENT = "segment"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class TpSpec:
    """What every rank needs to know."""

    sizes: tuple[int, ...]
    device: str = "cpu"
    """``cpu``, or ``cuda``: rank r takes cuda:r of its host."""
    num_threads: int | None = None
    effort: Effort = field(default_factory=Effort)
    timeout_s: float = 60.0
    payload: str = Payload.SEGMENT.value


@dataclass(frozen=True, slots=True)
class TpRow:
    """One path and one size. Its fields are the keys of the JSON output."""

    path: str
    nbytes: int
    median_s: float
    iqr_s: float
    gbps: float
    """1e9 bytes a second that each rank gets."""
    of_one: float
    """Speed over one rank's plain receive of the same bytes, while the others are idle."""


@dataclass(frozen=True, slots=True)
class TpResult:
    """What was measured, on what, and what to use."""

    header: str
    ranks: int
    rows: tuple[TpRow, ...]
    break_even: BreakEven
    payload: str = Payload.SEGMENT.value

    def as_record(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        options = self.break_even.options
        return {
            "header": self.header,
            "ranks": self.ranks,
            "payload": self.payload,
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
        reported = self.gather((seconds, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(reported):
            if text is not None:
                raise PeerFailedError(f"rank {rank} of the benchmark: {text}")
        return float(max(each or 0.0 for each, _ in reported))


class _Way:
    """One path's receiver on this rank, None where the rank takes no part, and on rank 0 its sender."""

    def __init__(self, spec: TpSpec, peers: _Peers, path: str, *, local_rank: int, stack: contextlib.ExitStack) -> None:
        self._peers = peers
        self.receiver: Receiver | None = None
        self._sender: Sender | None = None
        endpoint: WorkerEndpoint | None = None
        is_lease = spec.payload == Payload.LEASE
        if path != ONE or peers.rank == 0:
            group = {} if path == ONE else {"group": peers.group, "parallel": ParallelOptions(strategy=path)}
            if is_lease:  # one per receiver, because a process registers an arena's mapping once
                endpoint = stack.enter_context(
                    WorkerEndpoint(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcopy-bench-")))
                )
            self.receiver = stack.enter_context(
                Receiver(
                    spec.device if spec.device == "cpu" else f"cuda:{local_rank}",
                    shm_dir=SHM_DIR,
                    num_threads=spec.num_threads,
                    timeout_s=spec.timeout_s,
                    endpoint=endpoint,
                    **group,
                )
            )
        sockets = peers.gather(None if endpoint is None else endpoint.path)
        self._workers = [
            WorkerSpec(f"grpc://rank:{rank}", labels={ENDPOINT_LABEL: socket})
            for rank, socket in enumerate(sockets)
            if socket is not None
        ]
        if peers.rank == 0:
            nbytes = arena_bytes_for([Case(nbytes) for nbytes in spec.sizes]) if is_lease else 0
            config = TransportConfig(mode="auto" if is_lease else "shm", shm_min_bytes=0)
            self._sender = stack.enter_context(Sender(config, shm_dir=SHM_DIR, arena_bytes=nbytes))
            for worker in self._workers:
                self._sender.connect(worker, timeout_s=spec.timeout_s)

    def publisher(self, load: Load) -> Segments | Leases | None:
        """What publishes a load for this path; None except on rank 0."""
        if self._sender is None:
            return None
        if self._workers:
            return Leases(self._sender, self._workers, load)
        return Segments(self._sender, load, shm_dir=SHM_DIR)


def run_rank(
    spec: TpSpec,
    *,
    local_rank: int,
    poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _text: None,
) -> TpResult | None:
    """One rank's part, in a process whose default group is made; the result on rank 0, None on the others. Blocks.

    On every rank alike: raises :class:`BytesDifferError` where a rank got wrong bytes, PeerFailedError on the other
    ranks, :class:`NoSpaceError` (also for leases where a rank cannot take the arena), :class:`DeviceError`. Nothing is
    left in /dev/shm.
    """
    peers = _Peers()
    cases = [Case(nbytes) for nbytes in spec.sizes]
    rows: list[TpRow] = []
    with contextlib.ExitStack() as stack:
        ways = {path: _Way(spec, peers, path, local_rank=local_rank, stack=stack) for path in PATHS}
        device = spec.device if spec.device == "cpu" else f"cuda:{local_rank}"
        header = f"{peers.size} ranks; {describe(device)}"
        say(header)
        for number, case in enumerate(cases, 1):
            load = Load(case, place_for(device), seed=number)
            seconds = _measure(ways, load, peers, spec.effort, poll)
            rows += _rows(case, seconds)
            say(f"[{number}/{len(cases)}] {case.label}: rounds {len(seconds[ONE])}")
            del load
    if peers.rank:
        return None
    medians = {path: {row.nbytes: row.median_s for row in rows if row.path == path} for path in PATHS}
    return TpResult(header, peers.size, tuple(rows), find_break_even(peers.size, medians), spec.payload)


def _measure(
    ways: dict[str, _Way], load: Load, peers: _Peers, effort: Effort, poll: Callable[[], None]
) -> dict[str, list[float]]:
    """Each way's bytes are checked on every rank, one round warms up, then the ways take turns."""
    publishers = {path: way.publisher(load) for path, way in ways.items()}

    def deliver(path: str, *, check: bool = False) -> float:
        return _deliver(path, ways[path].receiver, load, publishers[path], peers, check=check)

    def check(path: str) -> None:
        load.change()
        deliver(path, check=True)

    def is_enough(rounds: int, elapsed_s: float) -> bool:
        poll()  # only between rounds: within one the ranks wait for each other
        return bool(peers.share(effort.is_enough(rounds, elapsed_s)))

    return dict(zip(PATHS, take_turns(PATHS, check=check, deliver=deliver, is_enough=is_enough), strict=True))


def _deliver(
    path: str,
    receiver: Receiver | None,
    load: Load,
    publisher: Segments | Leases | None,
    peers: _Peers,
    *,
    check: bool,
) -> float:
    """One delivery: the seconds of the slowest rank that takes part in it. ``publisher`` is rank 0's."""
    sent: Sequence[Any] = []
    error: MmcopyError | None = None
    seconds = 0.0
    if publisher is not None:
        try:
            sent = publisher.publish()
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
        if publisher is not None:
            publisher.cancel(sent)
        raise
    if publisher is not None:
        publisher.settle(sent)
    return slowest


def _rows(case: Case, seconds: dict[str, list[float]]) -> list[TpRow]:
    timed = {path: median_and_iqr(seconds[path]) for path in PATHS}
    return [
        TpRow(path, case.nbytes, median, iqr, case.nbytes / median / 1e9, timed[ONE][0] / median)
        for path, (median, iqr) in timed.items()
    ]


def tp_table(result: TpResult) -> Table:
    """One group per size, one row per path; the fastest path of a group is highlighted."""
    table = Table(("bytes", "path", "median", "IQR", "GB/s per rank", "of one"), left=2)
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
        "of one: speed over one rank's plain receive while the others are idle. "
        + ("Segments are new each time.\n" if result.payload == Payload.SEGMENT else "Leases are written before.\n")
        + "GB/s is 1e9 bytes a second that each rank gets; KiB, MiB and GiB are powers of 1024.\n"
        + result.break_even.advice
    )
