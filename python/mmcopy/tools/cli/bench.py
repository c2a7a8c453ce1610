"""``mmcopy bench``: how fast this machine receives, and with which settings it is fastest.

Light to import: what a benchmark needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from mmcopy.config import parse_count, parse_seconds
from mmcopy.config.arguments import argument_type
from mmcopy.errors import ConfigError, MissingDependencyError
from mmcopy.tools.bench.plan import (
    DEFAULT_BATCHES,
    DEFAULT_SIZES,
    DEFAULT_SLOTS,
    DEFAULT_SWEEP_SIZES,
    DEFAULT_TP_SIZES,
    Case,
    Effort,
    check_space,
    parse_batches,
    parse_counts,
    parse_sizes,
    thread_counts,
)

if TYPE_CHECKING:
    from mmcopy.tools.bench.table import Table

__all__ = ["add_parser"]

T = TypeVar("T")

H2D = (
    "Receive segments that were not seen before. Beside it, in one process and in turns, run the limit (one copy "
    "out of memory that is pinned and filled already; on the CPU, a memcpy) and plain code (shared_memory_staged: "
    "SharedMemory, a pinned staging buffer, an asynchronous copy, unlink; pageable: the mapping straight to the "
    "GPU; inline: bytes in the message). Exit code 1 when a path delivers wrong bytes or leaves a segment behind; "
    "2 when it could not run."
)
E2E = (
    "Send from one process and receive in another, every path in two processes of its own and in turns: mmcopy's, and "
    "plain code (torch_slots: torch copies into a slot for each tensor, in memory that the receiving process has "
    "registered with CUDA, as an engine's own arena does; shared_memory_staged: SharedMemory filled by numpy, received "
    "as in h2d; inline: the bytes through a local socket). Takes up to 18 times the largest case of host memory. Exit "
    "codes as for h2d."
)
COPY = (
    "Receive segments with receivers of every number of threads and every slot size, in turns, and print which "
    "setting is best over all sizes (within 3 %, the one with the fewest threads). On the CPU there are no slots: "
    "only threads are tried."
)
TP = (
    "Receive new segments, or leases, on a group of ranks: every rank reads (each), one rank reads and broadcasts "
    "(broadcast), every rank reads a share and the shares are gathered (scatter), beside one rank's plain "
    "receive, in turns. Prints from which size on which one is fastest, and the settings to use. Under torchrun "
    "each process is a rank; otherwise --ranks of them are started here. Exit code 1 when a rank gets wrong "
    "bytes; 2 when it could not run."
)
count = argument_type(parse_count)
sizes = argument_type(parse_sizes)


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    parser = subparsers.add_parser(
        "bench",
        help="measure receiving on this machine against its limit and against plain code",
        description="Measure receiving on this machine. Every path's bytes are checked before anything is timed.",
    )
    which = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)

    h2d = which.add_parser("h2d", help="segments to the device, beside the limit and baselines", description=H2D)
    _add_cases(h2d, threads_help="copy threads of the receiver. default: its own")
    h2d.add_argument(
        "--no-baselines",
        dest="with_baselines",
        action="store_false",
        help="leave out plain code, which takes most of the time at large sizes",
    )
    h2d.set_defaults(run=run_h2d)

    e2e = which.add_parser("e2e", help="from one process's array to another's device", description=E2E)
    _add_cases(e2e, threads_help="copy threads of either side. default: their own")
    e2e.set_defaults(run=run_e2e)

    copy = which.add_parser("copy", help="find the best threads and slot sizes of a receiver here", description=COPY)
    _add_common(copy, sizes_default=DEFAULT_SWEEP_SIZES)
    copy.add_argument(
        "--threads",
        type=argument_type(parse_counts),
        metavar="N,...",
        help="numbers of copy threads to try. default: powers of two up to the cores, 3/4 of them, and all",
    )
    copy.add_argument(
        "--slots", type=sizes, default=DEFAULT_SLOTS, metavar="SIZE,...", help="slot sizes to try. default: %(default)s"
    )
    copy.set_defaults(run=run_copy)

    tp = which.add_parser("tp", help="the strategies of a group of ranks", description=TP)
    _add_common(tp, sizes_default=DEFAULT_TP_SIZES, device_help="cpu, or cuda: rank r takes cuda:r of its host")
    tp.add_argument("--ranks", type=count, metavar="N", help="ranks to start here. default: 2, or one per GPU")
    tp.add_argument("--threads", type=count, metavar="N", help="copy threads of each rank. default: a receiver's own")
    tp.add_argument(
        "--payload",
        choices=("segment", "lease"),
        default="segment",
        help="new segments, or leases of an arena that every rank has (on one host). default: %(default)s",
    )
    tp.set_defaults(run=run_tp)


def _add_common(
    parser: argparse.ArgumentParser,
    *,
    sizes_default: str,
    device_help: str = "cpu or cuda:N, where the tensors go",
) -> None:
    """--device, --sizes, --repeats or --seconds, and --json."""
    parser.add_argument("--device", default="cpu", help=f"{device_help}. default: %(default)s")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=sizes_default,
        metavar="SIZE,...",
        help="single tensors, or none. default: %(default)s",
    )
    rounds = parser.add_mutually_exclusive_group()
    rounds.add_argument("--repeats", type=count, metavar="N", help="rounds per case")
    rounds.add_argument(
        "--seconds",
        type=argument_type(parse_seconds),
        default=2.0,
        metavar="S",
        help="as many rounds per case as fit, 7 at least. default: %(default)s",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end; the table goes to stderr"
    )


def _add_cases(parser: argparse.ArgumentParser, *, threads_help: str) -> None:
    """The common options, --batches and --threads."""
    _add_common(parser, sizes_default=DEFAULT_SIZES)
    parser.add_argument(
        "--batches",
        type=argument_type(parse_batches),
        default=DEFAULT_BATCHES,
        metavar="NxSIZE,...",
        help="several tensors in one receive, or none. default: %(default)s",
    )
    parser.add_argument("--threads", type=count, metavar="N", help=threads_help)


def run_h2d(args: argparse.Namespace) -> int:
    """``mmcopy bench h2d``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from mmcopy.tools.bench import h2d

    options = {"num_threads": args.threads, "with_baselines": args.with_baselines}
    return _run_cases(args, functools.partial(h2d.run_h2d, **options), h2d.h2d_table, h2d.h2d_notes)


def run_e2e(args: argparse.Namespace) -> int:
    """``mmcopy bench e2e``. Returns and raises as :func:`run_h2d`."""
    from mmcopy.tools.bench import e2e

    return _run_cases(args, functools.partial(e2e.run_e2e, num_threads=args.threads), e2e.e2e_table, e2e.e2e_notes)


def _run_cases(
    args: argparse.Namespace,
    measure: Callable[..., Any],
    table_of: Callable[[Any], Table],
    notes_of: Callable[[Any], str],
) -> int:
    from mmcopy.tools.bench.report import as_records

    cases = [*(Case(nbytes) for nbytes in args.sizes), *args.batches]
    if not cases:
        raise ConfigError("nothing to measure: --sizes and --batches are both none")
    result = _guarded(functools.partial(measure, cases, device=args.device, effort=_effort(args)))
    if result is None:
        return 1
    _print(args, result.header, table_of(result), notes_of(result), as_records(result.rows))
    return 0


def run_copy(args: argparse.Namespace) -> int:
    """``mmcopy bench copy``. Returns and raises as :func:`run_h2d`."""
    from mmcopy.tools.bench import machine, sweep

    if not args.sizes or not args.slots:
        raise ConfigError("nothing to measure: give at least one size with --sizes and one with --slots")
    threads = args.threads or thread_counts(machine.cores())
    options = {"device": args.device, "threads": threads, "slots": args.slots, "effort": _effort(args)}
    result = _guarded(functools.partial(sweep.run_sweep, args.sizes, **options))
    if result is None:
        return 1
    record = {"rows": [asdict(row) for row in result.rows], "best": asdict(result.best)}
    _print(args, result.header, sweep.sweep_table(result), sweep.sweep_notes(result), record)
    return 0


def run_tp(args: argparse.Namespace) -> int:
    """``mmcopy bench tp``. Returns 0, or 1 for wrong bytes; raises when it could not run."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("mmcopy bench tp needs torch: pip install 'mmcopy[torch]'") from error
    from mmcopy.tools.bench import ranks, tp
    from mmcopy.tools.bench.h2d import SHM_DIR
    from mmcopy.tools.bench.paths import free_bytes

    if not args.sizes:
        raise ConfigError("nothing to measure: give at least one size with --sizes")
    if args.device not in ("cpu", "cuda"):
        raise ConfigError(f"device is {args.device!r}, want 'cpu', or 'cuda': rank r takes cuda:r")
    if args.payload == "segment":  # where there is no room for an arena, its sender refuses
        check_space([Case(nbytes) for nbytes in args.sizes], free_bytes=free_bytes(SHM_DIR), shm_dir=SHM_DIR)
    spec = tp.TpSpec(tuple(sorted(args.sizes)), args.device, args.threads, _effort(args), payload=args.payload)
    try:
        if ranks.started_by_torchrun():
            result = ranks.run_as_rank(spec, ranks=args.ranks)
        else:
            gpus = torch.cuda.device_count() if args.device == "cuda" else 0
            wanted = args.ranks or (gpus if args.device == "cuda" else 2)
            if args.device == "cuda" and not 0 < wanted <= gpus:
                raise ConfigError(f"{wanted} ranks need as many GPUs, torch finds {gpus}")
            result = ranks.start_ranks(spec, wanted)
    except ranks.RanksFailedError as error:
        return error.code
    if result is not None:
        _print(args, result.header, tp.tp_table(result), tp.tp_notes(result), result.as_record())
    return 0


def _effort(args: argparse.Namespace) -> Effort:
    return Effort(repeats=args.repeats, seconds=args.seconds)


def _guarded(measure: Callable[..., T]) -> T | None:
    """``measure``, stopped only where nothing is left behind. None, and the reason on stderr, for wrong bytes."""
    from mmcopy.tools.bench.load import BytesDifferError
    from mmcopy.tools.bench.paths import LeftBehindError
    from mmcopy.tools.signals import Signals

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with Signals() as signals:
        try:
            return measure(poll=signals.check, say=say)
        except (BytesDifferError, LeftBehindError) as error:
            say(f"mmcopy bench: {error}")
            return None


def _print(args: argparse.Namespace, header: str, table: Table, notes: str, record: object) -> None:
    from mmcopy.tools.bench.table import print_table

    out = sys.stderr if args.json else sys.stdout
    print(header, end="\n\n", file=out)
    print_table(table, out)
    print(f"\n{notes}", file=out)
    if args.json:
        print(json.dumps(record))
