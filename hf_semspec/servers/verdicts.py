"""The target's confidence in a prefix, from the log-probabilities that a server hands out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..schemes.parse.judge import confidence
from .client import Completion, Connection, Law, ServerError, log_sum
from .results import Usage

TOPS = (20, 200)  # log-probabilities asked for, and asked for then; vLLM's --max-logprobs is 20 by default


async def judged(
    target: Connection,
    what: str,
    usage: Usage,
    ids: list[int],
    labels: tuple[Sequence[int], Sequence[int]],
    threshold: float,
) -> float:
    """P(correct) / (P(correct) + P(incorrect)) after `ids`, which end with the question.

    A label that is not among the likeliest ids is asked for with more of them. What is still missing has at most the
    mass that is left. Where the verdict against `threshold` depends on it, the labels are asked for one by one as the
    last token of a prompt; else they count as having none.
    """
    law: Law = {}
    wanted = [*labels[0], *labels[1]]
    for tops in TOPS:
        try:
            answer: Completion = await target.complete(what, usage, ids, 1, logprobs=tops)
        except ServerError as error:
            if tops == TOPS[0] or error.status is None:
                raise
            break  # it hands out no more
        law = answer.tops[0]
        if all(label in law for label in wanted):
            break
    low, high = bounds(law, labels)
    if high >= threshold > low or math.isnan(low):
        for label in wanted:
            if label not in law:
                asked = await target.complete(what, usage, [*ids, label], 1, prompt_logprobs=1)
                law[label] = (asked.prompt[-1] or {})[label]
    return _confidence(law, labels)


def bounds(law: Law, labels: tuple[Sequence[int], Sequence[int]]) -> tuple[float, float]:
    """The least and the greatest confidence that `law`, the likeliest ids alone, leaves possible; nan where no
    label is among them."""
    missing = [[label for label in side if label not in law] for side in labels]
    if not any(missing):
        value = _confidence(law, labels)
        return value, value
    if all(label not in law for side in labels for label in side):
        return math.nan, math.nan
    left = math.log1p(-min(math.exp(log_sum(list(law.values()))), 1 - 1e-9))
    most = min([left, *law.values()])
    low = _confidence({**law, **dict.fromkeys(missing[1], most)}, labels)
    high = _confidence({**law, **dict.fromkeys(missing[0], most)}, labels)
    return low, high


def _confidence(law: Law, labels: tuple[Sequence[int], Sequence[int]]) -> float:
    values = [[law.get(label, -math.inf) for label in side] for side in labels]
    first = len(values[0])
    return confidence(
        torch.tensor([*values[0], *values[1]]), range(first), range(first, first + len(values[1]))
    ).item()
