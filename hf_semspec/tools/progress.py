"""A bar on standard error for a job of many lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MINUTE = 60.0
Advance = Callable[[str, int, int], None]


@contextmanager
def progress_bar(shown: bool, total: int | None) -> Iterator[Advance]:
    """Inside the block a bar with tokens a second and the time left; in a log a line a minute. It is told what runs,
    how many lines are behind it, and how many tokens were made for them."""
    if not shown:
        yield lambda text, lines, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining(), TextColumn("{task.description}")
    start = said = time.monotonic()
    made = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def advance(text: str, lines: int, tokens: int) -> None:
            nonlocal start, said, made
            now = time.monotonic()
            start = start if made else min(now, start) if tokens else now  # reading and loading are not decoding
            made += tokens
            text = text or f"{made / max(now - start, 1e-9):.0f} tokens/s" if made else text
            progress.update(task, description=text, advance=lines)
            if not console.is_terminal and now - said > MINUTE:
                print(f"{progress.tasks[0].completed:.0f} of {total or '?'}: {text}", file=sys.stderr, flush=True)
                said = now

        yield advance
