"""From seconds to figures: median, spread, GB/s and ratios. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from .paths import Role
from .plan import Case
from .table import Table

__all__ = ["Row", "as_records", "case_table", "median_and_iqr", "rows_of"]

R = TypeVar("R", bound="Row")


class Named(Protocol):
    """A path, as what it is compared."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Role: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One path of one case. Its fields are the keys of the JSON output."""

    path: str
    nbytes: int
    """Bytes of one tensor."""
    count: int
    """Tensors per receive."""
    median_s: float
    iqr_s: float
    """Third quartile less the first."""
    gbps: float
    """1e9 bytes a second: nbytes * count / median_s / 1e9."""
    of_limit: float
    """gbps over that of the limit."""
    versus: float | None
    """gbps over that of the best baseline: 2.0 is twice as fast. None where none was measured."""

    @property
    def versus_text(self) -> str:
        return "-" if self.versus is None else f"{self.versus:.2f}x"


def median_and_iqr(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and the third quartile less the first (0 for one value)."""
    if len(seconds) < 2:
        return seconds[0], 0.0
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, third - first


def rows_of(case: Case, paths: Sequence[Named], seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The case's rows in the order of ``paths``, which hold one limit."""
    timed = {path.name: median_and_iqr(seconds[path.name]) for path in paths}
    gbps = {name: case.total_bytes / median / 1e9 for name, (median, _) in timed.items()}
    limit = next(gbps[path.name] for path in paths if path.role is Role.LIMIT)
    best = max((gbps[path.name] for path in paths if path.role is Role.BASELINE), default=None)
    return [
        Row(
            path=name,
            nbytes=case.nbytes,
            count=case.count,
            median_s=median,
            iqr_s=iqr,
            gbps=gbps[name],
            of_limit=gbps[name] / limit,
            versus=None if best is None else gbps[name] / best,
        )
        for name, (median, iqr) in timed.items()
    ]


def case_table(
    columns: tuple[str, ...], rows: Sequence[R], cells: Callable[[R], Sequence[str]], roles: Mapping[str, Role]
) -> Table:
    """One group per case, one row per path: the case, the path, and ``cells``."""
    table = Table(("tensors", "path", *columns), left=2)
    before: Case | None = None
    for row in rows:
        case = Case(row.nbytes, row.count)
        if before is not None and case != before:
            table.end_group()
        label = "" if case == before else case.label
        table.add(label, row.path, *cells(row), strong=roles[row.path] is Role.OURS)
        before = case
    return table


def as_records(rows: Sequence[Row]) -> list[dict[str, str | int | float]]:
    """What ``--json`` prints."""
    return [asdict(row) for row in rows]
