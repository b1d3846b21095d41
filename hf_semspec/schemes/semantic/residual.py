"""`residual="exact"` of `semantic`: where a drafted segment fell the target writes until what it wrote is kept."""

from collections.abc import Callable, Sequence

import torch

from ...common.warn_once import warn_once
from ...engine.acceptance import RESIDUAL
from ...engine.call import CallState
from ...engine.draft import NoDrafts
from ...engine.misfits import check_laws
from ...engine.processors import BROKEN, Processors
from .reading import Evidence, Reader, RowShelf, Writing
from .rules import acceptance_probability, residual_keep_probability, score_ratio
from .scoring import Scorer
from .segment import Segment

# On average one segment is drawn for each that was drafted, however seldom one is kept. Estimates may never keep one.
MOST_DRAWS = {"sequence": 10_000, "probe": 64, "likelihood": 64}


class Residual:
    """Draws segments from what the target's law has more than the draft's, so that the committed law is the target's.

    Args:
        call: the call.
        target, draft: both models, with the rows' text in their caches.
        scorer: of segments, whoever writes them.
        processors: for what is thrown away again.
        text: of ids.
    """

    def __init__(
        self,
        call: CallState,
        target: RowShelf,
        draft: RowShelf,
        scorer: Scorer,
        processors: Processors,
        text: Callable[[Sequence[int]], str],
    ) -> None:
        self.call, self.target, self.draft, self.scorer = call, target, draft, scorer
        self.processors, self.text = processors, text

    def __call__(
        self, rows: Sequence[int], outcomes: torch.Tensor, segments: Sequence[Segment], limits: Sequence[int]
    ) -> dict[int, list[int]]:
        """The ids of the segment that the target writes, by row, where a drafted one fell.

        Args:
            rows: that have drafted.
            outcomes: (rows,) `RESIDUAL` where the segment fell.
            segments: of every row of the call, without what was drafted.
            limits: the most new tokens of every row.
        """
        found: dict[int, list[int]] = {}
        several, most = len(rows) > 1, MOST_DRAWS[self.scorer.config.scorer]
        for row in rows:  # CHECK has left the whole text in the cache
            self.target.hold(row, self.call.lengths([row])[0])
        rows = [row for row, outcome in zip(rows, outcomes.tolist(), strict=True) if outcome == RESIDUAL]
        for draws in range(most):
            if not rows or (draws and self.call.rules.out_of_time):  # the row ends with the next token
                return found
            self.call.stats.redrawn_segments += len(rows) if draws else 0
            own = {row: segments[row].copy() for row in rows}
            ids, target, draft = self._write(rows, own, limits, several)
            scores = self.scorer([len(row) for row in ids], target, draft)
            stands = acceptance_probability(score_ratio(*scores), self.scorer.config.accept_floor)
            stands = stands * stands.new_tensor([not own[row].thought_ended for row in rows])
            coins = self.call.randomness.uniforms(len(ids))
            kept = (coins < residual_keep_probability(*scores, stands)).tolist()
            found |= dict(zip(rows, ids, strict=True))
            rows = [row for row, keep in zip(rows, kept, strict=True) if not keep]
        if rows:
            warn_once(
                f'residual="exact": none of {most} segments of the target\'s was kept, so the last one stands and the '
                "output is off the target's law: where scores give the draft more than the target even on what the "
                'target writes, nothing is ever kept; train the probes on more text, or take scorer="sequence"',
                late=True,
            )
        return found

    def _write(
        self, rows: Sequence[int], own: dict[int, Segment], limits: Sequence[int], several: bool
    ) -> tuple[list[list[int]], Evidence, Evidence]:
        """A segment of the target's in each of `rows`, which nobody else gets to see, and what both models think of
        it."""
        call, scorer = self.call, self.scorer
        scratch = call.within(role="target", own_text=True, criteria=False)
        self.target.bring(rows)
        turn = Writing(
            scratch,
            self.target.model,
            NoDrafts(),
            rows,
            with_laws=scorer.needs_laws,
            limits=limits,
            pause=lambda row, new: own[row].add(self.text(new), len(new)),
            keep_states=several,
            processors=self.processors,
            with_features=scorer.needs_features,
        )
        turn.run([self.target.cached[row] for row in rows])
        self.target.take(turn, turn.target_states, scratch.lengths(call.rows))
        counts = [scratch.canvas.generated[row] - call.canvas.generated[row] for row in rows]
        for row in rows:
            scratch.canvas.hold(row, call.canvas.generated[row])
            self.target.roll_back(row, call.lengths([row])[0])
            self.draft.roll_back(row, call.canvas.lengths([row])[0])
        self.draft.bring(rows)
        reader = Reader(
            scratch.within(), self.draft.model, self.processors, 0, scorer.needs_laws, scorer.needs_features
        )
        reading = reader(rows, counts, [self.draft.cached[row] for row in rows])
        # What the draft cannot write at all is no error.
        check_laws(2 * int((reading.faults == BROKEN).any()), call.request)
        ids = [row[:count] for row, count in zip(reading.ids.tolist(), counts, strict=True)]
        return ids, turn.evidence(rows), reading.evidence
