"""`hf-semspec generate --input FILE --output FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..configuration import SemSpecConfig
from .run import generate_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a job needs beside a single prompt's arguments."""
    add = parser.add_argument
    add("--input", type=Path, metavar="FILE", help="decode every line of JSON: `prompt`, or `messages`")
    add("--output", type=Path, metavar="FILE", help="its answers, a line each, in order; repeat after a kill")
    add("--batch-size", type=int, default=8, metavar="N", help="prompts decoded together (default 8)")


def execute(arguments: argparse.Namespace, config: SemSpecConfig) -> int:
    """Run the job, or what is left of it; 0, or 1 if lines failed."""
    if arguments.prompt is not None:
        raise ValueError("--prompt or --input, not both")
    if arguments.output is None:
        raise ValueError("--output is missing: where the answers of --input go")
    if arguments.model is None:
        raise ValueError("--model is missing")
    output = generate_lines(
        arguments.model,
        arguments.draft,
        arguments.input,
        arguments.output,
        config,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        chat=not arguments.raw,
        progress=True,
    )
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return 0
    with open(output, encoding="utf-8") as file:
        failed = sum("error" in json.loads(line) for line in file)
    print(f"written to {output}" + (f"; {failed} lines failed, see their `error`" if failed else ""), file=sys.stderr)
    return 1 if failed else 0
