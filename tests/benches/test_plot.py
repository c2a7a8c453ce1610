"""The plot of ``mmcopy bench --json``, from rows that are made up and as a script."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benches" / "plot.py"


@pytest.fixture
def plot() -> Any:
    spec = importlib.util.spec_from_file_location("benches_plot", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(path: str, nbytes: int, gbps: float, count: int = 1) -> dict[str, Any]:
    return {"path": path, "nbytes": nbytes, "count": count, "gbps": gbps}


ROWS = [
    row("memcpy", 1 << 20, 5.0),
    row("lease", 1 << 20, 3.0),
    row("memcpy", 1 << 16, 4.0),
    row("lease", 1 << 16, 1.0),
    row("lease", 1 << 16, 9.0, count=8),
]


def test_it_has_one_labelled_line_per_path_over_a_logarithmic_size(plot: Any) -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw(ROWS, title="a machine")
    (axes,) = figure.axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()} == {
        "memcpy": ([1 << 16, 1 << 20], [4.0, 5.0]),
        "lease": ([1 << 16, 1 << 20], [1.0, 3.0]),
    }
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64 KiB", "1 MiB"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["memcpy", "lease"]
    assert lines["memcpy"].get_linestyle() != lines["lease"].get_linestyle()


def test_a_log_of_the_run_becomes_a_png(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    log, png = tmp_path / "h2d.log", tmp_path / "h2d.png"
    log.write_text(f"host memory (cpu)\n[1/2] 64 KiB: rounds 7\n{json.dumps(ROWS)}\n")
    subprocess.run([sys.executable, str(SCRIPT), str(log), str(png), "--title", "x"], check=True, timeout=120)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_file_without_rows_is_refused(plot: Any) -> None:
    with pytest.raises(ValueError, match="no line of"):
        plot.rows_of("[1/2] 64 KiB\n{}")
