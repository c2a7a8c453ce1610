"""What the benchmarks that measure cases (single tensors and batches, beside a limit and baselines) share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmcopy.errors import ConfigError

from .options import add_common, argument, guarded, one_count

if TYPE_CHECKING:
    from mmcopy.tools.bench.plan import Case
    from mmcopy.tools.bench.report import Row
    from mmcopy.tools.bench.table import Table

__all__ = ["CaseResult", "add_cases", "run_cases"]


class CaseResult(Protocol):
    """What was measured, on what."""

    @property
    def header(self) -> str: ...

    @property
    def limit(self) -> str: ...

    @property
    def rows(self) -> Sequence[Row]: ...


def add_cases(parser: argparse.ArgumentParser, *, threads_help: str) -> None:
    """The common options, --sizes, --batches, --threads and --plot."""
    from mmcopy.tools.bench import plan

    add_common(parser)
    parser.add_argument(
        "--sizes",
        type=argument(plan.parse_sizes),
        default=plan.DEFAULT_SIZES,
        metavar="SIZE,...",
        help="single tensors, or none. default: %(default)s",
    )
    parser.add_argument(
        "--batches",
        type=argument(plan.parse_batches),
        default=plan.DEFAULT_BATCHES,
        metavar="NxSIZE,...",
        help="several tensors in one receive, or none. default: %(default)s",
    )
    parser.add_argument("--threads", type=argument(one_count), metavar="N", help=threads_help)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw GB/s over size; needs matplotlib")


def run_cases(
    args: argparse.Namespace,
    measure: Callable[..., CaseResult],
    table_of: Callable[[Any], Table],
    notes_of: Callable[[Any], str],
) -> int:
    """Measure the cases and print what came of it. Returns 0, or 1 for wrong or left-over bytes."""
    from mmcopy.tools.bench import plot, table
    from mmcopy.tools.bench.plan import Case
    from mmcopy.tools.bench.report import as_records

    cases: list[Case] = [*(Case(nbytes) for nbytes in args.sizes), *args.batches]
    if not cases:
        raise ConfigError("nothing to measure: --sizes and --batches are both none")
    if args.plot is not None:
        plot.require_plot(args.plot, sizes=len(args.sizes))
    result = guarded(lambda **hooks: measure(cases, **hooks))
    if result is None:
        return 1
    out = sys.stderr if args.json else sys.stdout
    print(result.header, end="\n\n", file=out)
    table.print_table(table_of(result), out)
    print(f"\n{notes_of(result)}", file=out)
    if args.plot is not None:
        plot.save_plot(plot.draw(result.rows, title=result.header, limit=result.limit), args.plot)
        print(f"plot: {args.plot}", file=out)
    if args.json:
        print(json.dumps(as_records(result.rows)))
    return 0
