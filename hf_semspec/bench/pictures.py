"""The picture of a measurement. `matplotlib` is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Two of Okabe and Ito's palette, told apart in grey print too.
OURS, RIVALS = "#0072b2", "#d55e00"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "savefig.dpi": 160,
}


def plot_speeds(points: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Bars of the ratio to plain decoding with 95 % intervals, the forecast as a mark; one panel a batch size.

    Args:
        points (`Sequence[Mapping[str, Any]]`): of [`measure_point`].
        path (`str` or `Path`): the picture's file; its ending chooses the format.
        title (`str`, *optional*): what was measured.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from .results import shown_rows

    kept = [[row for row in shown_rows(dict(point)) if row["kind"] != "target"] for point in points]
    longest = max((len(rows) for rows in kept), default=1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.2 + 3.2 * len(points), 1.2 + 0.26 * longest), layout="constrained")
        figure.suptitle(title, fontsize=9, color="0.3", x=0.01, ha="left")
        panels = figure.subplots(1, max(len(points), 1), squeeze=False)[0]
        for axes, point, rows in zip(panels, points, kept, strict=False):
            places = range(len(rows))
            values = [row["over_plain"]["value"] for row in rows]
            colors = [RIVALS if row["kind"] in ("assisted", "lookup", "ensemble") else OURS for row in rows]
            axes.barh(places, values, color=colors, alpha=0.8, height=0.65)
            for place, row, value in zip(places, rows, values, strict=True):
                if row["over_plain"]["interval"]:
                    low, high = row["over_plain"]["interval"]
                    axes.plot([low, high], [place, place], color="black", linewidth=1.2)
                if row["predicted"] is not None:
                    axes.plot(row["predicted"], place, "D", color="white", markeredgecolor="black", markersize=4)
                ends = [value, *(row["over_plain"]["interval"] or []), row["predicted"] or 0.0]
                axes.text(max(ends), place, f"  {value:.2f}", va="center", fontsize=7)
            axes.margins(x=0.12)
            axes.axvline(1.0, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.set_yticks(list(places), [row["name"] for row in rows], fontsize=7)
            axes.invert_yaxis()
            axes.set_xlabel("tokens a second, over plain (◇ forecast)")
            axes.set_title(f"batch {point['batch']}", loc="left")
        figure.savefig(path)
