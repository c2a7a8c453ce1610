"""Tables: rich's on a terminal, aligned plain text where the output is piped or rich is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

__all__ = ["Table", "print_table"]


@dataclass
class Table:
    """Cells as text. The first ``left`` columns are left-aligned, the others are numbers."""

    columns: tuple[str, ...]
    left: int
    rows: list[tuple[str, ...]] = field(default_factory=list)
    strong: set[int] = field(default_factory=set)
    """Rows to highlight."""
    ends: set[int] = field(default_factory=set)
    """Rows after which a group ends."""

    def add(self, *cells: str, strong: bool = False) -> None:
        """Append a row."""
        if strong:
            self.strong.add(len(self.rows))
        self.rows.append(cells)

    def end_group(self) -> None:
        """End the group of the rows so far."""
        self.ends.add(len(self.rows) - 1)


def print_table(table: Table, stream: TextIO) -> None:
    """Write ``table``: with rich when ``stream`` is a terminal and rich is there, else :func:`as_text`."""
    if stream.isatty() and _print_rich(table, stream):
        return
    print(as_text(table), file=stream)


def as_text(table: Table) -> str:
    """Aligned columns without colour, one line per row, an empty line between groups."""
    widths = [max(len(row[i]) for row in [table.columns, *table.rows]) for i in range(len(table.columns))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if i < table.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    lines = [line(table.columns), "  ".join("-" * width for width in widths)]
    for number, row in enumerate(table.rows):
        lines.append(line(row))
        if number in table.ends and number != len(table.rows) - 1:
            lines.append("")
    return "\n".join(lines)


def _print_rich(table: Table, stream: TextIO) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for i, title in enumerate(table.columns):
        drawn.add_column(title, justify="left" if i < table.left else "right", no_wrap=True)
    for number, row in enumerate(table.rows):
        style = "bold green" if number in table.strong else ""
        drawn.add_row(*(Text(cell) for cell in row), style=style, end_section=number in table.ends)
    Console(file=stream, highlight=False).print(drawn)
    return True
