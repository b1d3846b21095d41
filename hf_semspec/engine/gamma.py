"""γ by itself: the draft length that promises most tokens for its time, from what stood so far and what rounds cost.

A round of γ drafted tokens a row gives 1 + Σ s_i tokens, with s_i the chance that at least i of them stand, and takes
c(B, γ+1) + γρ(B). Nothing here reads a clock or draws: the same observations give the same choices. All of it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

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


class CostTable:
    """What rounds of a pair take, in seconds: the target's pass by rows and width, a draft forward by rows.

    Of what was measured several times the median of the latest counts. Between rows and widths it is interpolated;
    beyond the widest it goes on as it rises there.

    Calls in several threads may share it.

    Args:
        fixed: whether nothing is measured any more.
    """

    RECENT, REPEATS, TRIAL, FRESH = 9, 2, 3, 256

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed
        self.passes: dict[tuple[int, int], tuple[float, ...]] = {}
        self.drafts: dict[int, tuple[float, ...]] = {}
        self.rounds = 0
        self.seen: dict[int, int] = {}  # by rows, the round in which plain decoding was last measured
        self.told = False  # whether it has been said that nothing is gained

    def add(self, rows: int, width: int, seconds: float) -> None:
        """A round's time but for its drafting, of a pass over `width` tokens in each of `rows` rows."""
        self.rounds += 1
        if width == 1:
            self.seen[rows] = self.rounds
        self.passes[rows, width] = (*self.passes.get((rows, width), ()), seconds)[-self.RECENT :]

    def add_draft(self, rows: int, seconds: float) -> None:
        """The time of a draft forward, with what picks a token of it."""
        self.drafts[rows] = (*self.drafts.get(rows, ()), seconds)[-self.RECENT :]

    def wanted(self, rows: int) -> int | None:
        """The γ that is to be measured before anything can be chosen for so many rows, or anew; `None` if none is."""
        if self.fixed:
            return None
        if not self._is_near(rows):
            if len(self.passes.get((rows, 1), ())) < self.REPEATS:
                return 0
            return self.TRIAL
        last = self.seen.get(rows)
        return 0 if last is not None and self.rounds - last >= self.FRESH else None

    def _is_near(self, rows: int) -> bool:
        known = self._known()
        near = any(2 * other > rows and 2 * rows > other for other in known)
        return near or (bool(known) and known[0] <= rows <= known[-1])

    def _known(self) -> list[int]:
        """The rows of which enough is measured."""
        enough = 1 if self.fixed else self.REPEATS
        counts: dict[int, int] = {}
        for (rows, width), values in list(self.passes.items()):
            if width > 1:
                counts[rows] = counts.get(rows, 0) + len(values)
        return sorted(
            rows
            for rows, values in list(self.drafts.items())
            if min(len(values), len(self.passes.get((rows, 1), ())), counts.get(rows, 0)) >= enough
        )

    def curves(self, rows: int, widths: Sequence[int]) -> tuple[list[float], float]:
        """Seconds of the target's passes of `widths` over so many rows, and of a draft forward."""
        known = self._known()
        low = max((other for other in known if other <= rows), default=known[0])
        high = min((other for other in known if other >= rows), default=known[-1])
        part = (rows - low) / (high - low) if low < rows < high else 0.0
        first, second = ([self._pass(other, width) for width in widths] for other in (low, high))
        drafts = [median_low(self.drafts[other]) for other in (low, high)]
        passes = [a + part * (b - a) for a, b in zip(first, second, strict=True)]
        return passes, drafts[0] + part * (drafts[1] - drafts[0])

    def _pass(self, rows: int, width: int) -> float:
        points = sorted(
            (own, median_low(values)) for (other, own), values in list(self.passes.items()) if other == rows
        )
        low = max((point for point in points if point[0] <= width), default=points[0])
        high = min((point for point in points if point[0] > width), default=None)
        if high is None:
            low, high = points[-2:]
            return max(high[1] + max(high[1] - low[1], 0.0) / (high[0] - low[0]) * (width - high[0]), high[1])
        return low[1] + (high[1] - low[1]) / (high[0] - low[0]) * (width - low[0])

    def to_dict(self) -> dict[str, Any]:
        """`target`, lists of rows, width and seconds, and `draft`, lists of rows and seconds."""
        return {
            "target": [[*place, median_low(values)] for place, values in sorted(self.passes.items())],
            "draft": [[rows, median_low(values)] for rows, values in sorted(self.drafts.items())],
        }

    @classmethod
    def from_dict(cls, profile: Mapping[str, Any]) -> CostTable:
        """The table that `profile` holds, see [`check_profile`]."""
        table = cls(fixed=True)
        for rows, width, seconds in profile["target"]:
            table.add(rows, width, seconds)
        for rows, seconds in profile["draft"]:
            table.add_draft(rows, seconds)
        return table


def check_profile(profile: Any) -> None:
    """Refuse what is no profile of costs.

    Raises:
        ValueError: the message says what is wrong with it.
    """
    form = (
        '`cost_profile` must be what `hf-semspec check --save FILE` writes, {"target": [[rows, width, seconds], ...], '
        '"draft": [[rows, seconds], ...], "pair": {...}}'
    )
    if not isinstance(profile, Mapping) or not {"target", "draft"} <= profile.keys() <= {"target", "draft", "pair"}:
        raise ValueError(f"{form}, but has other entries or is no dict.")
    if not isinstance(profile.get("pair", {}), Mapping):
        raise ValueError(f'{form}, but its "pair" is no dict.')
    for role, size in (("target", 3), ("draft", 2)):
        entries = profile[role]
        if not _listed(entries) or not all(_listed(entry) and len(entry) == size for entry in entries):
            raise ValueError(f'{form}, but its "{role}" is no list of lists of {size} numbers.')
        for *places, seconds in entries:
            whole = all(isinstance(place, int) and not isinstance(place, bool) and place >= 1 for place in places)
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not whole or not number or not 0 < seconds < math.inf:
                raise ValueError(
                    f"{form}, with rows and widths of at least 1 and finite seconds above 0, but its "
                    f'"{role}" holds {[*places, seconds]!r}.'
                )
    if not CostTable.from_dict(profile)._known():
        raise ValueError(f"{form}, but for no number of rows it has the widths 1 and another, and the draft.")


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


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
    first, and half as often each time one fails.

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
        self.tried = False
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
            self.wait, self.patience, self.tried = None, 1.0, False
            return best
        trial = max(CHOICES[1:], key=rates.__getitem__)
        if self.wait is None or self.tried:
            passes, draft = self.costs.curves(rows, (1, trial + 1))
            loss = (rates[0] / rates[trial] - 1) * (passes[1] + trial * draft) / passes[0]  # in plain steps
            self.patience *= 2 if self.tried else 1
            self.wait, self.tried = self.patience * max(loss / self.PROBING, self.LEAST_WAIT), False
        if self.wait > 0:
            self.wait -= 1
            return 0
        self.survival.forget(self.TRUST)
        self.tried = True
        return trial

    def observe(self, rounds: Iterable[tuple[int, int]]) -> None:
        """How many tokens were drafted for each row, and how many of them stand."""
        self.survival.forget()
        for drafted, kept in rounds:
            self.survival.observe(drafted, kept)

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
