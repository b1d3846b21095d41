"""The `bench` command: `hf-semspec bench`, and `python -m hf_semspec.bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from transformers.utils import logging

from .report import markdown, write_page
from .run import FULL, QUICK, run_goals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("--goals", action="store_true", help="measure the goals (what the command does by default)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, seconds instead of minutes; no real numbers"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write goals.json there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables into this page, between its marks")
    parser.add_argument(
        "--from", type=Path, metavar="JSON", dest="stored", help="take a stored result, measure nothing"
    )


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Measure (or load) the goals, print the tables, and write what was asked for; 0 if all went well."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if arguments.stored is not None:
        result = json.loads(arguments.stored.read_text(encoding="utf-8"))
    else:
        result = run_goals(QUICK if arguments.quick else FULL, command=command, report=_report)
        _report("")
    print(markdown(result))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "goals.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.page is not None:
        write_page(result, arguments.page)
    return 0


def _report(message: str) -> None:
    # One line that is written over: a run takes minutes, and a log of every turn helps nobody.
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{message}", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """`python -m hf_semspec.bench`."""
    parser = argparse.ArgumentParser(prog="python -m hf_semspec.bench", description=__doc__)
    add_arguments(parser)
    argv = sys.argv[1:] if argv is None else argv
    return execute(parser.parse_args(argv), " ".join(["python -m hf_semspec.bench", *argv]))
