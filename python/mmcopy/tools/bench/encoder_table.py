"""Measurements of :mod:`mmcopy.tools.bench.encoder` as tables, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcopy.tools.units import time_text

from .table import Table

__all__ = ["COLUMNS", "as_markdown", "encoder_table", "notes"]

COLUMNS = ("shape", "prewarm", "first after", "steady (IQR)", "first / steady", "graphs", "forecast")


def encoder_table(warm: dict[str, Any], cold: dict[str, Any] | None) -> Table:
    """One row per shape: cold, what the prewarm took for it, the first encode after, the steady state."""
    columns = (COLUMNS[0], *(("cold",) if cold is not None else ()), *COLUMNS[1:])
    table = Table(columns, left=1)
    first = {} if cold is None else {row["shape"]: row["first_s"] for row in cold["rows"]}
    spent = {each["shape"]: each["seconds"] for each in warm["report"]["shapes"]}
    for row in warm["rows"]:
        cells = [row["shape"]]
        if cold is not None:
            cells.append(time_text(first[row["shape"]]) if row["shape"] in first else "-")
        cells += [
            time_text(spent[row["shape"]]) if row["warmed"] else "not used",
            time_text(row["first_s"]),
            f"{time_text(row['steady_s'])} ({time_text(row['steady_iqr_s'])})",
            f"{row['ratio']:.2f}",
            str(row["graphs"]),
            ", ".join(word for word in ("compiles", "plans") if row.get(f"forecast_{word}")) or "-",
        ]
        table.add(*cells)
    return table


def notes(warm: dict[str, Any]) -> list[str]:
    """What the table does not say."""
    about, report, spec = warm["about"], warm["report"], warm["spec"]
    mode = "eager" if spec["compile"] == "none" else f"torch.compile of the {spec['compile']} ({spec['backend']})"
    reason = f", {report['reason']}," if report["reason"] else ""
    lines = [
        f"{about['model_type']}, {about['encoder_parameters'] / 1e6:.0f} M parameters, weights: {about['weights']}, "
        f"{spec['dtype']}, {mode}, attention {report['attention'] or 'unknown'} (cuDNN's {_cudnn(warm)}), "
        f"transformers {about['transformers']}",
        about["machine"],
        f"prewarm: {report['status']}{reason} in {time_text(report['seconds'])} "
        f"(transport {time_text(report['transport_seconds'])}), {report['graphs']} graphs compiled"
        + (
            ""
            if report["peak_bytes"] is None
            else f", peak {report['peak_bytes'] / 2**20:.0f} MiB, retained {report['retained_bytes'] / 2**20:.0f} MiB, "
            f"kept for reuse {report['reserved_bytes'] / 2**20:.0f} MiB"
        ),
    ]
    lines.append("steady: the same shape again and again, right behind its first encode")
    return [*lines, *report["warnings"], *report["outlooks"]]


def _cudnn(warm: dict[str, Any]) -> str:
    """What became of cuDNN's attention; an encoder of several modalities has it when one of them has."""
    if not warm["spec"]["cudnn_attention"]:
        return "off"
    answers = set(warm["report"]["cudnn_attention"].values())
    if True in answers:
        return "taken"
    return "not taken" if answers == {False} else "unknown"


def as_markdown(warm: dict[str, Any], cold: dict[str, Any] | None) -> str:
    """Notes and table for benches/RESULTS.md."""
    table = encoder_table(warm, cold)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rows = [line(table.columns), line(["---"] * len(table.columns)), *map(line, table.rows)]
    return "\n".join([*(f"- {note}" for note in notes(warm)), "", *rows, ""])
