"""GB/s over size, one line per path, as a PNG; needs matplotlib.

    mmcopy bench h2d --json > h2d.json && python benches/plot.py h2d.json h2d.png [--title TEXT]

Takes the last line of the file that is a JSON list, so a log of the run will do. Batches are left out, and the limit is
dashed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcopy.tools.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = ("memcpy", "pinned_h2d")


def rows_of(text: str) -> list[dict[str, Any]]:
    """What ``mmcopy bench h2d --json`` or ``e2e --json`` has printed. ValueError without such a line."""
    lines = [line for line in text.splitlines() if line.startswith("[{")]
    if not lines:
        raise ValueError("no line of `mmcopy bench h2d --json` or `e2e --json`")
    rows: list[dict[str, Any]] = json.loads(lines[-1])
    return rows


def draw(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """A figure of the rows that are no batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    single = [row for row in rows if row["count"] == 1]
    sizes = sorted({row["nbytes"] for row in single})
    for path in dict.fromkeys(row["path"] for row in rows):
        points = sorted((row["nbytes"], row["gbps"]) for row in single if row["path"] == path)
        x, y = [nbytes for nbytes, _ in points], [gbps for _, gbps in points]
        axes.plot(x, y, marker="o", label=path, linestyle="--" if path in LIMITS else "-")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [bytes_text(nbytes) for nbytes in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of one tensor")
    axes.set_ylabel("GB/s (1e9 bytes a second, median)")
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    draw(rows_of(args.file.read_text()), title=args.title).savefig(args.png, format="png", dpi=130)
