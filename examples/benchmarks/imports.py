"""What `import hf_semspec` costs beyond the parts of transformers that it builds on:
`python -m examples.benchmarks.imports [--page FILE]`."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from .marks import write_between

GOAL_MS = 150.0
BASE = "import transformers.generation.utils, transformers.pipelines.base"
_MEASURE = f"""
{BASE}
import json, sys, time
before, wall, cpu = set(sys.modules), time.perf_counter(), time.process_time()
import hf_semspec
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({{"wall": 1000 * wall, "cpu": 1000 * cpu, "modules": sorted(set(sys.modules) - before)}}))
"""


def measure() -> dict[str, object]:
    """One fresh process: milliseconds of wall and CPU time that the import takes, and the modules that it loads."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in fresh processes, print the medians, and put them into a page if one is named.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; by default the process's own.

    Returns:
        `int`: 0.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.imports", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="processes (default 7, after one to warm up)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page with the marks to write between")
    arguments = parser.parse_args(argv)
    measure()
    runs = [measure() for _ in range(arguments.runs)]
    text = _table(runs)
    print(text)
    if arguments.page is not None:
        write_between(text, arguments.page, "imports")
    return 0


def _table(runs: list[dict[str, object]]) -> str:
    lines = [
        f"`python -m examples.benchmarks.imports`, {len(runs)} fresh processes; Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "| milliseconds beyond transformers | median | least | most | goal |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, key in (("CPU time", "cpu"), ("wall time", "wall")):
        values = [float(str(run[key])) for run in runs]
        numbers = " | ".join(f"{number:.0f}" for number in (statistics.median(values), min(values), max(values)))
        lines.append(f"| {name} | {numbers} | < {GOAL_MS:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
