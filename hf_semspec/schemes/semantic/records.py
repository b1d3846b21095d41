"""What became of each segment of a call of `semantic`, for its output."""

import itertools

import torch

from ...engine.call import CallState
from ...engine.outputs import SegmentRecord


class Records:
    """The segments of all rows. Scores stay on the device until the call ends."""

    def __init__(self, call: CallState) -> None:
        self.call = call
        self.rows: list[list[SegmentRecord]] = [[] for _ in call.rows]
        self.rounds: list[torch.Tensor] = []
        self.begun = [0] * call.batch  # where the target's own segment begins
        self.verdict: list[tuple[int, int] | None] = [None] * call.batch
        self.places: list[tuple[SegmentRecord, tuple[int, int]]] = []

    def judged(self, scores: tuple[torch.Tensor, torch.Tensor], by_score: torch.Tensor) -> None:
        """Take a round's P̂, Q̂ and whether these alone let a segment stand, each (rows,)."""
        self.rounds.append(torch.stack([part.double() for part in (*scores, by_score)], dim=1))

    def drafted(self, row: int, index: int, start: int, drafted: int, stands: bool) -> None:
        """Note what became of a drafted segment of `drafted` tokens from `start` on, the `index`-th of the last
        round; call after the commit."""
        end, verdict = self.call.canvas.generated[row], (len(self.rounds) - 1, index)
        if not stands:
            self.begun[row], self.verdict[row] = start, verdict
            return
        self._add(row, start, min(start + drafted, end), "draft", "score", verdict)
        self._add(row, start + drafted, end, "target", "bonus", None)
        self.begun[row] = end

    def close(self, row: int, rule: str = "") -> None:
        """The target's own segment of `row` ends here, if it has one."""
        verdict, end = self.verdict[row], self.call.canvas.generated[row]
        rule = rule or ("first" if verdict is None else "rejected")
        self._add(row, self.begun[row], end, "target", rule, verdict)
        self.begun[row], self.verdict[row] = end, None

    def _add(self, row: int, start: int, end: int, source: str, rule: str, verdict: tuple[int, int] | None) -> None:
        if end > start:
            record = SegmentRecord(start, end, source, rule)
            self.rows[row].append(record)
            if verdict is not None:
                self.places.append((record, verdict))

    def read(self) -> list[list[SegmentRecord]]:
        """The records of every row, with their scores, cut to what the rows hold now."""
        values = torch.cat(self.rounds).tolist() if self.rounds else []
        firsts = list(itertools.accumulate((len(part) for part in self.rounds), initial=0))
        for record, (at, index) in self.places:
            record.target_score, record.draft_score, by_score = values[firsts[at] + index]
            if record.source == "draft" and not by_score:
                record.rule = "top_k"
        for row, generated in enumerate(self.call.canvas.generated):
            self.rows[row] = [record for record in self.rows[row] if record.start < generated]
            if self.rows[row]:
                self.rows[row][-1].end = min(self.rows[row][-1].end, generated)
        return self.rows
