"""``mmcopy bench copy``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mmcopy.errors import ConfigError

from .options import add_common, argument, effort, guarded

__all__ = ["add_parser", "run"]


def add_parser(which: Any) -> None:
    """Add the benchmark to those of ``mmcopy bench``."""
    from mmcopy.tools.bench import plan

    copy = which.add_parser(
        "copy",
        help="try the receiver's threads and slot sizes, and say which are best here",
        description=(
            "Receive segments with receivers of every number of threads and every slot size, in turns, and print which "
            "setting is best over all the sizes (within 3 %, the one with the fewest threads). On the CPU there are "
            "no slots: only threads are tried."
        ),
    )
    add_common(copy)
    copy.add_argument(
        "--sizes",
        type=argument(plan.parse_sizes),
        default=plan.DEFAULT_SWEEP_SIZES,
        metavar="SIZE,...",
        help="default: %(default)s",
    )
    copy.add_argument(
        "--threads",
        type=argument(plan.parse_counts),
        metavar="N,...",
        help="numbers of copy threads to try. default: powers of two up to the cores, 3/4 of them, and all",
    )
    copy.add_argument(
        "--slots",
        type=argument(plan.parse_sizes),
        default=plan.DEFAULT_SLOTS,
        metavar="SIZE,...",
        help="slot sizes to try. default: %(default)s",
    )
    copy.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench copy``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from dataclasses import asdict

    from mmcopy.tools.bench import machine, plan, sweep, table

    threads = args.threads or plan.thread_counts(machine.cores())
    if not args.sizes or not args.slots:
        raise ConfigError("nothing to measure: give at least one size with --sizes and one with --slots")
    result = guarded(
        lambda **hooks: sweep.run_sweep(
            args.sizes, device=args.device, threads=threads, slots=args.slots, effort=effort(args), **hooks
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
