"""``mmcopy bench``: how fast this machine receives, and with which settings it does so fastest. One file a benchmark.

Light to import: what a benchmark needs is imported when it runs.
"""

from __future__ import annotations

from typing import Any

from . import copy, e2e, h2d, tp

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    parser = subparsers.add_parser(
        "bench",
        help="measure receiving on this machine against its limit and against plain code",
        description="Measure receiving on this machine. Every path's bytes are checked before anything is timed.",
    )
    which = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for benchmark in (h2d, e2e, copy, tp):
        benchmark.add_parser(which)
