"""A finished measurement: its points as JSON, as a rich table, as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT, PLOT = "bench.json", "bench.png"
NOTE = (
    "tokens/s: median over the turns, with the slowest and the fastest; over plain and over assisted: median over the "
    "turns of the ratio within a turn, with its 95 % bootstrap interval; assisted is transformers', tuned, of the "
    "same mode. forecast: what the forwards alone would allow. Time and memory are of one run of its own."
)


@dataclass
class Measured:
    """What [`bench`] returns.

    Args:
        meta (`dict`): command, commit, versions, machine, and `run`: what was measured, seeds included.
        points (`list[dict]`): one for each batch size; see [`measure_point`].
    """

    meta: dict[str, Any]
    points: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"meta": self.meta, "points": self.points}

    def row(self, name: str, batch: int | None = None) -> dict[str, Any]:
        """The row called `name` of the point of that batch, of the first one by default.

        Raises:
            KeyError: there is no such row.
        """
        for point in self.points:
            if batch in (None, point["batch"]):
                for row in point["rows"]:
                    if row["name"] == name:
                        return dict(row)
        raise KeyError(f"no row {name!r} at batch {batch}")

    def tables(self) -> list[Any]:
        """A `rich` table for each batch size."""
        return [rich_table(point) for point in self.points]

    def plot(self, path: str | Path) -> None:
        """Draw the ratios to plain decoding, measured and forecast; the file's ending chooses the format."""
        from .pictures import plot_speeds

        plot_speeds(self.points, path, title_of(self.meta["about"]))

    def write(self, folder: Path) -> list[Path]:
        """Write the JSON and the picture into `folder`; the files written."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT, self.to_dict())
        self.plot(folder / PLOT)
        return [folder / RESULT, folder / PLOT]


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write `result`; the file appears whole or not at all."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    # Innermost lists on one line: samples and costs would fill pages.
    text = re.sub(r"\[\n[^\[\]{}]*?\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(path)


def title_of(about: dict[str, Any]) -> str:
    """What was measured, in a line."""
    target, draft = (f"{count / 1e6:,.1f}M" for count in about["parameters"])
    what = (
        f"controlled pair at {about['controlled']}"
        if "controlled" in about
        else f"{about['model']} with {about['draft']}"
    )
    return f"{what}: {target} against {draft} parameters, {about['dtype']} on {about['device']}"


def agreement_line(point: dict[str, Any]) -> str:
    """The point's measured agreement, in a line."""
    greedy, sampling = (point["agreement"][mode] for mode in ("greedy", "sampling"))
    if greedy is None:
        return "agreement: not comparable, the ids mean different things"
    return (
        f"agreement of the argmaxes {greedy['greedy']:.2f} (plain greedy text); Σ min(p, q) "
        f"{sampling['overlap']:.2f}, H(p) {sampling['target_entropy']:.2f}, H(q) {sampling['draft_entropy']:.2f} nats "
        "(plain samples)"
    )


def shown_rows(point: dict[str, Any]) -> list[dict[str, Any]]:
    """The point's rows, of transformers' tuned ones only the fastest."""
    return [row for row in point["rows"] if row["tuned"] or not row["name"].startswith("HF assisted γ")]


def with_interval(ratio: dict[str, Any] | None) -> str:
    """`1.23 (1.1 to 1.4)`."""
    if ratio is None:
        return ""
    if ratio["interval"] is None:
        return f"{ratio['value']:.2f}"
    low, high = ratio["interval"]
    return f"{ratio['value']:.2f} ({low:.2f} to {high:.2f})"


def split_of(row: dict[str, Any]) -> str:
    """Shares of draft, target and rest, in percent."""
    shares = row.get("shares")
    return "" if shares is None else " / ".join(f"{100 * shares[name]:.0f}" for name in ("draft", "target", "rest"))


def matched_of(row: dict[str, Any]) -> str:
    """Rows with plain decoding's tokens, of those compared; an exact way that misses one is marked."""
    if "matched" not in row:
        return ""
    same, count = row["matched"]
    return f"{same}/{count}" + (" !" if row["exact"] and same < count else "")


def number(value: float | None, form: str) -> str:
    """The value, or nothing."""
    return "" if value is None else format(value, form)


def cells(row: dict[str, Any]) -> list[str]:
    """The row's cells under [`HEADER`]."""
    low, high = row["spread"]
    peak = row.get("peak_bytes")
    return [
        row["name"] + (" (tuned)" if row["tuned"] else ""),
        f"{row['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
        with_interval(row["over_plain"]),
        number(row["predicted"], ".2f"),
        with_interval(row["over_assisted"]),
        number(row.get("acceptance"), ".2f"),
        number(row.get("target_forwards"), "d"),
        number(row.get("draft_forwards"), "d"),
        split_of(row),
        number(None if peak is None else peak / 1e6, ".0f"),
        matched_of(row),
    ]


HEADER: Sequence[str] = (
    "",
    "tokens/s",
    "over plain",
    "forecast",
    "over assisted",
    "accepted",
    "target forwards",
    "draft forwards",
    "draft / target / rest, %",
    "peak MB",
    "same tokens",
)


def rich_table(point: dict[str, Any]) -> Any:
    """The point as a `rich` table."""
    from rich.table import Table

    table = Table(title=f"batch {point['batch']}", caption=agreement_line(point), padding=(0, 1))
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in shown_rows(point):
        table.add_row(*cells(row))
    for name, reason in point["skipped"].items():
        table.add_row(name, "not run", *[""] * (len(HEADER) - 2))
        table.caption = f"{table.caption}\n{name}: {reason}"
    return table
