"""What forwards of a pair cost, at the rows and widths that a forecast asks for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.cache import cache_argument
from ..engine.mixers import has_recurrent_layers
from ..engine.model import CachedModel
from ..engine.stock_caches import new_dynamic_cache
from ..evaluation.decoding import synchronize
from .prediction import expected_tokens, speed_up
from .progress import Progress, silent
from .rivals import Way
from .subject import Subject

Places = Iterable[tuple[int, int]]
Seconds = dict[tuple[str, int, int], float]


def measure_costs(
    subject: Subject, target: Places, draft: Places, *, context: int, repeats: int, report: Progress = silent
) -> Seconds:
    """Median seconds of a forward behind a cached context: (`target` or `draft`, rows, width) -> seconds.

    Args:
        subject (`Subject`): the pair.
        target, draft (`Iterable[tuple[int, int]]`): rows and tokens a row of the passes of either model.
        context (`int`): tokens in the cache of every row.
        repeats (`int`): timed turns.
        report (`Callable[[str], None]`): told the turn.
    """
    models = {"target": subject.model, "draft": subject.draft}
    wanted = [(role, *place) for role, places in (("target", target), ("draft", draft)) for place in sorted({*places})]
    found: Seconds = {}
    # One number of rows at a time: every pass has a cache of its own.
    for rows in sorted({rows for _, rows, _ in wanted}):
        here = [each for each in wanted if each[1] == rows]
        passes = {f"{role} {width}": (models[role], width) for role, _, width in here}
        seconds = forward_seconds(passes, batch=rows, context=context, repeats=repeats, report=report)
        found |= {each: seconds[f"{each[0]} {each[2]}"] for each in here}
    return found


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
    sizes = rows or {}
    forwards = {name: _forward(model, sizes.get(name, batch), context) for name, (model, _) in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(-1, repeats):
        report(f"cost of a forward, turn {max(turn + 1, 0)} of {repeats}")
        for name, (_, width) in passes.items():
            synchronize()
            start = time.perf_counter()
            forwards[name](width)
            synchronize()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _forward(model: PreTrainedModel, rows: int, context: int) -> Callable[[int], None]:
    """A forward over so many new tokens behind a context that is read here.

    Where states have to be put back, half of a block stands, so that the time holds what that takes.
    """
    if not has_recurrent_layers(model):
        cache: Any = new_dynamic_cache(model)

        def forward(width: int) -> None:
            ids = torch.zeros(rows, width, dtype=torch.long, device=model.device)
            model(input_ids=ids, **{cache_argument(model): cache})

        forward(context)
        return forward
    reader, length = CachedModel(model, rows, context), 0

    def read(width: int, stand: int | None = None) -> None:
        nonlocal length
        ids = torch.zeros(rows, width, dtype=torch.long, device=model.device)
        reader.feed(ids, [length + width] * rows, 1)
        length += (width + 1) // 2 if stand is None else stand
        reader.settle([length] * rows)

    read(context, context)
    return read


def needed(ways: Iterable[Way], batch: int) -> dict[str, list[tuple[int, int]]]:
    """The passes that [`forecast`] of these ways asks for."""
    target, draft = {(batch, 1)}, set()
    for way in ways:
        if way.length is not None and way.kind not in ("lookup", "ensemble") and not by_text(way):
            rows = (1 if way.alone else batch) * way.number
            target.add((rows, way.length + 1))
            draft.add((rows, 1))
    return {"target": sorted(target), "draft": sorted(draft)}


def by_text(way: Way) -> bool:
    """Whether it drafts by n-grams, whose acceptance is up to the text."""
    return bool(way.options.get("draft", "model") != "model")


def forecast(
    way: Way, batch: int, seconds: Mapping[tuple[str, int, int], float], acceptance: Mapping[str, float]
) -> float | None:
    """The speed-up over plain decoding of the batch that the way's forwards allow; `None` where no formula is known.

    Known are drafting by the model and verifying one chain (a of the mode, less what easd rejects), smc, and segments
    of semantic that are all kept.

    Args:
        way (`Way`): who.
        batch (`int`): rows of the batch; a way that takes one prompt at a time is set against the whole batch.
        seconds (`Mapping`): see [`measure_costs`].
        acceptance (`Mapping[str, float]`): `greedy` and `sampling`: a; `easd`: the share of tokens that its rule
            leaves of those that passed, at its default thresholds.
    """
    if way.length is None or way.kind not in ("assisted", "lossless", "easd", "smc", "semantic") or by_text(way):
        return None
    if way.kind in ("smc", "semantic"):
        tokens = way.length + 1.0
    elif way.number > 1:
        return None
    else:
        keeps = acceptance["easd"] if way.keeps is None else way.keeps
        tokens = expected_tokens(acceptance[way.mode] * keeps, way.length)
    together = 1 if way.alone else batch
    rows = together * way.number
    step = seconds["target", batch, 1]
    costs = seconds["target", rows, way.length + 1] / step, seconds["draft", rows, 1] / step
    # Plain decoding's step is worth `batch` tokens, a round here `together` times its own.
    return speed_up(tokens, way.length, *costs) * together / batch
