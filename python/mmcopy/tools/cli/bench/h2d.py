"""``mmcopy bench h2d``."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from .cases import add_cases, run_cases
from .options import effort

__all__ = ["add_parser", "run"]


def add_parser(which: Any) -> None:
    """Add the benchmark to those of ``mmcopy bench``."""
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
    add_cases(h2d, threads_help="copy threads of the receiver. default: its own")
    h2d.add_argument(
        "--no-baselines",
        dest="with_baselines",
        action="store_false",
        help="leave out plain code, which takes most of the time at large sizes",
    )
    h2d.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """``mmcopy bench h2d``. Returns 0, or 1 for wrong or left-over bytes; raises when it could not run."""
    from mmcopy.tools.bench.h2d import h2d_notes, h2d_table, run_h2d

    options = {
        "device": args.device,
        "num_threads": args.threads,
        "effort": effort(args),
        "with_baselines": args.with_baselines,
    }
    return run_cases(args, functools.partial(run_h2d, **options), h2d_table, h2d_notes)
