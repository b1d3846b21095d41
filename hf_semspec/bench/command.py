"""The commands `bench` and `check`: `hf-semspec bench`, `hf-semspec check`, and `python -m hf_semspec.bench`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..evaluation.command import SCHEMES_HELP
from ..tools.loading import DRAFT_HELP, TARGET_HELP
from .advice import check
from .function import bench
from .progress import ProgressLine
from .results import NOTE, write_json
from .sizes import SIZES, size_by_name

_SIZE_HELP = f"one of {', '.join(SIZES)}, or LAYERSxHIDDENxINTERMEDIATExHEADS"


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which two models, on what prompts, and where."""
    add = parser.add_argument
    add("--model", help=TARGET_HELP)
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


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check` to `parser`."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--new-tokens", type=int, default=64, metavar="N", help="tokens the target writes after a prompt (default 64)")
    add("--repeats", type=int, default=5, metavar="N", help="timed turns of each forward (default 5)")
    add("--save", type=Path, metavar="FILE", help="write what rounds cost, for `cost_profile` of a config")
    add("--blocks", type=int, default=64, metavar="N", help="drafted blocks a prompt, for χ² (default 64)")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Measure the pair, print the tables and write the result; 0 if all went well."""
    with quiet():
        measured = bench(
            **_pair(arguments),
            schemes=arguments.schemes,
            batches=whole_numbers("--batch", arguments.batch),
            new_tokens=arguments.new_tokens,
            repeats=arguments.repeats,
            alone=arguments.alone,
            out=arguments.out,
            report=ProgressLine(),
            command=command,
        )
    _show(measured.tables(), NOTE)
    if arguments.out is not None:
        print(f"written to {arguments.out}")
    return 0


def execute_check(arguments: argparse.Namespace, command: str) -> int:
    """Look at a pair, print what was found and the warnings; 0 if all went well."""
    with quiet():
        advice = check(
            **_pair(arguments),
            new_tokens=arguments.new_tokens,
            repeats=arguments.repeats,
            blocks=arguments.blocks,
            report=ProgressLine(),
            command=command,
        )
    _show(advice.tables(), *(f"! {warning}" for warning in advice.warnings))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "check.json", advice.to_dict())
    if arguments.save is not None:
        write_json(arguments.save, advice.profile)
    return 0


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


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block only errors are shown: transformers' assisted generation warns of its own calls, and smc of the
    weights of a controlled pair. Transformers stays quiet afterwards."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
