"""Figures and tables, from times that are made up."""

from __future__ import annotations

import io
import sys

import pytest

from mmcopy.tools.bench.paths import Path, Role
from mmcopy.tools.bench.plan import Case
from mmcopy.tools.bench.report import as_records, median_and_iqr, rows_of
from mmcopy.tools.bench.table import Table, as_text, print_table


def path(name: str, role: Role) -> Path:
    return Path(name, role, lambda: None, lambda message: [])


PATHS = [
    path("limit", Role.LIMIT),
    path("ours", Role.OURS),
    path("slow", Role.BASELINE),
    path("slower", Role.BASELINE),
]
SECONDS = {"limit": [0.001, 0.001, 0.001], "ours": [0.0019, 0.002, 0.0021], "slow": [0.004], "slower": [0.008, 0.008]}


def test_ratios_are_to_the_limit_and_to_the_best_baseline() -> None:
    rows = rows_of(Case(500_000, 2), PATHS, SECONDS)
    assert [row.path for row in rows] == ["limit", "ours", "slow", "slower"]
    assert {(row.nbytes, row.count) for row in rows} == {(500_000, 2)}
    assert [row.gbps for row in rows] == pytest.approx([1.0, 0.5, 0.25, 0.125])
    assert [row.of_limit for row in rows] == pytest.approx([1.0, 0.5, 0.25, 0.125])
    assert [row.versus for row in rows] == pytest.approx([4.0, 2.0, 1.0, 0.5])
    assert [row.iqr_s for row in rows] == pytest.approx([0.0, 0.0001, 0.0, 0.0])
    assert list(as_records(rows)[0]) == [
        "path", "nbytes", "count", "median_s", "iqr_s", "gbps", "of_limit", "versus"
    ]  # fmt: skip


def test_median_and_spread_ignore_the_order() -> None:
    assert median_and_iqr([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0)
    assert median_and_iqr([7.0]) == (7.0, 0.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def table() -> Table:
    table = Table(("path", "GB/s"), left=1)
    table.add("a", "10.00")
    table.end_group()
    table.add("long", "2.00", strong=True)
    return table


def test_a_piped_table_is_plain_text(table: Table) -> None:
    stream = io.StringIO()
    print_table(table, stream)
    assert stream.getvalue() == "path   GB/s\n----  -----\na     10.00\n\nlong   2.00\n"


def test_a_terminal_gets_a_table_of_richs_and_plain_text_without_rich(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    print_table(table, stream)
    for cell in ("path", "GB/s", "a", "10.00", "long", "2.00"):
        assert cell in stream.getvalue()
    assert "─" in stream.getvalue()
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    print_table(table, stream)
    assert stream.getvalue() == as_text(table) + "\n"
