"""``mmcopy doctor``: look at this machine and say what to do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mmcopy.tools.doctor import Line, Status, as_json, as_text, examine, exit_code
from mmcopy.tools.doctor.report import summary

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the command to an ``argparse`` sub-parser collection."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine: shared memory, limits, versions, GPUs",
        description=(
            "Check whether this machine can move tensors well. Each line is good, a warning or a problem, with what "
            "to do about it. Exit code 1 when there is a problem."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the lines and a summary as JSON")
    parser.add_argument(
        "--shm-dir", default="/dev/shm", metavar="DIR", help="the shared-memory folder to check (default: %(default)s)"
    )
    parser.add_argument(
        "--cuda", action="store_true", help="also start CUDA, in another process, and copy to every GPU"
    )
    parser.add_argument(
        "--worker",
        nargs="+",
        default=[],
        metavar="URL",
        help="also ask these workers (grpc://host:port) whether they can read segments made here and take an arena",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns the exit code: 1 when there is a problem."""
    lines = examine(shm_dir=args.shm_dir, start_cuda=args.cuda, workers=args.worker)
    if args.json:
        print(as_json(lines))
    elif not _print_table(lines):
        print(as_text(lines))
    return exit_code(lines)


def _print_table(lines: Sequence[Line]) -> bool:
    """Print the report as a coloured table; False, and nothing printed, where rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    colours = {Status.GOOD: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "check", "found, and what to do"):
        table.add_column(title, overflow="fold", no_wrap=title == "check")
    for line in lines:
        found = Text(line.found)
        if line.advice:
            found.append(f"\n-> {line.advice}", style=colours[line.status])
        table.add_row(Text(line.status.value, style=colours[line.status]), line.name, found)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    console.print(summary(lines))
    return True
