"""Panels of lines. `matplotlib` is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_semspec.bench.pictures import STYLE

# Okabe and Ito's palette, told apart in grey print too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56b4e9", "#000000")
MARKERS = "os^DPXv"


def plot_lines(
    panels: Sequence[Mapping[str, Any]], path: str | Path, title: str = "", *, columns: int | None = None
) -> None:
    """Panels of lines.

    Args:
        panels (`Sequence[Mapping[str, Any]]`): `title`, `x` and `y` (labels), `lines` (name -> list of (x, y)), and
            `log` (whether both axes double).
        path (`str` or `Path`): the picture's file; its ending chooses the format.
        title (`str`, *optional*): what was measured.
        columns (`int`, *optional*): panels a row; all in one by default.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    columns = columns or max(len(panels), 1)
    rows = -(-max(len(panels), 1) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns, 2.7 * rows + 0.3), layout="constrained")
        figure.suptitle(title, fontsize=9, color="0.3", x=0.01, ha="left")
        grid = figure.subplots(rows, columns, squeeze=False)
        names = list(dict.fromkeys(name for panel in panels for name in panel["lines"]))
        shown: dict[str, Any] = {}
        for index, panel in enumerate(panels):
            axes = grid[index // columns][index % columns]
            for name, line in panel["lines"].items():
                i = names.index(name) % len(COLORS)
                x, y = zip(*sorted(line), strict=True)
                (shown[name],) = axes.plot(x, y, MARKERS[i] + "-", color=COLORS[i], markersize=4, linewidth=1)
            if panel.get("log", False):
                axes.set_xscale("log", base=2)
                axes.set_yscale("log", base=2)
                for axis in (axes.xaxis, axes.yaxis):
                    axis.set_major_formatter(FormatStrFormatter("%g"))
                    axis.set_minor_formatter(NullFormatter())
            else:
                axes.set_ylim(bottom=0)
            axes.set_xlabel(panel["x"])
            axes.set_ylabel(panel["y"])
            axes.set_title(panel["title"], loc="left")
        figure.legend(
            [shown[name] for name in names],
            names,
            loc="outside lower center",
            ncols=4,
            fontsize=7,
            frameon=False,
        )
        figure.savefig(path)
