"""``mmcopy bench``: how fast this machine receives, and with which settings it does so fastest.

Light to import: what a benchmark needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mmcopy.errors import ConfigError, MmcopyError

__all__ = ["add_parser", "run"]

T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    from mmcopy.bench import plan

    from . import bench_tp

    parser = subparsers.add_parser(
        "bench",
        help="measure receiving on this machine against its limit and against plain code",
        description="Measure receiving on this machine. Every path's bytes are checked before anything is timed.",
    )
    which = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    h2d = which.add_parser(
        "h2d",
        help="segments to the device, beside the limit and baselines",
        description=(
            "Receive segments that were not seen before, and run beside it, in one process and in turns: the limit "
            "(one copy out of memory that is pinned and filled already; on the CPU, a memcpy) and plain code "
            "(shared_memory_staged: SharedMemory, a pinned staging buffer, an asynchronous copy, unlink; pageable: "
            "the mapping straight to the GPU; inline: bytes in the message). Exit code 1 when a path delivers wrong "
            "bytes or leaves a segment behind; 2 when it could not run."
        ),
    )
    _add_common(h2d)
    h2d.add_argument(
        "--sizes",
        type=_argument(plan.parse_sizes),
        default=plan.DEFAULT_SIZES,
        metavar="SIZE,...",
        help="single tensors, or none. default: %(default)s",
    )
    h2d.add_argument(
        "--batches",
        type=_argument(plan.parse_batches),
        default=plan.DEFAULT_BATCHES,
        metavar="NxSIZE,...",
        help="several tensors in one receive, or none. default: %(default)s",
    )
    h2d.add_argument(
        "--threads", type=_argument(_one_count), metavar="N", help="copy threads of the receiver. default: its own"
    )
    h2d.add_argument("--plot", type=Path, metavar="FILE.png", help="draw GB/s over size; needs matplotlib")
    copy = which.add_parser(
        "copy",
        help="try the receiver's threads and slot sizes, and say which are best here",
        description=(
            "Receive segments with receivers of every number of threads and every slot size, in turns, and print which "
            "setting is best over all the sizes (within 3 %, the one with the fewest threads). On the CPU there are "
            "no slots: only threads are tried."
        ),
    )
    _add_common(copy)
    copy.add_argument(
        "--sizes",
        type=_argument(plan.parse_sizes),
        default=plan.DEFAULT_SWEEP_SIZES,
        metavar="SIZE,...",
        help="default: %(default)s",
    )
    copy.add_argument(
        "--threads",
        type=_argument(plan.parse_counts),
        metavar="N,...",
        help="numbers of copy threads to try. default: powers of two up to the cores, 3/4 of them, and all",
    )
    copy.add_argument(
        "--slots",
        type=_argument(plan.parse_sizes),
        default=plan.DEFAULT_SLOTS,
        metavar="SIZE,...",
        help="slot sizes to try. default: %(default)s",
    )
    tp = which.add_parser("tp", help="the strategies of a group of ranks", description=bench_tp.DESCRIPTION)
    _add_common(tp, device_help="cpu, or cuda: rank r takes cuda:r of its host")
    tp.add_argument(
        "--ranks", type=_argument(_one_count), metavar="N", help="ranks to start here. default: 2, or one a GPU"
    )
    tp.add_argument(
        "--sizes",
        type=_argument(plan.parse_sizes),
        default=bench_tp.DEFAULT_SIZES,
        metavar="SIZE,...",
        help="default: %(default)s",
    )
    tp.add_argument(
        "--threads",
        type=_argument(_one_count),
        metavar="N",
        help="copy threads of each rank. default: a receiver's own",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line names; its exit code."""
    if args.benchmark == "tp":
        from .bench_tp import run_tp_command

        return run_tp_command(args, _effort(args))
    return {"h2d": run_h2d_command, "copy": run_copy_command}[args.benchmark](args)


def run_h2d_command(args: argparse.Namespace) -> int:
    """``mmcopy bench h2d``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from mmcopy.bench import h2d, plot, table
    from mmcopy.bench.plan import Case
    from mmcopy.bench.report import as_records

    cases = [*(Case(nbytes) for nbytes in args.sizes), *args.batches]
    if not cases:
        raise ConfigError("nothing to measure: --sizes and --batches are both none")
    if args.plot is not None:
        plot.require_plot(args.plot, sizes=len(args.sizes))
    result = _guarded(
        lambda **hooks: h2d.run_h2d(cases, device=args.device, num_threads=args.threads, effort=_effort(args), **hooks)
    )
    if result is None:
        return 1
    out = sys.stderr if args.json else sys.stdout
    print(result.header, end="\n\n", file=out)
    table.print_table(h2d.h2d_table(result), out)
    print(f"\n{h2d.h2d_notes(result)}", file=out)
    if args.plot is not None:
        plot.save_plot(plot.draw(result.rows, title=result.header, limit=result.limit), args.plot)
        print(f"plot: {args.plot}", file=out)
    if args.json:
        print(json.dumps(as_records(result.rows)))
    return 0


def run_copy_command(args: argparse.Namespace) -> int:
    """``mmcopy bench copy``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from dataclasses import asdict

    from mmcopy.bench import machine, plan, sweep, table

    threads = args.threads or plan.thread_counts(machine.cores())
    if not args.sizes or not args.slots:
        raise ConfigError("nothing to measure: give at least one size with --sizes and one with --slots")
    result = _guarded(
        lambda **hooks: sweep.run_sweep(
            args.sizes, device=args.device, threads=threads, slots=args.slots, effort=_effort(args), **hooks
        )
    )
    if result is None:
        return 1
    out = sys.stderr if args.json else sys.stdout
    print(result.header, end="\n\n", file=out)
    table.print_table(sweep.sweep_table(result), out)
    print("\nColumns of sizes: GB/s, 1e9 bytes a second, median of the rounds.", file=out)
    print("score: speed over the size's best, geometric mean over the sizes.", file=out)
    print(f"best here: {sweep.advice(result.best)}", file=out)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in result.rows], "best": asdict(result.best)}))
    return 0


def _guarded(measure: Callable[..., T]) -> T | None:
    """``measure``, stopped only where nothing is left behind. None, and the reason on stderr, for wrong bytes."""
    from mmcopy.bench.load import BytesDifferError
    from mmcopy.bench.paths import LeftBehindError
    from mmcopy.demo.signals import Signals

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with Signals() as signals:
        try:
            return measure(poll=signals.check, say=say)
        except (BytesDifferError, LeftBehindError) as error:
            say(f"mmcopy bench: {error}")
            return None


def _add_common(parser: argparse.ArgumentParser, *, device_help: str = "cpu or cuda:N, where the tensors go") -> None:
    parser.add_argument("--device", default="cpu", help=f"{device_help}. default: %(default)s")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--repeats", type=_argument(_one_count), metavar="N", help="rounds a case")
    effort.add_argument(
        "--seconds",
        type=_argument(_seconds),
        default=2.0,
        metavar="S",
        help="as many rounds a case as fit, 7 at least. default: %(default)s",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line on stdout at the end; the table goes to stderr"
    )


def _effort(args: argparse.Namespace) -> Any:
    from mmcopy.bench.plan import Effort

    return Effort(repeats=args.repeats, seconds=args.seconds)


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as argparse wants it: its message, and not its name, reaches the user."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except MmcopyError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _one_count(text: str) -> int:
    from mmcopy.bench.plan import parse_counts

    counts = parse_counts(text)
    if len(counts) != 1:
        raise ConfigError(f"{text!r}: want one whole number")
    return counts[0]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 3600:
        raise ConfigError(f"{text!r}: want a number of seconds, more than 0 and at most 3600")
    return value
