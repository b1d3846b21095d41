"""The run: every contender on every batch of prompts in turn, each finished piece put on record at once."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..tools.machine import describe
from .contenders import Contender
from .decoding import Decoded, Pair, decode, vote
from .journal import Journal, Record, Unit, unit_of
from .tasks import Task

WARM_UP_TOKENS = 8
MINUTE = 60.0
Advance = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run.

    Args:
        task (`Task`): the problems, cut to as many as are asked.
        contenders (`tuple[Contender, ...]`): in the order of a turn.
        batch_size (`int`): prompts decoded together.
        seeds (`tuple[int, ...]`): a contender that draws runs once for each, any other for the first alone.
        temperature (`float`, *optional*): `None` decodes greedily.
        max_new_tokens (`int`): of every answer.
    """

    task: Task
    contenders: tuple[Contender, ...]
    batch_size: int = 1
    seeds: tuple[int, ...] = (0,)
    temperature: float | None = None
    max_new_tokens: int = 256

    @property
    def batches(self) -> list[range]:
        """The examples of each batch, in the order of the file."""
        number = len(self.task.examples)
        return [range(i, min(i + self.batch_size, number)) for i in range(0, number, self.batch_size)]

    def units(self, process: int = 0, processes: int = 1) -> Iterator[Unit]:
        """What process `process` of `processes` runs, in order: all contenders on a batch before the next batch.

        Whole batches are dealt out, so that a batch is the same prompts however many processes there are.
        """
        for seed in self.seeds:
            turn = [c.name for c in self.contenders if seed == self.seeds[0] or c.draws(self.temperature)]
            for batch in range(process, len(self.batches), processes):
                yield from ((seed, batch, name) for name in turn)


def run(
    plan: Plan,
    load: Callable[[], Pair],
    journal: Journal,
    *,
    command: str,
    process: int = 0,
    processes: int = 1,
    progress: bool = False,
) -> None:
    """Run what the journal lacks of this process's share; nothing is loaded if it lacks nothing.

    Args:
        plan (`Plan`): what is run.
        load (`Callable[[], Pair]`): loads the models.
        journal (`Journal`): where finished units stand and are added.
        command (`str`): what started this, for the record.
        process, processes (`int`): this process, and how many share the work.
        progress (`bool`): show a bar on standard error.
    """
    journal.mend()
    done = {unit_of(record) for record in journal.records()}
    units = list(plan.units(process, processes))
    left = [unit for unit in units if unit not in done]
    if not left:
        return
    with _progress(progress, len(units), len(units) - len(left)) as advance:
        advance("loading", 0)
        pair = load()
        contenders = {contender.name: contender for contender in plan.contenders}
        session = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{time.time_ns() % 10**6:06d}-{process}"
        _warm_up(plan, pair, [contenders[name] for name in dict.fromkeys(unit[2] for unit in left)], advance)
        journal.add({"session": session, "process": process, "processes": processes, **describe(command)})
        for seed, batch, name in left:
            advance(f"{name}, batch {batch + 1} of {len(plan.batches)}, seed {seed}", 0)
            record = measure(plan, pair, contenders[name], seed, batch)
            journal.add({**record, "session": session})
            advance(f"{name}, batch {batch + 1} of {len(plan.batches)}, seed {seed}", 1)


def measure(plan: Plan, pair: Pair, contender: Contender, seed: int, batch: int) -> Record:
    """Decode one batch with one contender, and grade it."""
    indices = plan.batches[batch]
    prompts = [plan.task.question(index) for index in indices]
    # From seed and batch alone: the draws do not depend on what ran before, or in which process.
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{batch}".encode()).digest()[:4], "big"))
    decoded = decode(contender, pair, prompts, max_new_tokens=plan.max_new_tokens, temperature=plan.temperature)
    tokenizer = pair.draft_tokenizer if contender.kind == "draft" and pair.draft_tokenizer else pair.tokenizer
    record: Record = {"seed": seed, "batch": batch, "contender": contender.name, "prompts": list(indices)}
    record |= grade(plan.task, indices, decoded, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))
    return record


def grade(task: Task, indices: Sequence[int], decoded: Decoded, read: Callable[[list[int]], str]) -> Record:
    """The record of what was decoded for the examples `indices`; `read` turns ids into text.

    Of several candidates the chosen one counts, or the one that the vote over their answers elects.
    """
    record: Record = {"texts": [], "answers": [], "correct": [], "new_tokens": []}
    votes: list[list[str | None]] = []
    for i, (index, candidates) in enumerate(zip(indices, decoded.candidates, strict=True)):
        texts = [read(ids) for ids in candidates]
        if decoded.chosen is None:
            votes.append([task.extract(text) for text in texts])
            chosen = vote(votes[-1], decoded.votes[i] if decoded.votes else None)
        else:
            chosen = decoded.chosen[i]
        answer, correct = task.grade(index, texts[chosen])
        for name, value in zip(record, (texts[chosen], answer, correct, len(candidates[chosen])), strict=True):
            record[name].append(value)
    record |= {"seconds": decoded.seconds, "figures": decoded.figures}
    if votes:
        record["votes"] = votes
    if decoded.rows is not None:
        record["rows"] = decoded.rows
    return record


def _warm_up(plan: Plan, pair: Pair, contenders: Sequence[Contender], advance: Advance) -> None:
    """A few unmeasured tokens of each, so that none pays for the first use of a kernel; refusals come here."""
    prompts = [plan.task.question(index) for index in plan.batches[0]]
    for contender in contenders:
        advance(f"warming up {contender.name}", 0)
        tokens = min(WARM_UP_TOKENS, plan.max_new_tokens)
        decode(contender, pair, prompts, max_new_tokens=tokens, temperature=plan.temperature)


def _progress(shown: bool, total: int, done: int) -> AbstractContextManager[Advance]:
    return _Bar(total, done) if shown else nullcontext(lambda text, steps: None)


class _Bar:
    """A bar on standard error, with what is being done and the time left; in a log a line a minute."""

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.description}"),
        )
        self.console = Console(stderr=True)
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("", total=total, completed=done)
        self.said = time.monotonic()

    def __enter__(self) -> Advance:
        self.progress.start()
        return self.advance

    def __exit__(self, *error: Any) -> None:
        self.progress.stop()

    def advance(self, text: str, steps: int) -> None:
        self.progress.update(self.task, description=_escape(text), advance=steps)
        if not self.console.is_terminal and time.monotonic() - self.said > MINUTE:
            # A log shows no bar before the end.
            shown = self.progress.tasks[0]
            print(f"{shown.completed:.0f} of {shown.total:.0f}: {text}", file=sys.stderr, flush=True)
            self.said = time.monotonic()


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
