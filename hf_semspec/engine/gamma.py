"""γ by itself: the draft length that promises most tokens for its time, from what stood so far and what rounds cost.

A round of γ drafted tokens a row gives 1 + Σ s_i tokens, with s_i the chance that at least i of them stand, and takes
c(B, γ+1) + γρ(B). Nothing here reads a clock or draws: the same observations give the same choices. All of it is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .costs import CostTable

CHOICES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
LONGEST = max(CHOICES)


class Survival:
    """How likely at least i drafted tokens stand, from what has stood.

    Every depth has a chance of its own that one token more stands, drawn towards that of all depths, which begins as a
    Beta law. Rounds long gone count less.
    """

    PASSED, FAILED = 2.0, 0.7
    DEPTH_WEIGHT = 12.0
    MEMORY = 0.97  # of a round, a round later

    def __init__(self) -> None:
        self.passed = [0.0] * LONGEST
        self.failed = [0.0] * LONGEST

    def observe(self, drafted: int, kept: int) -> None:
        """Of `drafted` tokens of a row `kept` stand."""
        for depth in range(min(kept, LONGEST)):
            self.passed[depth] += 1
        if kept < min(drafted, LONGEST):
            self.failed[kept] += 1

    def forget(self, factor: float = MEMORY) -> None:
        """Let all that was seen count less."""
        self.passed = [count * factor for count in self.passed]
        self.failed = [count * factor for count in self.failed]

    def curve(self) -> list[float]:
        """s_1..s_16."""
        passed, failed = self.PASSED + sum(self.passed), self.FAILED + sum(self.failed)
        chance, curve = 1.0, []
        for own_passed, own_failed in zip(self.passed, self.failed, strict=True):
            common = passed / (passed + failed)
            passed += 1  # where a token stands, those before it did, which speaks for all
            chance *= (own_passed + self.DEPTH_WEIGHT * common) / (own_passed + own_failed + self.DEPTH_WEIGHT)
            curve.append(chance)
        return curve


class FixedLength:
    """γ is a number."""

    costs: CostTable | None = None

    def __init__(self, length: int) -> None:
        self.length = length

    def pick(self, rows: int) -> int:
        """γ for the next round of `rows` rows."""
        return self.length

    def observe(self, rounds: Iterable[tuple[int, int]]) -> None:
        """How many tokens were drafted for each row, and how many of them stand."""


class ChosenLength(FixedLength):
    """γ for one round after the other, from [`CHOICES`]; 0 is plain decoding.

    While that promises most, drafting is tried now and then, so rarely that the trials take `PROBING` of the time at
    first, half as often after each one that fails, and again at once after one that pays.

    Args:
        costs: of the pair.
        agree: what all who take part in the call make of a choice.
    """

    HYSTERESIS = 1.01
    PROBING, LEAST_WAIT = 0.005, 8
    TRUST = 0.5  # what was seen before counts so much beside a trial

    def __init__(self, costs: CostTable, agree: Callable[[int], int] = int) -> None:
        self.costs: CostTable = costs
        self.agree = agree
        self.survival = Survival()
        self.last: int | None = None
        self.wait: float | None = None  # rounds until the next trial; `None` while drafting is on
        self.patience = 1.0
        self.needed: float | None = None  # tokens of a row that the trial that runs must give, to be worth it
        self.won = 0.0  # those that the last drafted round gave
        self.rows = 1
        self.rounds: dict[int, int] = {}

    def rates(self, rows: int) -> dict[int, float]:
        """Expected tokens of a row for each second of a round, by γ."""
        curve = self.survival.curve()
        passes, draft = self.costs.curves(rows, [length + 1 for length in CHOICES])
        return {
            length: (1 + sum(curve[:length])) / (seconds + length * draft)
            for length, seconds in zip(CHOICES, passes, strict=True)
        }

    def pick(self, rows: int) -> int:
        """γ for the next round of `rows` rows."""
        length = self.costs.wanted(rows)
        if length is None:
            length = self._best(rows)
        length, self.rows = self.agree(length), rows
        self.rounds[length] = self.rounds.get(length, 0) + 1
        return length

    def _best(self, rows: int) -> int:
        rates = self.rates(rows)
        best = max(CHOICES, key=rates.__getitem__)
        if self.last is not None and rates[best] < self.HYSTERESIS * rates[self.last]:
            best = self.last
        self.last = best
        if best > 0:
            self.wait, self.patience, self.needed = None, 1.0, None
            return best
        trial = max(CHOICES[1:], key=rates.__getitem__)
        passes, draft = self.costs.curves(rows, (1, trial + 1))
        cost = (passes[1] + trial * draft) / passes[0]  # in plain steps
        if self.wait is None or self.needed is not None:
            failed = self.needed is not None and self.won < self.needed
            self.patience *= 2 if failed else 1
            loss = (rates[0] / rates[trial] - 1) * cost
            again = self.needed is not None and not failed
            self.wait = 0 if again else self.patience * max(loss / self.PROBING, self.LEAST_WAIT)
            self.needed = None
        if self.wait > 0:
            self.wait -= 1
            return 0
        self.survival.forget(self.TRUST)
        self.needed, self.won = cost, 0.0
        return trial

    def observe(self, rounds: Iterable[tuple[int, int]]) -> None:
        """How many tokens were drafted for each row, and how many of them stand."""
        self.survival.forget()
        rows = list(rounds)
        for drafted, kept in rows:
            self.survival.observe(drafted, kept)
        self.won = sum(kept + 1 for _, kept in rows) / max(len(rows), 1)

    @property
    def is_off(self) -> bool:
        """Whether plain decoding promises most."""
        return self.last == 0

    def to_dict(self) -> dict[str, Any]:
        """What was chosen, and what it was chosen by: `rounds` by γ, whether drafting was `off` at the end, `survival`
        by depth, and the seconds of the last rounds' rows: `target_seconds` by width, `draft_seconds` of a forward."""
        found: dict[str, Any] = {"rounds": dict(sorted(self.rounds.items())), "off": self.is_off}
        found["survival"] = self.survival.curve()
        if self.last is not None:
            passes, draft = self.costs.curves(self.rows, [length + 1 for length in CHOICES])
            widths = [length + 1 for length in CHOICES]
            found |= {"target_seconds": dict(zip(widths, passes, strict=True)), "draft_seconds": draft}
        return found
