"""Measures what docs/benchmarks.md shows, and writes the page: `python -m examples.benchmarks COMMAND`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_semspec.bench.command import quiet
from hf_semspec.bench.progress import ProgressLine
from hf_semspec.bench.results import write_json

from .goals import FULL, QUICK, run_goals
from .page import GOALS, write_page
from .report import markdown
from .sweeps import DEFAULTS, quick, run_sweep

PROGRAM = "python -m examples.benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 after a mistake of the user's, printed in one line."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    try:
        with quiet():
            arguments.run(arguments, shlex.join([*PROGRAM.split(), *given]))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"examples.benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="What docs/benchmarks.md shows.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    goals = commands.add_parser("goals", help="measure the project's goals")
    goals.set_defaults(run=_goals)
    sweep = commands.add_parser("sweep", help="measure a part of the page; an interrupted sweep goes on")
    sweep.add_argument("kind", choices=tuple(DEFAULTS))
    sweep.add_argument("--minutes", type=float, metavar="N", help="start no point later than this")
    sweep.add_argument("--name", help="of the result in --out (default: the sweep)")
    sweep.add_argument("--work", type=Path, metavar="DIR", help="where finished points are kept (default out/bench)")
    sweep.set_defaults(run=_sweep)
    page = commands.add_parser("page", help="write the results in --out into a page, and draw its pictures there")
    page.add_argument("page", type=Path, metavar="FILE")
    page.set_defaults(run=_page)
    for command in (goals, sweep):
        command.add_argument("--quick", action="store_true", help="tiny models; shows that all runs, no real numbers")
    for command in (goals, sweep, page):
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results are")
    return parser


def _goals(arguments: argparse.Namespace, command: str) -> None:
    result = run_goals(QUICK if arguments.quick else FULL, command=command, report=ProgressLine())
    print(markdown(result))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / f"{GOALS}.json", result)


def _sweep(arguments: argparse.Namespace, command: str) -> None:
    run_sweep(
        arguments.kind,
        quick(arguments.kind) if arguments.quick else None,
        out=arguments.out,
        work=arguments.work,
        name=arguments.name,
        minutes=arguments.minutes,
        command=command,
        report=ProgressLine(),
    )


def _page(arguments: argparse.Namespace, command: str) -> None:
    write_page(arguments.out, arguments.page)
    print(f"{arguments.page} written from {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
