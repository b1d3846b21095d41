"""`hf-semspec parse`: a file of prompts answered by the scheme `parse` over servers."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from ..configuration import PARSEConfig
from ..tools.progress import progress_bar
from .lines import Batch, batches, read_file
from .store import Record, Store


def add_arguments(parser: argparse.ArgumentParser, setting: Any) -> None:
    """Add the command's options to `parser`; `setting` reads NAME=VALUE."""
    add = parser.add_argument
    add("--target", required=True, metavar="URL", help="the target's server, such as http://localhost:8000/v1")
    add("--draft", required=True, metavar="URL", help="the draft's")
    add("--target-model", metavar="NAME", required=True, help="the target's name there")
    add("--draft-model", metavar="NAME", required=True, help="the draft's")
    add("--tokenizer", metavar="NAME", help="of both, a Hub id or a folder (default: each model's name)")
    add("--api-key", metavar="KEY", help="sent to both")
    add("--input", type=Path, required=True, metavar="FILE", help="a line of JSON each: `prompt`, or `messages`")
    add("--output", type=Path, required=True, metavar="FILE", help="the answers, a line each, in order")
    add("--batch-size", type=int, default=64, metavar="N", help="prompts that are under way at once (default 64)")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T", help="sample at this temperature (default: greedy)")
    add("--seed", type=int, default=0)
    add("--raw", action="store_true", help="pass prompts as they are, without the chat template")
    add("--set", action="append", default=[], type=setting, metavar="NAME=VALUE", dest="settings", help="a field")
    parser.set_defaults(run=execute)


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Run the job, or what is left of it; 0, or 1 if lines failed.

    Raises:
        OSError: a server is not there any more; what is finished is kept.
    """
    from transformers import AutoTokenizer

    from ..servers import OpenAIServer, ServerError

    config = PARSEConfig(**dict(arguments.settings))
    if not arguments.input.is_file():
        raise ValueError(f"--input {arguments.input}: there is no such file")
    tokenizer = None if arguments.tokenizer is None else AutoTokenizer.from_pretrained(arguments.tokenizer)
    ends = {}
    try:
        for role in ("target", "draft"):
            url, name = getattr(arguments, role), getattr(arguments, f"{role}_model")
            ends[role] = OpenAIServer(url, name, arguments.api_key, tokenizer=tokenizer)
    except ServerError as error:
        raise OSError(str(error)) from error
    store = Store(arguments.output)
    names = ("target_model", "draft_model", "batch_size", "max_new_tokens", "temperature", "seed", "raw")
    definition = {name: getattr(arguments, name) for name in names}
    definition["config"] = json.loads(json.dumps(dataclasses.asdict(config)))
    store.check(definition)
    store.open(definition)
    with open(arguments.input, "rb") as file:
        total = sum(1 for _ in file)
    number = failed = 0
    with progress_bar(True, total) as advance:
        for batch in batches(read_file(arguments.input), arguments.batch_size):
            number += 1
            if store.has(batch):
                advance("", len(batch.lines), 0)
                continue
            records = asyncio.run(_answered(batch, ends, config, arguments))
            store.add(batch, records)
            advance("", len(records), sum(record.get("new_tokens", 0) for record in records))
    store.merge(number)
    with open(arguments.output, encoding="utf-8") as file:
        failed = sum("error" in json.loads(line) for line in file)
    print(f"written to {arguments.output}" + (f"; {failed} lines failed" if failed else ""), file=sys.stderr)
    return 1 if failed else 0


async def _answered(batch: Batch, ends: Any, config: PARSEConfig, arguments: argparse.Namespace) -> list[Record]:
    from ..servers import parse

    asked = [line for line in batch.lines if line.error is None]
    found = await parse(
        [line.asked for line in asked],
        **ends,
        config=config,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        chat=not arguments.raw,
    )
    records: dict[int, Record] = {line.number: {"line": line.number, "error": line.error} for line in batch.lines}
    for line, served in zip(asked, found, strict=True):
        if served.transient:  # the servers' fault, not the line's: it is asked again by the next start
            raise OSError(f"line {line.number}: {served.error}; what is finished is kept, repeat the command to go on")
        if served.error is not None:
            records[line.number]["error"] = served.error
            continue
        records[line.number] = {
            "line": line.number,
            "text": served.text,
            "new_tokens": len(served.ids),
            "verdicts": [None if math.isnan(value) else value for value in served.verdicts],
            "boundaries": served.boundaries,
            "kept_tokens": served.kept_tokens,
            "stats": dataclasses.asdict(served.stats),
            "usage": {"target": dataclasses.asdict(served.target), "draft": dataclasses.asdict(served.draft)},
        }
    return [records[line.number] for line in batch.lines]
