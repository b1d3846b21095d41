"""Clocks: contenders timed in turns within one process, and what one forward costs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.cache import cache_argument, new_dynamic_cache

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Report nothing."""


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


def synchronize() -> None:
    """Wait for the accelerator, so that a clock read on the host means what it says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch with `count` CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def forward_seconds(
    passes: dict[str, tuple[PreTrainedModel, int]],
    *,
    batch: int,
    context: int,
    repeats: int,
    rows: dict[str, int] | None = None,
    report: Progress = silent,
) -> dict[str, float]:
    """Median seconds of a forward over n new tokens behind a cached context, the passes taken in turns.

    Args:
        passes (`dict[str, tuple[PreTrainedModel, int]]`): by name, the model and n.
        batch (`int`): rows.
        context (`int`): tokens in the cache before the first pass; each pass adds its own.
        repeats (`int`): timed turns, after one that is dropped.
        rows (`dict[str, int]`, *optional*): by name, another number of rows than `batch`.
        report (`Callable[[str], None]`): told the turn.
    """
    caches: dict[str, Any] = {}
    sizes = rows or {}
    for name, (model, _) in passes.items():
        caches[name] = new_dynamic_cache(model)
        ids = torch.zeros(sizes.get(name, batch), context, dtype=torch.long, device=model.device)
        model(input_ids=ids, **{cache_argument(model): caches[name]})
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(-1, repeats):
        report(f"cost of a forward, turn {max(turn + 1, 0)} of {repeats}")
        for name, (model, width) in passes.items():
            ids = torch.zeros(sizes.get(name, batch), width, dtype=torch.long, device=model.device)
            synchronize()
            start = time.perf_counter()
            model(input_ids=ids, **{cache_argument(model): caches[name]})
            synchronize()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
