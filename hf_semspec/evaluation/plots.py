"""Pictures of a report: quality against speed, and heat maps of a grid. `matplotlib` is imported where it is used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Colour and marker by kind, told apart in grey print too (Okabe and Ito's palette).
_LOOKS = {
    "target": ("#000000", "s"),
    "draft": ("#7f7f7f", "v"),
    "lossless": ("#0072b2", "o"),
    "easd": ("#d55e00", "^"),
    "parse": ("#009e73", "D"),
    "smc": ("#cc79a7", "P"),
    "semantic": ("#661100", "*"),
    "assisted": ("#a6761d", "X"),
    "best_of": ("#56b4e9", "<"),
    "majority": ("#b8860b", ">"),
}
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}
_LABEL_SIZE, _LONGEST_LABEL = 7.5, 44
# Where a label may stand beside its point, in points: nearest first.
_PLACES: list[tuple[float, float, str]] = [
    (x * distance, y * distance, side)
    for distance in (1.0, 1.6, 2.4, 3.4, 4.6)
    for x, y, side in (
        (6, 5, "left"),
        (6, -11, "left"),
        (-6, 5, "right"),
        (-6, -11, "right"),
        (0, 10, "center"),
        (0, -17, "center"),
    )
]


def plot_quality(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Accuracy over the speed ratio to the target, a labelled point for each row, 95 % intervals as bars.

    Args:
        rows (`Sequence[Mapping[str, Any]]`): of [`summarize`]; those without a speed ratio are left out.
        path (`str` or `Path`): the picture's file; its ending chooses the format.
        title (`str`, *optional*): what was measured.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    rows = [row for row in rows if row.get("speed_ratio")]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, max(4.4, 3.0 + 0.16 * len(rows))), layout="constrained")
        axes = figure.add_subplot()
        speeds = [row["speed_ratio"] for row in rows]
        if speeds and max(speeds) > 4 * min(speeds):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        for row in rows:
            _point(axes, row)
        for row in rows:
            if row["kind"] == "target" and row["speed_ratio"] == 1.0:
                axes.axhline(100 * row["accuracy"], color="0.75", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.axvline(1.0, color="0.75", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.margins(x=0.12, y=0.08)
        axes.set_xlabel("tokens a second, over the target's in the same turn (median)")
        axes.set_ylabel("accuracy, %")
        axes.set_title(title, loc="left", color="0.3")
        _label(figure, axes, rows)
        figure.savefig(path)


def _point(axes: Any, row: Mapping[str, Any]) -> None:
    color, marker = _LOOKS.get(row["kind"], ("#444444", "o"))
    x, y, (low, high) = row["speed_ratio"], row["accuracy"], row["interval"]
    across = None
    if row.get("speed_interval"):
        left, right = row["speed_interval"]
        across = [[max(0.0, x - left)], [max(0.0, right - x)]]
    up_and_down = [[100 * max(0.0, y - low)], [100 * max(0.0, high - y)]]
    axes.errorbar(x, 100 * y, xerr=across, yerr=up_and_down, fmt="none", ecolor=color, elinewidth=0.9, alpha=0.5)
    axes.plot(x, 100 * y, marker, color=color, markersize=6, markeredgecolor="white", markeredgewidth=0.6, zorder=3)


def _label(figure: Any, axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Names beside the points: each where it covers no point and no other name, and as near as that allows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what is placed now must stay where it is
    frame = axes.get_window_extent()
    spots = [axes.transData.transform((row["speed_ratio"], 100 * row["accuracy"])) for row in rows]
    unit = figure.dpi / 72
    taken = [Bbox.from_bounds(x - 4 * unit, y - 4 * unit, 8 * unit, 8 * unit) for x, y in spots]
    bars = [_bars(axes, row) for row in rows]
    # Crowded points choose first: they have fewest places left.
    order = sorted(range(len(rows)), key=lambda i: _nearest(i, spots))
    for i in order:
        text = _shorten(rows[i]["name"])
        best: tuple[float, Any] | None = None
        for rank, (x, y, side) in enumerate(_PLACES):
            note = axes.annotate(
                text,
                (rows[i]["speed_ratio"], 100 * rows[i]["accuracy"]),
                xytext=(x, y),
                textcoords="offset points",
                ha=side,
                fontsize=_LABEL_SIZE,
                color=_LOOKS.get(rows[i]["kind"], ("#444444", ""))[0],
                zorder=4,
                annotation_clip=False,
                path_effects=[withStroke(linewidth=2, foreground="white")],
                arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "shrinkB": 3, "shrinkA": 0}
                if abs(x) > 12 or abs(y) > 20
                else None,
            )
            box = _text_box(note, renderer)
            covered = sum(_overlap(box, other) for j, other in enumerate(taken) if j != i)
            covered += sum(
                0.2 * box.width * box.height for j, pair in enumerate(bars) if j != i and _crosses(box, pair)
            )
            outside = box.width * box.height - _overlap(box, frame)
            cost = (covered + 3 * outside) / (box.width * box.height) + 0.004 * rank
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, note)
            else:
                note.remove()
            if cost <= 0.004 * rank + 1e-9:
                break
        assert best is not None
        taken.append(_text_box(best[1], renderer))


def _text_box(note: Any, renderer: Any) -> Any:
    from matplotlib.text import Text

    note.update_positions(renderer)
    return Text.get_window_extent(note, renderer)


def _bars(axes: Any, row: Mapping[str, Any]) -> list[Any]:
    """The row's error bars, as boxes on the canvas."""
    from matplotlib.transforms import Bbox

    x, y = row["speed_ratio"], 100 * row["accuracy"]
    left, right = row.get("speed_interval") or (x, x)
    low, high = (100 * end for end in row["interval"])
    ends = [((left, y), (right, y)), ((x, low), (x, high))]
    return [Bbox(axes.transData.transform(pair)).padded(1) for pair in ends]


def _crosses(box: Any, bars: Sequence[Any]) -> bool:
    return any(_overlap(box, bar) > 0 for bar in bars)


def _overlap(a: Any, b: Any) -> float:
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(0.0, width) * max(0.0, height))


def _nearest(i: int, spots: Sequence[Any]) -> float:
    return min((math.dist(spots[i], other) for j, other in enumerate(spots) if j != i), default=0.0)


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1] + "…"


def plot_heat_maps(table: Mapping[str, Any], path: str | Path, title: str = "") -> None:
    """Accuracy and speed ratio of a grid beside each other; a third axis is a row of maps for each of its values.

    Args:
        table (`Mapping[str, Any]`): of [`Grid.table`].
        path (`str` or `Path`): the picture's file; its ending chooses the format.
        title (`str`, *optional*): what was measured.
    """
    import matplotlib
    from matplotlib.figure import Figure

    names, values = list(table["axes"]), list(table["axes"].values())
    *outer, x = range(len(names))
    y = outer[-1] if outer else None
    facets = list(itertools.product(*(values[i] for i in outer[:-1])))
    height = len(values[y]) if y is not None else 1
    with matplotlib.rc_context(_STYLE):
        size = (max(6.4, 2.2 + 1.5 * len(values[x])), 1.5 + len(facets) * (0.7 + 0.5 * height))
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(_heat_title(table, title), fontsize=9, color="0.3", x=0.01, ha="left")
        panels = figure.subplots(len(facets), 2, squeeze=False)
        for column, (entry, label, scale, form, colors, least) in enumerate(_PANELS):
            cells = [math.nan if cell[entry] is None else scale * cell[entry] for cell in table["cells"]]
            below = [_interval(cell) if entry == "accuracy" else "" for cell in table["cells"]]
            limits = _limits(cells, least)
            for row, facet in enumerate(facets):
                axes = panels[row][column]
                count = height * len(values[x])
                starts = range(row * count, (row + 1) * count, len(values[x]))
                grid, notes = ([part[i : i + len(values[x])] for i in starts] for part in (cells, below))
                _heat_map(axes, grid, notes, limits, form, colors)
                axes.set_xticks(range(len(values[x])), values[x])
                axes.set_xlabel(names[x])
                axes.set_yticks(range(height), values[y] if y is not None else [""])
                if y is not None and column == 0:
                    axes.set_ylabel(names[y])
                axes.set_title(f"{label} ({names[0]} = {facet[0]})" if facet else label)
        figure.savefig(path)


# entry of a cell, heading, factor, how it is written, colours, the least range that they span
_PANELS = (
    ("accuracy", "accuracy, %", 100.0, "{:.1f}", "Blues", 5.0),
    ("speed_ratio", "tokens a second, × target", 1.0, "{:.2f}", "Oranges", 0.5),
)


def _interval(cell: Mapping[str, Any]) -> str:
    return "{:.1f} to {:.1f}".format(*(100 * end for end in cell["interval"])) if cell.get("interval") else ""


def _heat_map(axes: Any, grid: Any, notes: Any, limits: tuple[float, float], form: str, colors: str) -> None:
    low, high = limits
    axes.imshow(grid, vmin=low, vmax=high, cmap=colors, aspect="auto")
    axes.tick_params(length=0)
    axes.set_xticks([j - 0.5 for j in range(1, len(grid[0]))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(grid))], minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            dark = value - low > 0.6 * (high - low)
            text = "–" if math.isnan(value) else form.format(value)
            look = {"ha": "center", "color": "white" if dark else "black"}
            note = notes[i][j]
            axes.text(j, i, text, va="bottom" if note else "center", fontsize=9, **look)
            if note:
                axes.text(j, i + 0.08, note, va="top", fontsize=6.5, **look)


def _limits(cells: Sequence[float], least: float) -> tuple[float, float]:
    """The range of the colours, at least `least`: cells that hardly differ must not look as if they did."""
    known = [cell for cell in cells if not math.isnan(cell)] or [0.0]
    spare = max(0.0, least - (max(known) - min(known))) / 2
    low, high = min(known) - spare, max(known) + spare
    return low - 0.15 * (high - low), high + 0.1 * (high - low)


def _heat_title(table: Mapping[str, Any], title: str) -> str:
    fixed = ", ".join(f"{name}={value}" for name, value in table["fixed"].items())
    target = "" if table.get("target") is None else f" · target {100 * table['target']:.1f}%"
    return f"{table['name']}{' with ' + fixed if fixed else ''}{target}\n{title}"
