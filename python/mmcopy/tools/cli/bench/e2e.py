"""``mmcopy bench e2e``."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from .cases import add_cases, run_cases
from .options import effort

__all__ = ["add_parser", "run"]


def add_parser(which: Any) -> None:
    """Add the benchmark to those of ``mmcopy bench``."""
    e2e = which.add_parser(
        "e2e",
        help="from one process's array to another's device",
        description=(
            "Send from this process and receive in another, every path in turns: mmcopy's, and plain code "
            "(shared_memory_staged: SharedMemory filled by numpy, received as in h2d; inline: the bytes through a "
            "local socket). Exit codes as for h2d."
        ),
    )
    add_cases(e2e, threads_help="copy threads of either side. default: their own")
    e2e.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench e2e``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from mmcopy.tools.bench.e2e import e2e_notes, e2e_table, run_e2e

    options = {"device": args.device, "num_threads": args.threads, "effort": effort(args)}
    return run_cases(args, functools.partial(run_e2e, **options), e2e_table, e2e_notes)
