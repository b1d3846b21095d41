"""smc beside its rivals at equal cost: what else the same target forwards, or the same time, would have bought."""

import json
from pathlib import Path
from typing import Any

# Each family by what it spends more of: particles, or answers.
FAMILIES = {
    "smc, one drawn": [f"smc_{n}" for n in (1, 4, 8, 16)],
    "smc, the heaviest": ["smc_1", *(f"smc_{n}_best" for n in (4, 8, 16))],
    "best of n drafts": ["draft", *(f"best_of_{n}" for n in (2, 4, 8))],
    "vote of n targets": ["target", *(f"majority_{n}" for n in (2, 4))],
    "lossless": ["lossless"],
}
COLORS = ("#cc79a7", "#7b3294", "#56b4e9", "#b8860b", "#0072b2")
COSTS = {
    "target tokens": "tokens that the target reads for an answer",
    "time": "time for an answer, over the target's",
}
SLACK = 1.05  # a rival may cost 5 % more and still counts as equal


def read(out: Path) -> dict[str, dict[str, Any]]:
    """The contenders of the sampled runs, with both costs of an answer."""
    rows: dict[str, dict[str, Any]] = {}
    for name in ("particles", "rivals", "votes", "sampled"):
        report = json.loads((out / name / "results.json").read_text(encoding="utf-8"))
        for row in report["contenders"]:
            tokens = (row["target_tokens_per_token"] or 0.0) * row["new_tokens"] / row["samples"]
            cost = {"target tokens": tokens, "time": 1 / (row["answer_ratio"] or 1.0)}
            rows.setdefault(row["name"], {**row, "cost": cost})
    return rows


def equal_cost(out: Path) -> list[str]:
    """The table's lines, and the picture `equal_cost.png` beside the runs."""
    rows = read(out)
    plot(rows, out / "equal_cost.png")
    lines = [
        "| smc | accuracy | at equal | best of n drafts | vote of n targets | lossless |",
        "|---|---:|---|---:|---:|---:|",
    ]
    rivals = ("best of n drafts", "vote of n targets", "lossless")
    for name in [*FAMILIES["smc, one drawn"], *FAMILIES["smc, the heaviest"][1:]]:
        for cost in COSTS:
            cells = [affordable(rows, family, cost, rows[name]["cost"][cost]) for family in rivals]
            lines.append(f"| `{name}` | {_accuracy(rows[name])} | {cost} | " + " | ".join(cells) + " |")
    return lines


def affordable(rows: dict[str, dict[str, Any]], family: str, cost: str, limit: float) -> str:
    """The member of `family` that spends most within `limit`, with its accuracy."""
    within = [name for name in FAMILIES[family] if name in rows and rows[name]["cost"][cost] <= SLACK * limit]
    if not within:
        return "none"
    chosen = max(within, key=lambda name: rows[name]["cost"][cost])
    return f"`{chosen}` {_accuracy(rows[chosen])}"


def _accuracy(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{100 * row['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Accuracy over either cost, a line for each family, 95 % intervals as bars."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(8.4, 4.2), layout="constrained", dpi=160)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (cost, label) in zip(panels, COSTS.items(), strict=True):
        for (family, names), color in zip(FAMILIES.items(), COLORS, strict=True):
            found = [rows[name] for name in names if name in rows and rows[name]["cost"][cost] > 0]
            across, up = [row["cost"][cost] for row in found], [100 * row["accuracy"] for row in found]
            bars = [[y - 100 * row["interval"][0] for row, y in zip(found, up, strict=True)]]
            bars.append([100 * row["interval"][1] - y for row, y in zip(found, up, strict=True)])
            axes.errorbar(across, up, yerr=bars, fmt="o-", color=color, markersize=4, linewidth=1.2, label=family)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("accuracy, %")
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path)
