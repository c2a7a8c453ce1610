"""``mmcopy bench h2d``."""

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
    add_common(h2d)
    h2d.add_argument(
        "--sizes",
        type=argument(plan.parse_sizes),
        default=plan.DEFAULT_SIZES,
        metavar="SIZE,...",
        help="single tensors, or none. default: %(default)s",
    )
    h2d.add_argument(
        "--batches",
        type=argument(plan.parse_batches),
        default=plan.DEFAULT_BATCHES,
        metavar="NxSIZE,...",
        help="several tensors in one receive, or none. default: %(default)s",
    )
    h2d.add_argument(
        "--threads", type=argument(one_count), metavar="N", help="copy threads of the receiver. default: its own"
    )
    h2d.add_argument("--plot", type=Path, metavar="FILE.png", help="draw GB/s over size; needs matplotlib")
    h2d.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench h2d``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from mmcopy.bench import h2d, plot, table
    from mmcopy.bench.plan import Case
    from mmcopy.bench.report import as_records

    cases = [*(Case(nbytes) for nbytes in args.sizes), *args.batches]
    if not cases:
        raise ConfigError("nothing to measure: --sizes and --batches are both none")
    if args.plot is not None:
        plot.require_plot(args.plot, sizes=len(args.sizes))
    result = guarded(
        lambda **hooks: h2d.run_h2d(cases, device=args.device, num_threads=args.threads, effort=effort(args), **hooks)
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
