"""The commands `bench` and `check`: `hf-semspec bench`, `hf-semspec check`, and `python -m hf_semspec.bench`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..evaluation.command import SCHEMES_HELP
from ..tools.loading import DRAFT_HELP
from .advice import check
from .function import bench
from .page import GOALS, write_page
from .report import markdown
from .results import NOTE, write_json
from .run import FULL, QUICK, run_goals
from .sizes import SIZES, size_by_name
from .sweeps import DEFAULTS, quick, run_sweep

MINUTE = 60.0
_SIZE_HELP = f"one of {', '.join(SIZES)}, or LAYERSxHIDDENxINTERMEDIATExHEADS"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which two models, on what prompts, and where."""
    add = parser.add_argument
    add("--model", help="the target: a Hub id or a folder")
    add("--draft", help=DRAFT_HELP)
    add("--controlled", type=float, metavar="AGREEMENT", help="instead: make a pair that agrees on this share of ids")
    add("--target-size", default="98M", metavar="SIZE", help=f"of that pair's target (default 98M): {_SIZE_HELP}")
    add("--draft-size", default="1.5M", metavar="SIZE", help="of its draft (default 1.5M)")
    add("--vocab", type=int, metavar="N", help="its vocabulary (default: the target size's)")
    add("--logit-scale", type=float, default=12.0, metavar="S", help="its best logit; less is more entropy (12)")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line (default: eight of our own)")
    add("--no-chat-template", action="store_true", help="put prompts as they are")
    add("--dtype", default="auto", help="of both models (float32, bfloat16, ...; default: as stored)")
    add("--device", help="where both models live (default: cuda if there is one, else cpu)")
    add("--seed", type=int, default=0, metavar="N")
    add("--out", type=Path, metavar="DIR", help="where results go; an interrupted run goes on there")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench` to `parser`."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--schemes", nargs="+", metavar="CONTENDER", help=SCHEMES_HELP.partition(" (default")[0] + " (default: all)")
    add("--batch", default="1,4,8", metavar="N,N", help="prompts decoded together (default 1,4,8)")
    add("--new-tokens", type=int, default=128, metavar="N")
    add("--repeats", type=int, default=5, metavar="N", help="timed turns (default 5)")
    add("--alone", type=int, metavar="N", help="of ways that take one prompt at a time, time N prompts of a batch")
    pages = parser.add_argument_group("the project's own measurements")
    pages.add_argument("--goals", action="store_true", help="measure the project's goals")
    pages.add_argument("--sweep", choices=tuple(DEFAULTS), help="measure a part of docs/benchmarks.md")
    pages.add_argument("--minutes", type=float, metavar="N", help="start no point of a sweep later than this")
    pages.add_argument("--name", help="of a sweep's result in --out (default: the sweep)")
    pages.add_argument("--work", type=Path, metavar="DIR", help="where a sweep keeps its points (default out/bench)")
    pages.add_argument("--quick", action="store_true", help="tiny models; shows that all runs, no real numbers")
    pages.add_argument("--page", type=Path, metavar="FILE", help="write the results in --out into this page")


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check` to `parser`."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens the target writes after a prompt (default 64)")
    add("--repeats", type=int, default=5, metavar="N", help="timed turns of each forward (default 5)")
    add("--blocks", type=int, default=64, metavar="N", help="drafted blocks a prompt, for χ² (default 64)")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Measure what was asked for and write it; 0 if all went well."""
    actions = [arguments.goals, arguments.sweep is not None, _names_a_pair(arguments)]
    if sum(actions) > 1:
        raise ValueError("--goals, --sweep and a pair (--model or --controlled) exclude each other")
    if not any(actions) and arguments.page is None:
        raise ValueError(
            "nothing to measure: pass --model and --draft, --controlled AGREEMENT, --goals, or --sweep; --page FILE "
            "alone writes what is in --out into a page"
        )
    if arguments.page is not None and arguments.out is None:
        raise ValueError("--page FILE is written from the results in a folder: pass --out DIR")
    if arguments.sweep is not None and arguments.out is None:
        raise ValueError("--sweep writes its result into a folder: pass --out DIR")
    _quiet()
    with warnings.catch_warnings():
        # Stock's assisted generation warns of its own calls, and a controlled pair's smc of its weights.
        warnings.simplefilter("ignore")
        if arguments.goals:
            _goals(arguments, command)
        elif arguments.sweep is not None:
            plan = quick(arguments.sweep) if arguments.quick else None
            run_sweep(
                arguments.sweep,
                plan,
                out=arguments.out,
                work=arguments.work,
                name=arguments.name,
                minutes=arguments.minutes,
                command=command,
                report=Progress(),
            )
        elif _names_a_pair(arguments):
            _bench(arguments, command)
    if arguments.page is not None:
        write_page(arguments.out, arguments.page)
        print(f"{arguments.page} written from {arguments.out}")
    return 0


def execute_check(arguments: argparse.Namespace, command: str) -> int:
    """Look at a pair, print what was found and the warnings; 0 if all went well."""
    _quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        advice = check(
            **_pair(arguments),
            new_tokens=arguments.new_tokens,
            repeats=arguments.repeats,
            blocks=arguments.blocks,
            report=Progress(),
            command=command,
        )
    _show(advice.tables(), *(f"! {warning}" for warning in advice.warnings))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "check.json", advice.to_dict())
    return 0


def _goals(arguments: argparse.Namespace, command: str) -> None:
    result = run_goals(QUICK if arguments.quick else FULL, command=command, report=Progress())
    print(markdown(result))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / f"{GOALS}.json", result)


def _bench(arguments: argparse.Namespace, command: str) -> None:
    measured = bench(
        **_pair(arguments),
        schemes=arguments.schemes,
        batches=whole_numbers("--batch", arguments.batch),
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        alone=arguments.alone,
        out=arguments.out,
        report=Progress(),
        command=command,
    )
    _show(measured.tables(), NOTE)
    if arguments.out is not None:
        print(f"written to {arguments.out}")


def _names_a_pair(arguments: argparse.Namespace) -> bool:
    return any(value is not None for value in (arguments.model, arguments.draft, arguments.controlled))


def _pair(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of [`bench`] and [`check`] that say which pair, where, on which prompts."""
    return {
        "model": arguments.model,
        "draft": arguments.draft,
        "controlled": arguments.controlled,
        "target_size": size_by_name("--target-size", arguments.target_size),
        "draft_size": size_by_name("--draft-size", arguments.draft_size),
        "vocab": arguments.vocab,
        "logit_scale": arguments.logit_scale,
        "prompts": arguments.prompts,
        "chat": not arguments.no_chat_template,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "seed": arguments.seed,
    }


def whole_numbers(option: str, text: str) -> list[int]:
    """`1,4,8`, or `1 4 8`.

    Raises:
        ValueError: a part is no whole number.
    """
    try:
        return [int(part) for part in re.split(r"[,\s]+", text) if part]
    except ValueError:
        raise ValueError(f"{option} {text}: must be whole numbers, such as 1,4,8") from None


class Progress:
    """What runs now, on standard error: one line that is written over; in a log a line for every step of a sweep, and
    else one a minute."""

    def __init__(self) -> None:
        self.said = -MINUTE

    def __call__(self, message: str) -> None:
        """Show `message`; one that begins with a bracket is a step."""
        if sys.stderr.isatty() and not message.startswith("["):
            print(f"\r\x1b[2K{message}", end="", file=sys.stderr, flush=True)
        elif message.startswith("[") or time.monotonic() - self.said > MINUTE:
            print(("\r\x1b[2K" if sys.stderr.isatty() else "") + message, file=sys.stderr, flush=True)
            self.said = time.monotonic()


def _show(tables: Iterable[Any], *notes: str) -> None:
    from rich.console import Console

    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    # A file has no width; 80 columns would fold the tables.
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hf_semspec.bench`: 0, or 2 after a mistake of the user's, printed in one line."""
    parser = argparse.ArgumentParser(prog="python -m hf_semspec.bench", description="Speed, memory and forecasts.")
    add_arguments(parser)
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return execute(parser.parse_args(given), shlex.join(["python", "-m", "hf_semspec.bench", *given]))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf_semspec.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
