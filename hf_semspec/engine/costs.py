"""What rounds of a pair take, as a table by rows and width, and as the profile of a config."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any


class CostTable:
    """What rounds of a pair take, in seconds: the target's pass by rows and width, a draft forward by rows.

    Of what was measured several times the median of the latest counts; what was measured a few times costs no more
    than wider passes. Between rows and widths it is interpolated; beyond the widest it goes on as it rises there.

    Calls in several threads may share it.

    Args:
        fixed: whether nothing is measured any more.
    """

    RECENT, SURE, REPEATS, TRIAL, FRESH = 9, 5, 2, 3, 256

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
        passes, draft = self._along(low, widths), median_low(self.drafts[low])
        if low < rows < high:
            part, others = (rows - low) / (high - low), self._along(high, widths)
            passes = [one + part * (other - one) for one, other in zip(passes, others, strict=True)]
            draft += part * (median_low(self.drafts[high]) - draft)
        return passes, draft

    def _along(self, rows: int, widths: Sequence[int]) -> list[float]:
        points, found = self._points(rows), []
        for width in widths:
            place = min(max(bisect_right(points, width, key=lambda point: point[0]), 1), len(points) - 1)
            (low, first), (high, second) = points[place - 1 : place + 1]
            slope = (second - first) / (high - low)
            found.append(second + max(slope, 0.0) * (width - high) if width > high else first + slope * (width - low))
        return found

    def _points(self, rows: int) -> list[tuple[int, float]]:
        """Widths and seconds, in order."""
        found = sorted((width, values) for (other, width), values in list(self.passes.items()) if other == rows)
        points, least = [], math.inf
        for width, values in reversed(found):
            seconds = median_low(values)
            least = min(least, seconds)
            # The machine may have been busy the few times; a pass that is slow every time is slow.
            points.append((width, seconds if self.fixed or len(values) >= self.SURE else least))
        return points[::-1]

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
