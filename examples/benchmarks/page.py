"""docs/benchmarks.md: all that stands between its marks is made from the JSON of finished runs, never typed in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_semspec.bench.results import HEADER, agreement_line, cells, shown_rows, title_of, with_interval
from hf_semspec.evaluation.report import markdown_table

from . import report
from .marks import origin, write_between
from .pictures import plot_lines
from .profiling import DRAFT, PARTS, PREPARES, TARGET

GOALS, PAIRS, SCALING, PROFILE, BEFORE = "goals", "pairs", "scaling", "profile", "profile_before"
_RUN = "OMP_NUM_THREADS=1 python -m examples.benchmarks"
COMMANDS = {
    GOALS: f"{_RUN} goals --out docs/bench",
    PAIRS: f"{_RUN} sweep pairs --out docs/bench",
    SCALING: f"{_RUN} sweep scaling --out docs/bench",
    PROFILE: f"{_RUN} sweep profile --out docs/bench",
}
DETAILED = 0.65


def markdown(folder: Path) -> str:
    """Every measured section, from the results in `folder`; one that has none says how it is made."""
    results = {name: _read(folder / f"{name}.json") for name in (*COMMANDS, BEFORE)}
    sections = (
        ("Goals, in numbers", GOALS, lambda result: report.markdown(result)),
        ("Controlled pairs", PAIRS, _pairs),
        ("Where a round's time goes", PROFILE, lambda result: _profiles(result, results[BEFORE])),
        ("Scaling", SCALING, _scaling),
    )
    parts = []
    for title, name, write in sections:
        found = results[name]
        text = f"Not yet measured: `{COMMANDS[name]}`." if found is None else write(found)
        parts.append(f"## {title}\n\n{text}")
    return "\n\n".join(parts)


def write_page(folder: Path, page: Path) -> None:
    """Replace what stands between the two marks in `page` by what the results in `folder` say, and draw its pictures
    there.

    Raises:
        ValueError: the page lacks the marks.
    """
    write_between(markdown(folder), page)
    for name, draw in ((PAIRS, draw_pairs), (SCALING, draw_scaling)):
        found = _read(folder / f"{name}.json")
        if found is not None and found["points"]:
            draw(found, folder / f"{name}.png")


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _agreements(result: dict[str, Any]) -> list[float]:
    return sorted({point["subject"]["controlled"] for point in result["points"]})


def _pairs(result: dict[str, Any]) -> str:
    points = {(point["batch"], point["subject"]["controlled"]): point for point in result["points"]}
    agreements = _agreements(result)
    parts = [origin(result["meta"]), "![Times plain decoding over agreement](bench/pairs.png)", _facts(points)]
    for batch in sorted({batch for batch, _ in points}):
        here = {agreement: points[batch, agreement] for agreement in agreements if (batch, agreement) in points}
        parts.append(f"### Batch {batch}: times plain decoding of the same mode, measured / forecast")
        parts.append(_matrix(here, batch))
    detailed = [point for (_, agreement), point in sorted(points.items()) if agreement == DETAILED]
    for point in detailed:
        title = f"### Batch {point['batch']} at agreement {DETAILED}"
        rows = [cells(row) for row in shown_rows(point)]
        parts.append(f"{title}\n\n{agreement_line(point)}.\n\n" + markdown_table(HEADER, rows))
    return "\n\n".join(parts)


def _facts(points: dict[tuple[int, float], dict[str, Any]]) -> str:
    """Measured agreement, what was tuned, and whether exact ways were."""
    first = min(batch for batch, _ in points)
    one = points[min(points)]
    lines = [
        f"* {title_of(one['subject']).partition(': ')[2]}; {one['new_tokens']} new tokens, prompts of "
        f"{one['subject']['prompt_length']}; {len(one['rows'][0]['samples'])} timed turns at batch {first}, at larger "
        "ones one less; of a batch, ways that take one prompt at a time decode the first."
    ]
    for (batch, agreement), point in sorted(points.items()):
        if batch != first:
            continue
        measured = point["agreement"]
        lines.append(
            f"* asked {agreement:g}: argmaxes agree on {measured['greedy']['greedy']:.2f}, Σ min(p, q) "
            f"{measured['sampling']['overlap']:.2f}, H(p) {measured['sampling']['target_entropy']:.2f} nats; "
            f"transformers' assisted generation is fastest at γ={point['tuned'].get('greedy')} greedily and "
            f"γ={point['tuned'].get('sampling')} sampling."
        )
    exact = [row for point in points.values() for row in point["rows"] if row.get("exact")]
    missed = [
        f"{row['name']} ({row['matched'][0]} of {row['matched'][1]})"
        for row in exact
        if row["matched"][0] < row["matched"][1]
    ]
    count = sum(row["matched"][1] for row in exact)
    same = "all with" if not missed else f"without plain decoding's tokens: {', '.join(missed)}; the others with"
    lines.append(f"* exact greedy ways: {count} texts compared, {same} plain decoding's tokens.")
    skipped = {name: reason for point in points.values() for name, reason in point["skipped"].items()}
    lines += [f"* not run: {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)


def _matrix(here: dict[float, dict[str, Any]], batch: int) -> str:
    rows = [row for point in here.values() for row in shown_rows(point) if row["kind"] != "target"]
    names = list(dict.fromkeys(_label(row) for row in rows))
    table = []
    for name in names:
        line = [name]
        for point in here.values():
            row = next((row for row in shown_rows(point) if _label(row) == name), None)
            line.append("" if row is None else _measured_and_forecast(row))
        table.append(line)
    speeds = [f"{_speed(point):.1f}" for point in here.values()]
    table.insert(0, ["plain, tokens/s", *speeds])
    return markdown_table(["", *(f"{agreement:g}" for agreement in here)], table)


def _label(row: dict[str, Any]) -> str:
    """The tuned γ differs from column to column."""
    if row["tuned"]:
        return "HF assisted, tuned" + ("" if row["mode"] == "greedy" else ", sampling")
    return str(row["name"])


def _speed(point: dict[str, Any]) -> float:
    return float(next(row["tokens_per_second"] for row in point["rows"] if row["name"] == "plain"))


def _measured_and_forecast(row: dict[str, Any]) -> str:
    return with_interval(row["over_plain"]) + ("" if row["predicted"] is None else f" / {row['predicted']:.2f}")


def draw_pairs(result: dict[str, Any], path: Path) -> None:
    """Lines over agreement, one panel a batch size: the best of every kind."""
    panels = []
    for batch in sorted({point["batch"] for point in result["points"]}):
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in result["points"]:
            if point["batch"] != batch:
                continue
            best: dict[str, float] = {}
            for row in shown_rows(point):
                if row["kind"] in ("lossless", "smc", "easd", "assisted", "lookup"):
                    name = {"assisted": "HF assisted", "lookup": "HF prompt lookup"}.get(row["kind"], row["kind"])
                    name += ", sampling" if row["mode"] == "sampling" and row["kind"] != "smc" else ""
                    best[name] = max(best.get(name, 0.0), row["over_plain"]["value"])
            for name, value in best.items():
                lines.setdefault(name, []).append((point["subject"]["controlled"], value))
        panels.append({"title": f"batch {batch}", "x": "agreement", "y": "times plain", "lines": lines})
    plot_lines(panels, path, "the fastest of each kind, over plain decoding of the same mode")


def _scaling(result: dict[str, Any]) -> str:
    about = result["points"][0]["subject"] if result["points"] else None
    parts = [origin(result["meta"])]
    if about:
        parts.append(f"{title_of(about)[0].upper()}{title_of(about)[1:]}. Seconds are the median of a call.")
    parts.append("![Time and memory](bench/scaling.png)")
    for title, label, panel in _scaled_series(result):
        names = list(panel)
        xs = sorted({x for line in panel.values() for x in line})
        rows = [[str(x), *(_seconds_and_peak(panel[name].get(x)) for name in names)] for x in xs]
        parts.append(f"### {title}: seconds, peak MB beside the weights\n\n" + markdown_table([label, *names], rows))
    return "\n\n".join(parts)


def _scaled_series(
    result: dict[str, Any],
) -> list[tuple[str, str, dict[str, dict[int, tuple[float, float | None]]]]]:
    """For every axis: title, what varies, and by way and value the seconds of a call and the peak megabytes."""
    series = []
    for title, label in (("New tokens", "new tokens"), ("Batch", "batch"), ("N", "N")):
        found: dict[str, dict[int, tuple[float, float | None]]] = {}
        for point in result["points"]:
            if not point["name"].startswith(label):
                continue
            x = point["batch"] if label == "batch" else int(point["name"].split()[-1])
            for row in point["rows"]:
                if label == "N" and row["kind"] not in ("smc", "lossless"):
                    continue
                name = row["name"] if label != "N" else "smc γ=8" if row["kind"] == "smc" else "lossless, N chains γ=4"
                times = sorted(seconds for _, _, seconds in row["samples"])
                peak = row.get("peak_bytes")
                found.setdefault(name, {})[x] = times[len(times) // 2], None if peak is None else peak / 1e6
        if found:
            series.append((title, label, found))
    return series


def _seconds_and_peak(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return ""
    return f"{value[0]:.2f} s" + ("" if value[1] is None else f", {value[1]:.0f}")


def draw_scaling(result: dict[str, Any], path: Path) -> None:
    """Seconds above, memory below, a column for each axis; both axes double."""
    series = _scaled_series(result)
    panels = []
    for index, unit in ((0, "seconds a call"), (1, "peak MB beside the weights")):
        for title, label, found in series:
            lines = {
                name: [(x, pair[index]) for x, pair in line.items() if pair[index]] for name, line in found.items()
            }
            lines = {name: line for name, line in lines.items() if line}
            panels.append({"title": title, "x": label, "y": unit, "lines": lines, "log": True})
    plot_lines(panels, path, "time and memory", columns=max(len(series), 1))


def _profiles(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    point = result["points"][0]
    about = f"{title_of(point['subject'])}, {point['new_tokens']} new tokens"
    note = (
        f"Milliseconds a round, {about}; prefill and all else of the call is dealt out to the rounds; without rounds, "
        "it is of the call. The cache is written inside the forwards: that part is taken out of them, and counts as "
        "theirs in the last row."
    )
    text = f"{origin(result['meta'])}\n\n{note}\n\n{_profile(point['rows'])}"
    if before is not None:
        text += f"\n\nBefore: {origin(before['meta'])}\n\n" + _profile(before["points"][0]["rows"])
    return text


def _profile(rows: Sequence[dict[str, Any]]) -> str:
    parts = [DRAFT, TARGET, *PARTS, PREPARES]
    known = [part for part in parts if any(part in row["milliseconds"] for row in rows)]
    table = [
        [part, *(f"{row['milliseconds'][part]:.2f}" if part in row["milliseconds"] else "" for row in rows)]
        for part in known
    ]
    table.append(["rounds", *(str(row["rounds"]) for row in rows)])
    table.append(["**outside forwards**", *(f"{100 * row['outside']:.1f} %" for row in rows)])
    return markdown_table(["", *(row["name"] for row in rows)], table)
