"""What a run gave, as a table that people read and as one line that programs read."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from mmcopy.errors import MissingDependencyError
from mmcopy.tools.units import bytes_text, time_text

from .checks import Row
from .job import ROLES, Job, Outcome
from .pictures import Attachments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console_for", "json_line", "print_report"]

PIPED_WIDTH = 120
GATEWAYS = {"smg": "SMG gateway", "mmcopy": "mmcopy gateway"}
PATHS = {"lease": "by lease", "segment": "by segment", "inline": "inline"}


def json_line(outcome: Outcome) -> str:
    """One JSON object in one line."""
    return json.dumps(
        {
            "requests": len(outcome.sent),
            "tensors": len(outcome.rows),
            "mismatches": outcome.mismatches,
            "paths": {path: outcome.count_by(path) for path in outcome.paths},
            "leftover_segments": len(outcome.leftovers),
            "device": outcome.device,
        }
    )


def console_for(stream: TextIO) -> Console:
    """A rich console; wide enough for the table, and without colours, where ``stream`` is not a terminal."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError("rich is not installed: pip install 'mmcopy[demo]'") from error
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def print_report(console: Console, job: Job, outcome: Outcome) -> None:
    """The table, what went wrong, what was left in shared memory, and the verdict."""
    console.print(_table(job, outcome, roomy=console.width >= 100))
    console.print()
    console.print(_totals(outcome))
    for row in outcome.rows:
        if row.error:
            what = _plain(f"request {row.request}, {row.role}, {row.tensor}: {row.error}")
            console.print(f"[bold red]mismatch[/] {what}")
    for error in outcome.errors:
        console.print(f"[bold red]failure[/] {_plain(error)}")
    if any("SegmentNotFoundError" in error for error in outcome.errors) and _legs_share_segments(job):
        console.print(
            "[yellow]note[/] with pd and epd SMG gives both legs the same segment for a side tensor of --shm-min-bytes "
            "or more, and the first of them to read it removes it: choose a threshold above the side tensors' size"
        )
    for note in outcome.notes:
        console.print(f"[yellow]note[/] {_plain(note)}")
    if outcome.leftovers:
        total = sum(leftover.nbytes for leftover in outcome.leftovers)
        console.print(
            f"[bold red]left in shared memory[/] {len(outcome.leftovers)} segments, {bytes_text(total)} (removed now):"
        )
        for leftover in outcome.leftovers:
            console.print(f"  {_plain(leftover.name)}  {bytes_text(leftover.nbytes)}")
    else:
        console.print("left in shared memory: nothing")
    good = "[bold green]everything arrived, and every byte is right[/]"
    console.print(good if outcome.good else "[bold red]this run failed[/]")


def _legs_share_segments(job: Job) -> bool:
    return job.engine == "tokenspeed" and job.topology != "regular" and job.shm_min_bytes is not None


def _table(job: Job, outcome: Outcome, *, roomy: bool) -> Table:
    from rich import box
    from rich.table import Table

    several = len(ROLES[job.topology]) > 1
    who = f"{job.engine} worker{'s' * several} ({job.topology})"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{job.family.name}: {GATEWAYS[job.gateway]} -> {who} on {outcome.device}",
        caption=_caption(job),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
        padding=(0, int(roomy)),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("tensor", overflow="fold", min_width=23)
    table.add_column("dtype", no_wrap=True, min_width=8)
    table.add_column("shape", overflow="fold", min_width=10)
    table.add_column("path", no_wrap=True, min_width=7)
    table.add_column("bytes", justify="right", no_wrap=True, min_width=9)
    table.add_column("time", justify="right", no_wrap=True, min_width=8)
    table.add_column("check", no_wrap=True, min_width=8)
    attachments = {sent.number: sent.attached for sent in outcome.sent}
    for (number, role), rows in groupby(outcome.rows, key=lambda row: (row.request, row.role)):
        where = f", {role}" if several else ""
        table.add_row(f"[bold]request {number}{where}:[/][dim] {_plain(_summary(attachments[number]))}[/]")
        for row in rows:
            table.add_row(*_cells(row))
        table.add_section()
    return table


def _summary(attached: Attachments) -> str:
    names = [picture.name for picture in attached.pictures] + ["video"] * len(attached.videos)
    return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""


def _cells(row: Row) -> list[str]:
    return [
        _plain(row.tensor),
        row.dtype,
        "x".join(map(str, row.shape)) or "scalar",
        "inline" if row.path == "inline" else f"[green]{row.path}[/]",
        bytes_text(row.nbytes),
        time_text(row.seconds),
        f"[bold red]{row.check}: wrong[/]" if row.error else f"[green]{row.check}[/]",
    ]


def _totals(outcome: Outcome) -> str:
    rows = outcome.rows
    nbytes, seconds = sum(row.nbytes for row in rows), sum(row.seconds for row in rows)
    speed = f", {nbytes / seconds / 1e9:.2f} GB/s" if seconds and nbytes else ""
    ways = ", ".join(
        f"{outcome.count_by(path)} {words} ({bytes_text(outcome.bytes_by(path))})"
        for path, words in PATHS.items()
        if path in outcome.paths
    )
    return (
        f"{len(rows)} tensors in {len(outcome.sent)} requests: {ways}; received in {time_text(seconds)}{speed}; "
        f"{len(rows) - outcome.mismatches} of {len(rows)} right"
    )


def _caption(job: Job) -> str:
    kind = "numpy arrays" if job.framework == "numpy" else "torch tensors"
    return (
        f"received as {kind}. check: numpy = recomputed from the picture; checksum = the payload read independently, "
        "before. time: one tensor's receive, to the end of its last copy."
    )


def _plain(text: str) -> str:
    """Text from elsewhere, with nothing of it taken for rich's markup."""
    from rich.markup import escape

    return escape(text)
