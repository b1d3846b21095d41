"""The `eval` command."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from transformers.utils import logging

from ..tools.loading import DRAFT_HELP, TARGET_HELP
from .contenders import kinds
from .evaluate import evaluate
from .tasks import TASKS

SCHEMES_HELP = (
    f"what decodes: {', '.join(kinds())}; options after a colon, a name before an equals sign: "
    "mine=easd:penalty=1,trigger=random (default: target,draft,lossless)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    add = parser.add_argument
    add("--model", required=True, help=TARGET_HELP)
    add("--draft", help=DRAFT_HELP)
    add("--task", required=True, metavar="|".join(TASKS), help="how prompts are put and answers read")
    add("--path", type=Path, required=True, metavar="FILE", help="the problems, a line of JSON each")
    add("--extract", metavar="REGEX", help="jsonl: the last match's first group is the answer (default: all the text)")
    add("--template", metavar="TEXT", help="what is asked; {prompt} stands for the problem")
    add("--schemes", nargs="+", metavar="CONTENDER", help=SCHEMES_HELP)
    add("--grid", action="append", default=[], metavar="CONTENDER", help="several values of options: penalty=0|0.5|1")
    add("--limit", type=int, metavar="N", help="take the first N problems")
    add("--batch-size", type=int, default=1, metavar="N")
    add("--seeds", nargs="+", default=["0"], metavar="SEED", help="contenders that draw run once for each (default 0)")
    add("--temperature", type=float, metavar="T", help="sample at this temperature (default: greedy)")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--dtype", default="auto", help="of both models (float32, bfloat16, ...; default: as stored)")
    add("--device", help="where both models live (default: cuda if there is one, else cpu)")
    add("--no-chat-template", action="store_true", help="put prompts as they are")
    add("--out", type=Path, required=True, metavar="DIR", help="records and results; a second call goes on there")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Run the evaluation, or what is left of it, print the table and say what was written; 0 if all went well."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # stock's assisted generation warns of its own calls
    schemes = arguments.schemes
    if schemes is None:
        schemes = [] if arguments.grid else ["target,draft,lossless"]
    report = evaluate(
        arguments.model,
        arguments.draft,
        arguments.task,
        schemes,
        grids=arguments.grid,
        path=arguments.path,
        extract=arguments.extract,
        template=arguments.template,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        seeds=_seeds(arguments.seeds),
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        chat=not arguments.no_chat_template,
        out=arguments.out,
        progress=True,
        command=command,
    )
    from accelerate import PartialState
    from rich.console import Console

    if PartialState().is_main_process:
        # A file has no width; 80 columns would fold the table.
        wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
        Console(width=wide).print(report.table())
        print(f"written to {arguments.out}")
    return 0


def _seeds(texts: list[str]) -> list[int]:
    """`0 1 2`, or `0,1,2`."""
    parts = [part for text in texts for part in re.split(r"[,\s]+", text) if part]
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"--seeds {' '.join(texts)}: must be whole numbers") from None
