"""GB/s over size, one line a path, as a PNG. matplotlib is imported here alone, and only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmcopy.errors import ConfigError, MissingDependencyError
from mmcopy.tools.doctor.line import bytes_text

from .report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "require_plot", "save_plot"]


def require_plot(file: Path, *, sizes: int) -> None:
    """Raise now what would go wrong after minutes of measuring: :class:`MissingDependencyError` without matplotlib,
    :class:`ConfigError` for a file that can't be written, and without at least one size that is no batch."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("--plot needs matplotlib: pip install matplotlib") from error
    if sizes == 0:
        raise ConfigError("--plot draws GB/s over size: give at least one size with --sizes")
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--plot {file}: want a name that ends in .png")
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: {'it is a folder' if file.is_dir() else f'no folder {file.parent}'}")


def draw(rows: Sequence[Row], *, title: str, limit: str) -> Figure:
    """A figure of the rows that are no batches; the path called ``limit`` is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    sizes = sorted({row.nbytes for row in rows if row.count == 1})
    for path in dict.fromkeys(row.path for row in rows):
        points = sorted((row.nbytes, row.gbps) for row in rows if row.path == path and row.count == 1)
        x, y = [nbytes for nbytes, _ in points], [gbps for _, gbps in points]
        axes.plot(x, y, marker="o", label=path, linestyle="--" if path == limit else "-")
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


def save_plot(figure: Figure, file: Path) -> None:
    """Write ``figure`` as a PNG. Raises :class:`ConfigError` when the file can't be written."""
    try:
        figure.savefig(file, format="png", dpi=130)
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror or error}") from error
