"""What a scheme promises before it is run: expected tokens of a round over what the round's forwards cost.

All of it is relative to plain decoding of the same batch, whose step is one target pass over one token a row. c is the
cost of the round's one target pass in these units, ρ that of one draft forward. Time outside the forwards is nothing,
and acceptance is the same at every position: what is measured differs by both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Cost of a pass over `width` tokens in each of `rows` rows: (rows, width) -> multiples of plain decoding's step.
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class Forecast:
    """The best setting of a scheme.

    Args:
        speed_up (`float`): over plain decoding of the same batch.
        num_draft_tokens (`int`): γ.
        num_particles (`int`): N of smc, 1 otherwise.
        tokens (`float`): expected new tokens a row and round.
        break_even (`float`): of a scheme that keeps or drops whole pieces, the share of the drafted tokens that must
            be kept for any gain; above 1 there is none.
    """

    speed_up: float
    num_draft_tokens: int
    num_particles: int = 1
    tokens: float = math.nan
    break_even: float = math.nan


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """E[tokens] of a round: Σ a^t for t from 0 to γ, the accepted ones and the one that ends the round.

    Args:
        acceptance (`float`): a in [0, 1], the chance that a drafted token passes, alike at every position.
        num_draft_tokens (`int`): γ >= 0.
    """
    return sum(acceptance**t for t in range(num_draft_tokens + 1))


def speed_up(tokens: float, num_draft_tokens: int, target_cost: float, draft_cost: float) -> float:
    """`tokens` / (c + γρ)."""
    return tokens / (target_cost + num_draft_tokens * draft_cost)


def best_verified(
    acceptance: float, target: Cost, draft: Cost, *, batch: int, lengths: Iterable[int], keeps: float = 1.0
) -> Forecast:
    """The γ of `lengths` at which drafting and verifying promises most.

    Args:
        acceptance (`float`): a: of the argmaxes if greedy, Σ min(p, q) if sampling.
        target, draft (`Cost`): c and ρ.
        batch (`int`): rows.
        lengths (`Iterable[int]`): the γ to choose from.
        keeps (`float`): share of the accepted tokens that an extra rejection leaves, 1 without one.
    """
    forecasts = []
    for length in lengths:
        tokens = expected_tokens(acceptance * keeps, length)
        gain = speed_up(tokens, length, target(batch, length + 1), draft(batch, 1))
        forecasts.append(Forecast(gain, length, 1, tokens))
    return max(forecasts, key=lambda each: each.speed_up)


def best_particles(
    chi2: Mapping[int, float],
    target: Cost,
    draft: Cost,
    *,
    batch: int,
    numbers: Sequence[int],
    least_share: float = 0.5,
) -> Forecast | None:
    """The fastest γ and N of smc whose particles keep their worth; `None` where none do.

    Nothing is rejected, so a round is worth γ+1 tokens whatever the draft: what a poor draft costs is the weights. On
    one block ESS/N is about 1/(1 + χ²); settings below `least_share` are left out.

    Args:
        chi2 (`Mapping[int, float]`): by γ, χ² of a block.
        target, draft (`Cost`): c and ρ.
        batch (`int`): prompts.
        numbers (`Sequence[int]`): the N to choose from; 1 is the draft alone and has no place here.
        least_share (`float`): the smallest ESS/N of a block.
    """
    forecasts = [
        Forecast(
            speed_up(length + 1, length, target(batch * number, length + 1), draft(batch * number, 1)),
            length,
            number,
            length + 1.0,
        )
        for length, value in chi2.items()
        if 1 / (1 + value) >= least_share
        for number in numbers
    ]
    return max(forecasts, key=lambda each: each.speed_up, default=None)


def whole_pieces(length: int, target: Cost, draft: Cost, *, batch: int, bonus: int) -> Forecast:
    """What it gains to draft pieces of `length` tokens, which one target pass judges, if every one is kept.

    If a share k of the tokens is kept and the target writes the others itself, these cost a step each: in all
    c + Lρ + (1 - k)L steps for L tokens, a gain from k = ρ + c/L on.

    Args:
        length (`int`): L, of an answer (parse) or of a segment (semantic).
        target, draft (`Cost`): c and ρ.
        batch (`int`): rows.
        bonus (`int`): tokens that the pass gives besides.
    """
    pass_cost, step_cost = target(batch, length + 1), draft(batch, 1)
    gain = speed_up(length + bonus, length, pass_cost, step_cost)
    return Forecast(gain, 0, tokens=length + bonus, break_even=step_cost + pass_cost / length)


def interpolated(costs: Mapping[tuple[int, int], float]) -> Cost:
    """A [`Cost`] from measured (rows, width) pairs: bilinear between them, in tokens beyond the largest.

    A pass over n tokens in each of r rows that lies outside what was measured costs as much more as it has more
    tokens, which is right once a pass is bound by arithmetic.
    """
    rows = sorted({row for row, _ in costs})
    widths = sorted({width for _, width in costs})

    def cost(row: int, width: int) -> float:
        inner = min(row, rows[-1]), min(width, widths[-1])
        low, high, part = _between(rows, inner[0])
        left, right, along = _between(widths, inner[1])
        first = costs[low, left] * (1 - along) + costs[low, right] * along
        second = costs[high, left] * (1 - along) + costs[high, right] * along
        return (first * (1 - part) + second * part) * (row * width) / (inner[0] * inner[1])

    return cost


def _between(values: Sequence[int], value: int) -> tuple[int, int, float]:
    for low, high in zip(values, values[1:], strict=False):
        if low <= value <= high:
            return low, high, (value - low) / (high - low)
    return values[0], values[0], 0.0
