"""``mmcopy bench e2e``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mmcopy.errors import ConfigError

from .options import add_common, argument, effort, guarded, one_count

__all__ = ["add_parser", "run"]


def add_parser(which: Any) -> None:
    """Add the benchmark to those of ``mmcopy bench``."""
    from mmcopy.bench import plan

    e2e = which.add_parser(
        "e2e",
        help="from one process's array to another's device",
        description=(
            "Send from this process and receive in another, every path in turns: mmcopy's, and plain code "
            "(shared_memory_staged: SharedMemory filled by numpy, received as in h2d; inline: the bytes through a "
            "local socket). Exit codes as for h2d."
        ),
    )
    add_common(e2e)
    e2e.add_argument(
        "--sizes",
        type=argument(plan.parse_sizes),
        default=plan.DEFAULT_SIZES,
        metavar="SIZE,...",
        help="single tensors, or none. default: %(default)s",
    )
    e2e.add_argument(
        "--batches",
        type=argument(plan.parse_batches),
        default=plan.DEFAULT_BATCHES,
        metavar="NxSIZE,...",
        help="several tensors in one receive, or none. default: %(default)s",
    )
    e2e.add_argument(
        "--threads", type=argument(one_count), metavar="N", help="copy threads of either side. default: their own"
    )
    e2e.add_argument("--plot", type=Path, metavar="FILE.png", help="draw GB/s over size; needs matplotlib")
    e2e.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench e2e``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from dataclasses import asdict

    from mmcopy.bench import e2e, plot, table
    from mmcopy.bench.plan import Case

    cases = [*(Case(nbytes) for nbytes in args.sizes), *args.batches]
    if not cases:
        raise ConfigError("nothing to measure: --sizes and --batches are both none")
    if args.plot is not None:
        plot.require_plot(args.plot, sizes=len(args.sizes))
    result = guarded(
        lambda **hooks: e2e.run_e2e(cases, device=args.device, num_threads=args.threads, effort=effort(args), **hooks)
    )
    if result is None:
        return 1
    out = sys.stderr if args.json else sys.stdout
    print(result.header, end="\n\n", file=out)
    table.print_table(e2e.e2e_table(result), out)
    print(f"\n{e2e.e2e_notes(result)}", file=out)
    if args.plot is not None:
        plot.save_plot(plot.draw(result.rows, title=result.header, limit=result.limit), args.plot)
        print(f"plot: {args.plot}", file=out)
    if args.json:
        print(json.dumps([asdict(row) for row in result.rows]))
    return 0
