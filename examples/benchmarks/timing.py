"""Ways to decode, timed in turns within one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_semspec.bench.progress import Progress, silent
from hf_semspec.evaluation.decoding import synchronize


@dataclass
class Contender:
    """One way to decode the same text, and the times it took.

    Args:
        name (`str`): unique within a table.
        run (`Callable[[], Any]`): decodes once; what it returns last is kept in `result`.
        seconds (`list[float]`): wall time of each timed run.
        cpu_seconds (`list[float]`): CPU time of the process over the same runs, all threads together.
    """

    name: str
    run: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    result: Any = None


def interleave(contenders: Sequence[Contender], repeats: int, *, warmup: int = 1, report: Progress = silent) -> None:
    """Run all contenders once a turn, A B C A B C, so that a drift of the machine meets each alike.

    Args:
        contenders (`Sequence[Contender]`): timed in place.
        repeats (`int`): timed turns.
        warmup (`int`): turns before them whose times are dropped.
        report (`Callable[[str], None]`): told the contender and the turn before each run.
    """
    gc.collect()
    for turn in range(-warmup, repeats):
        for contender in contenders:
            report(f"{contender.name}, turn {max(turn + 1, 0)} of {repeats}")
            synchronize()
            cpu, wall = time.process_time(), time.perf_counter()
            contender.result = contender.run()
            synchronize()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= 0:
                contender.seconds.append(wall)
                contender.cpu_seconds.append(cpu)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the turns of ours / theirs: both parts of a ratio come from the same turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch with `count` CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
