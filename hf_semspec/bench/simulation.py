"""A call of `lossless` played: rounds are drawn and their costs added up, so that a way to choose γ can be judged."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from ..engine.costs import CostTable
from ..engine.gamma import CHOICES, ChosenLength, FixedLength
from .prediction import Cost

Acceptance = Callable[[int], float]


def played(
    length: FixedLength,
    acceptance: Acceptance,
    target: Cost,
    draft: Cost,
    *,
    batch: int,
    tokens: int,
    seed: int = 0,
    noise: float = 0.0,
) -> float:
    """What a call costs in which every row gets `tokens` tokens.

    Args:
        length (`FixedLength`): chooses γ. Where it measures, it is told what each round took.
        acceptance (`Callable[[int], float]`): by a token's place in its row, the chance that it stands if drafted.
        target, draft (`Cost`): of a pass over so many tokens in each of so many rows.
        batch (`int`): rows.
        tokens (`int`): of each row.
        seed (`int`): of all draws.
        noise (`float`): a round takes up to so many times as long as it should, but is counted without.
    """
    draws, clock = random.Random(seed), random.Random(seed + 1)
    left, spent = [tokens] * batch, 0.0
    while any(left):
        live = [row for row in range(batch) if left[row]]
        picked = length.pick(len(live))
        width = min(picked, max(left[row] for row in live) - 1)
        verify, step = target(len(live), width + 1), draft(len(live), 1)
        spent += verify + width * step
        if length.costs is not None and not length.costs.fixed:
            length.costs.add(len(live), width + 1, verify * (1 + noise * clock.random()))
            if width:
                length.costs.add_draft(len(live), step * (1 + noise * clock.random()))
        seen = []
        for row in live:
            drafted, kept = min(picked, left[row] - 1), 0
            while kept < drafted and draws.random() < acceptance(tokens - left[row] + kept):
                kept += 1
            if drafted:
                seen.append((drafted, kept))
            left[row] -= kept + 1
        length.observe(seen)
    return spent


def table_of(seconds: Mapping[tuple[str, int, int], float]) -> CostTable:
    """The costs that [`measure_costs`] gives, as `"auto"` takes them."""
    return CostTable.from_dict(profile_of(seconds))


def profile_of(seconds: Mapping[tuple[str, int, int], float]) -> dict[str, list[list[float]]]:
    """The same for a config's `cost_profile`."""
    target = [[rows, width, value] for (role, rows, width), value in seconds.items() if role == "target"]
    draft = [[rows, value] for (role, rows, width), value in seconds.items() if role == "draft" and width == 1]
    return {"target": target, "draft": draft}


def forecast_choice(
    acceptance: float, target: Cost, draft: Cost, costs: CostTable, *, batch: int, tokens: int, calls: int = 32
) -> dict[int | str, float]:
    """Times plain decoding of the same batch: of every fixed γ, and of `"auto"`, over the same played calls.

    Args:
        acceptance (`float`): a.
        target, draft (`Cost`): what calls cost.
        costs (`CostTable`): what `"auto"` takes them for.
        batch, tokens, calls (`int`): rows, tokens of a row, and how often it is played.
    """

    def total(make: Callable[[], FixedLength]) -> float:
        options = {"batch": batch, "tokens": tokens}
        return sum(played(make(), lambda _: acceptance, target, draft, **options, seed=seed) for seed in range(calls))

    plain = calls * tokens * target(batch, 1)
    found: dict[int | str, float] = {}
    for number in CHOICES[1:]:
        found[number] = plain / total(lambda number=number: FixedLength(number))  # type: ignore[misc]
    found["auto"] = plain / total(lambda: ChosenLength(costs))
    return found


def regret(
    acceptance: Acceptance,
    target: Cost,
    draft: Cost,
    make: Callable[[], ChosenLength],
    *,
    batch: int,
    tokens: int,
    seeds: Sequence[int],
    noise: float = 0.0,
) -> float:
    """How much longer calls take by `make()`'s choices than at the best fixed γ in hindsight, 0 for as long."""

    def total(choose: Callable[[], FixedLength]) -> float:
        common = {"batch": batch, "tokens": tokens, "noise": noise}
        return sum(played(choose(), acceptance, target, draft, **common, seed=seed) for seed in seeds)  # type: ignore

    best = min(total(lambda number=number: FixedLength(number)) for number in CHOICES)  # type: ignore[misc]
    return total(make) / best - 1
