"""Slow, literal transcriptions of the resampling and the whole algorithm of `smc`, in plain Python.

Laws are lists of floats. p is the target's law, q the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.reference import Law


def log_sum(values: Sequence[float]) -> float:
    """log Σ exp."""
    peak = max(values)
    return peak if peak == -math.inf else peak + math.log(math.fsum(math.exp(v - peak) for v in values))


def share(log_weights: Sequence[float]) -> Law:
    """W = softmax(log_w)."""
    return [math.exp(w - log_sum(log_weights)) for w in log_weights]


def effective_sample_size(log_weights: Sequence[float]) -> float:
    return 1 / math.fsum(w * w for w in share(log_weights))


def invert(point: float, law: Law) -> int:
    """The cell of `law` that holds `point` of [0, 1)."""
    last = max(i for i, w in enumerate(law) if w > 0)
    for i in range(last):
        if point < math.fsum(law[: i + 1]):
            return i
    return last


def resampling_points(law: Law, method: str, uniforms: Sequence[float]) -> tuple[list[int], Law, list[float]]:
    """Sure counts, the law that the rest is drawn from, and the points it is drawn at."""
    number = len(law)
    if method == "systematic":
        return [0] * number, law, [(uniforms[0] + k) / number for k in range(number)]
    if method == "stratified":
        return [0] * number, law, [(uniforms[k] + k) / number for k in range(number)]
    if method == "multinomial":
        return [0] * number, law, list(uniforms)
    sure = [math.floor(number * w) for w in law]
    missing = number - sum(sure)
    rest = [(number * w - s) / missing for w, s in zip(law, sure, strict=True)] if missing else law
    return sure, rest, list(uniforms[:missing])


def resampling_counts(law: Law, method: str, uniforms: Sequence[float]) -> list[int]:
    counts, rest, points = resampling_points(law, method, uniforms)
    for point in points:
        counts[invert(point, rest)] += 1
    return counts


def survivors_first(counts: Sequence[int]) -> list[int]:
    """Survivors stay in their slot; only dead slots are overwritten, in order, by the spare copies in order."""
    spare = [i for i, count in enumerate(counts) for _ in range(count - 1)]
    return [i if count else spare.pop(0) for i, count in enumerate(counts)]


Text = list[int]


SMCRound = tuple[list[list[int]], list[int], list[float]]


def smc(
    first: list[int],
    rounds: Sequence[SMCRound],
    log_p: Callable[[Text], list[float]],
    log_q: Callable[[Text], list[float]],
    *,
    room: int,
    eos: set[int],
    threshold: float = 0.5,
    method: str = "systematic",
    alpha: float = 1.0,
    log_z: float = 0.0,
) -> tuple[list[Text], list[float], float, list[float], list[list[int]]]:
    """The algorithm box for one prompt: every draw is given, every law asked for by its whole text.

    Args:
        first: x0 of each particle.
        rounds: for each, the drafted ids and the bonus of each particle, and the uniforms of the resampling.
        log_p, log_q: the laws after a text of new tokens.
        room: the most new tokens.

    Returns:
        texts, log-weights, log-evidence, ESS of each round, ancestors of each round.
    """
    number = len(first)
    texts, log_w, ess, ancestors = [[x] for x in first], [0.0] * number, [], []

    def finished(text: Text) -> bool:
        return text[-1] in eos or len(text) == room

    for drafts, bonus, uniforms in rounds:
        for n in range(number):
            if finished(texts[n]):
                continue
            for d in drafts[n]:
                log_w[n] += alpha * log_p(texts[n])[d] - log_q(texts[n])[d]
                texts[n].append(d)
                if finished(texts[n]):
                    break
            else:
                log_w[n] += log_sum([alpha * z for z in log_p(texts[n])])
                texts[n].append(bonus[n])
        ess.append(effective_sample_size(log_w))
        ancestors.append(list(range(number)))
        if number >= 2 and ess[-1] < threshold * number * (1 - 1e-6) and not all(map(finished, texts)):
            log_z += log_sum(log_w) - math.log(number)
            ancestors[-1] = survivors_first(resampling_counts(share(log_w), method, uniforms))
            texts = [list(texts[a]) for a in ancestors[-1]]
            log_w = [0.0] * number
    return texts, log_w, log_z + log_sum(log_w) - math.log(number), ess, ancestors
