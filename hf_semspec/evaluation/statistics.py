"""Intervals and tests for answers that are right or wrong; `scipy` is imported where it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

CONFIDENCE = 0.95
RESAMPLES = 2000
Interval = tuple[float, float]


def wilson(successes: float, trials: int) -> Interval:
    """Wilson's 95 % interval of a share, `trials` independent ones.

    Args:
        successes (`float`): in [0, `trials`]; a sum of shares need not be whole.
        trials (`int`): at least 1.
    """
    from scipy.special import ndtri

    z = float(ndtri(0.5 + CONFIDENCE / 2))
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    # At the ends the bound is the share itself, which rounding would miss.
    return (centre - half if successes > 0 else 0.0), (centre + half if successes < trials else 1.0)


def mcnemar(better: int, worse: int) -> float:
    """McNemar's exact two-sided p-value: of the pairs that differ, are as many better as worse?

    Args:
        better (`int`): pairs in which only the first is right.
        worse (`int`): pairs in which only the second is. Pairs that agree say nothing.
    """
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse, 0.5).pvalue) if better + worse else 1.0


def bootstrap(values: Sequence[float], statistic: Callable[..., Any] | None = None) -> Interval | None:
    """95 % percentile bootstrap interval of a statistic over units that are independent (prompts, batches).

    Args:
        values (`Sequence[float]`): one value for each unit.
        statistic (`Callable`, *optional*): vectorized, with an `axis`; the mean by default.

    Returns:
        The interval; `None` where nothing varies or there is one unit only, which tells nothing.
    """
    if len(set(values)) < 2:
        return None
    import numpy
    from scipy.stats import bootstrap as resample

    found = resample(
        (numpy.asarray(values, dtype=float),),
        statistic or numpy.mean,
        n_resamples=RESAMPLES,
        batch=200,
        vectorized=True,
        method="percentile",
        random_state=numpy.random.default_rng(0),
    )
    # scipy's own interval may lie one rounding outside of the values; numpy's quantile of equal values is that value.
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(found.bootstrap_distribution, [tail, 1 - tail])
    return float(low), float(high)


def share_interval(means: Sequence[float], samples: int) -> tuple[Interval, str]:
    """The interval of an accuracy, and how it was found.

    Args:
        means (`Sequence[float]`): for each prompt the share of its samples that are right.
        samples (`int`): samples of each prompt. With one, Wilson's interval holds; several of one prompt are not
            independent, so prompts are resampled. Where all prompts are alike there is nothing to resample, and
            Wilson's interval counts each prompt once, whatever its samples.
    """
    found = bootstrap(means) if samples > 1 else None
    if found is not None:
        return found, "bootstrap over prompts"
    return wilson(sum(means), len(means)), "Wilson"
