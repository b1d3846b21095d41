"""Writes what was measured into the pages: `python -m examples.real_pair.page`.

The table of the README, and of docs/real_pair.md the tables between its marks, are made from docs/results and
docs/bench. `--take DIR` first copies there what finished runs have left in DIR.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from examples.benchmarks.marks import write_between
from hf_semspec.evaluation.report import markdown_table

from . import rounding

ROOT = Path(__file__).parent.parent.parent
RESULTS, BENCH = ROOT / "docs" / "results", ROOT / "docs" / "bench"
RUNS = ("greedy", "sampled", "one_by_one", "stock", "own_schemes")
PAIR = "pair_"  # before the names of the real pair's runs among the results
MISSING = "not measured yet"
# A row of the README's table: its title, where the lab has it, and where the real pair has it: quality, speed.
ROWS: tuple[tuple[str, tuple[str, str], tuple[str, str]], ...] = (
    ("lossless", ("one_by_one", "lossless"), ("greedy", "lossless")),
    ("easd", ("one_by_one", "easd_exclude"), ("greedy", "easd")),
    ("easd, `penalty=1`", ("one_by_one", "easd_plain"), ("greedy", "easd_plain")),
    ("parse", ("one_by_one", "parse_first_fail"), ("greedy", "parse")),
    ("semantic, trained probe", ("semantic_one_by_one", "cross"), ("greedy", "semantic")),
    ("smc, 4 particles, sampled", ("one_by_one_sampled", "smc_4"), ("sampled", "smc_4")),
)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The contenders of a finished run by name; none where there is no such run."""
    file = folder / "results.json"
    if not file.exists():
        return {}
    return {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))["contenders"]}


def gains(results: Path) -> str:
    """The README's table: each scheme beside plain decoding, on the lab's pair and on the real one."""
    table = []
    for title, (run, name), (own_run, own_name) in ROWS:
        lab, own = rows_of(results / run)[name], rows_of(results / f"{PAIR}{own_run}").get(own_name)
        timed = rows_of(results / f"{PAIR}one_by_one").get(own_name)
        table.append(
            [
                title,
                f"{lab['speed_ratio']:.2f}",
                difference(lab),
                MISSING if timed is None else f"{timed['speed_ratio']:.2f}",
                MISSING if own is None else f"{difference(own)} on {own['prompts']}",
            ]
        )
    lab_pair, pair = "the arithmetic lab's pair", "Qwen2.5-Coder 1.5B / 0.5B, GSM8K"
    head = ["scheme", f"{lab_pair}: × plain", "right answers, points", f"{pair}: × plain", "right answers, points"]
    return markdown_table(head, table)


def difference(row: dict[str, Any]) -> str:
    """Percentage points from plain decoding with their 95 % interval."""
    found = row["difference"]
    text = f"{100 * found['value']:+.1f}"
    return text + (
        f" ({100 * found['interval'][0]:+.1f} to {100 * found['interval'][1]:+.1f})" if found["interval"] else ""
    )


def run_table(folder: Path) -> str:
    """The table of a finished run with the command, or that it is missing."""
    file = folder / "results.md"
    if not file.exists():
        return f"{MISSING[0].upper()}{MISSING[1:]}."
    lines = file.read_text(encoding="utf-8").splitlines()
    meta = json.loads((folder / "results.json").read_text(encoding="utf-8"))["meta"]
    commits = sorted({session["commit"] for session in meta["sessions"]})
    about = (
        f"{meta['run']['task']['examples']} problems in batches of {meta['run']['batch_size']}; commits "
        f"{', '.join(commits)}, {meta['date']}, torch {meta['versions']['torch']}, transformers "
        f"{meta['versions']['transformers']}; [the whole command](results/{folder.name}/results.md)."
    )
    return about + "\n\n" + "\n".join(line for line in lines if line.startswith("|"))


def rounding_text(bench: Path) -> str:
    """What the differences of half precision were, or that it is missing."""
    file = bench / f"{rounding.NAME}.json"
    if not file.exists():
        return f"{MISSING[0].upper()}{MISSING[1:]}."
    return rounding.markdown(json.loads(file.read_text(encoding="utf-8")))


def sections(results: Path, bench: Path) -> dict[str, str]:
    """What stands between the marks of docs/real_pair.md."""
    found = {name: run_table(results / f"{PAIR}{name}") for name in RUNS}
    return {**found, rounding.NAME: rounding_text(bench)}


def take(out: Path) -> None:
    """Copy what finished runs left in `out` to the pages' folders."""
    for name in RUNS:
        if (out / name / "results.json").exists():
            (RESULTS / f"{PAIR}{name}").mkdir(exist_ok=True)
            for file in ("results.json", "results.md", "quality_speed.png"):
                shutil.copy(out / name / file, RESULTS / f"{PAIR}{name}" / file)
    for file in (f"{rounding.NAME}.json", "calibration.json"):
        if (out / file).exists():
            shutil.copy(out / file, BENCH / (file if file != "calibration.json" else f"{PAIR}{file}"))


def main() -> None:
    """Copy, if told to, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.real_pair.page")
    parser.add_argument("--take", type=Path, metavar="DIR", help="the --out of the runs")
    arguments = parser.parse_args()
    if arguments.take is not None:
        take(arguments.take)
    write_between(gains(RESULTS), ROOT / "README.md", "gains")
    for name, text in sections(RESULTS, BENCH).items():
        write_between(text, ROOT / "docs" / "real_pair.md", name)


if __name__ == "__main__":
    main()
