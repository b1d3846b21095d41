"""A finished run: its rows as JSON, as tables and as pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .grids import Grid
from .journal import Record

RESULTS, TABLE, PLOT = "results.json", "results.md", "quality_speed"
NOTE = (
    "Accuracy with its 95 % interval ({methods}). Difference: from the target, with the 95 % bootstrap interval over "
    "prompts; p: McNemar's exact test on {pairs}. × target: tokens a second over the target's, the median over the "
    "batches that both decoded in one turn. Target forwards a token: calls times rows, over new tokens."
)
REPEATED = "all pairs of one prompt and one seed; pairs of one prompt are not independent, so p is too small"


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}%"


def _range(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"


def _number(form: str) -> Callable[[Any], str]:
    return lambda value: "" if value is None else format(value, form)


def _difference(value: dict[str, Any] | None, brief: bool = False) -> str:
    if value is None:
        return ""
    text = f"{100 * value['value']:+.1f}"
    if brief or value["interval"] is None:
        return text
    low, high = value["interval"]
    return f"{text} ({100 * low:+.1f} to {100 * high:+.1f})"


def _p_value(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value["p_value"] < 0.001 else f"{value['p_value']:.3f}"


# entry of a row, header on a page, header in a terminal (none: left out there), how it is written
_COLUMNS: tuple[tuple[str, str, str | None, Callable[[Any], str]], ...] = (
    ("accuracy", "accuracy", "accu-\nracy", _percent),
    ("interval", "95 %", "95 %", _range),
    ("difference", "difference, points", None, _difference),
    ("difference", "", "differ-\nence", lambda value: _difference(value, brief=True)),
    ("difference", "p", "p", _p_value),
    ("tokens_per_second", "tokens/s", "tokens\n/s", _number(".1f")),
    ("speed_ratio", "× target", "×\ntarget", _number(".2f")),
    ("seconds_per_answer", "s an answer", None, _number(".3g")),
    ("target_forwards_per_token", "target forwards a token", "forwards\na token", _number(".3f")),
    ("acceptance_rate", "acceptance", "ac-\ncepted", _percent),
    ("trigger_rate", "triggers", "trig-\ngers", lambda value: _percent(value, 2)),
    ("ess", "ESS", "ESS", _number(".2f")),
    ("full_accept_rate", "full accepts", "full\naccepts", _percent),
    ("kept_fraction", "kept", "kept", _percent),
    ("segment_acceptance_rate", "segments that stand", "seg-\nments", _percent),
)


@dataclass
class Report:
    """What a run found.

    Args:
        meta (`dict`): command, commit, versions and machine of the run's first start, `sessions` with those of every
            start of every process, and `run`, what two calls must have in common to be one run.
        rows (`list[dict]`): one for each contender, see [`summarize`].
        records (`list[dict]`): every finished unit: texts, answers, times.
        grids (`list[Grid]`): the grids that were run, if any.
    """

    meta: dict[str, Any]
    rows: list[dict[str, Any]]
    records: list[Record] = field(default_factory=list, repr=False)
    grids: list[Grid] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        """The row of the contender `name`.

        Raises:
            KeyError: there is none.
        """
        return next((row for row in self.rows if row["name"] == name), None) or _no_row(name)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the records, JSON-safe."""
        return {
            "meta": self.meta,
            "contenders": self.rows,
            "grids": [grid.table(self.rows) for grid in self.grids],
        }

    def cells(self, brief: bool = False) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, without the columns that say nothing in this run; `brief` for a terminal."""
        columns = [(entry, short if brief else long, form) for entry, long, short, form in _COLUMNS]
        shown = [one for one in columns if one[1] and any(one[2](row.get(one[0])) for row in self.rows)]
        header = ["", *(str(name) for _, name, _ in shown)]
        return header, [[row["name"], *(form(row.get(entry)) for entry, _, form in shown)] for row in self.rows]

    def note(self) -> str:
        """How the numbers of the tables are to be read."""
        methods = sorted({row["interval_method"] for row in self.rows})
        pairs = [row["difference"] for row in self.rows if row.get("difference")]
        repeated = any(pair["pairs"] > pair["prompts"] for pair in pairs)
        return NOTE.format(methods=", ".join(methods), pairs=REPEATED if repeated else "the pairs of one prompt")

    def markdown(self) -> str:
        """A page: where the numbers come from, the table, how to read it."""
        header, rows = self.cells()
        rows = [[f"`{row[0]}`".replace("|", "\\|"), *row[1:]] for row in rows]
        return f"{self._origin()}\n\n{markdown_table(header, rows)}\n\n{self.note()}\n"

    def table(self) -> Any:
        """The table for `rich` to print."""
        from rich.table import Table
        from rich.text import Text

        header, rows = self.cells(brief=True)
        table = Table(caption=self.note(), caption_justify="left")
        for i, name in enumerate(header):
            first = i == 0
            table.add_column(name, justify="left" if first else "right", overflow="fold", no_wrap=not first)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def plot(self, path: str | Path) -> None:
        """Quality against speed, as a picture in the file `path`."""
        from .plots import plot_quality

        named = {cell.name for grid in self.grids for cell in grid.contenders()}
        rows = [row for row in self.rows if row["name"] not in named]
        plot_quality(rows if len(rows) > 1 else self.rows, path, self._title())

    def plot_grid(self, grid: Grid, path: str | Path) -> None:
        """The grid's accuracy and speed as heat maps side by side, in the file `path`."""
        from .plots import plot_heat_maps

        plot_heat_maps(grid.table(self.rows), path, self._title())

    def write(self, folder: Path) -> list[Path]:
        """Write `results.json`, `results.md`, the plots (PNG and PDF); returns the files."""
        files = [folder / RESULTS, folder / TABLE]
        files[0].write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        files[1].write_text(self.markdown(), encoding="utf-8")
        for suffix in ("png", "pdf"):
            files.append(folder / f"{PLOT}.{suffix}")
            self.plot(files[-1])
            for grid in self.grids:
                files.append(folder / f"grid_{re.sub(r'[^0-9A-Za-z_.-]+', '_', grid.name)}.{suffix}")
                self.plot_grid(grid, files[-1])
        return files

    def _title(self) -> str:
        run = self.meta["run"]
        mode = "greedy" if run["temperature"] is None else f"T = {run['temperature']:g}"
        return (
            f"{Path(run['model']).name} with {Path(run['draft']).name if run['draft'] else 'no draft'} · "
            f"{run['task']['name']}, {run['task']['examples']} problems · {mode}, batch {run['batch_size']}"
        )

    def _origin(self) -> str:
        meta, machine, run = self.meta, self.meta["machine"], self.meta["run"]
        versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items() if number)
        where = f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
        where += f", {machine['accelerator']}" if machine["accelerator"] else ""
        where += f", {meta['processes']} processes" if meta["processes"] > 1 else ""
        commits = sorted({str(session["commit"]) for session in meta["sessions"]})
        resumed = f" Interrupted, and resumed at another commit: {', '.join(commits)}." if len(commits) > 1 else ""
        return (
            f"`{meta['command']}` at commit {meta['commit'] or 'unknown'} on {meta['date']}; seeds "
            f"{', '.join(map(str, run['seeds']))}; {self._title()}; Python {meta['python']}, {versions}; {where}."
            f"{resumed}"
        )


def _no_row(name: str) -> dict[str, Any]:
    raise KeyError(name)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, numbers aligned to the right after the first column."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
