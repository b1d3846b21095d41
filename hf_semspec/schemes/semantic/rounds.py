"""The state of one call of `semantic`: each row drafts, is checked, or is written by the target, in its own phase."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ...drafts.choose import asks_for_model
from ...drafts.choose import drafter as make_drafter
from ...engine.acceptance import BONUS, RESIDUAL, Acceptance
from ...engine.call import CallState
from ...engine.draft import Draft, Drafter, NoDrafts
from ...engine.mapped_model import MappedModel
from ...engine.misfits import warn_of_low_acceptance
from ...engine.model import context_of, warn_of_context
from ...engine.outputs import DecodingStats
from ...engine.processors import Processors
from ...engine.recorder import mark_segments
from ...engine.request import Request
from ...engine.text import TokenTexts, find_tokenizer, no_texts
from ..revising import make_rounds
from .config import TEXT_USE, SemanticConfig
from .reading import Reader, Reading, RowShelf, Turn, Writing
from .records import Records
from .residual import Residual
from .rules import accepted, leading_matches, score_ratio
from .scoring import Scorer
from .segment import Segment

DRAFT, REVISE, FINISH, ENDED = "draft", "revise", "finish", "ended"


class SegmentRounds:
    """One call, from the prompts to the output. Between turns every row is in one phase.

    Args:
        request: the call.
    """

    def __init__(self, request: Request) -> None:
        self.config: SemanticConfig = request.scheme
        self.call = call = CallState(request)
        config, batch = self.config, call.batch
        self.context = context_of(request.draft) or call.longest
        model = MappedModel(request.draft, call.vocabulary, call.device, batch, min(call.longest, self.context) - 1)
        self.target = RowShelf(call.target(), call.inputs.cached)
        self.draft = RowShelf(model, [0] * batch)
        self.scorer = Scorer(call, config)
        self.reader = Reader(
            call,
            self.target.model,
            Processors(request.processors),
            config.top_k_accept,
            self.scorer.needs_laws,
            self.scorer.needs_features,
        )
        self.processors = Processors(request.processors).copies()
        self.reviser = make_rounds(call, config.revise_with)
        self.drafting = call.new_stats()
        self.no_drafts = NoDrafts(model.own_vocabulary)  # so that ids the draft lacks are counted
        self.text: Callable[[Sequence[int]], str] = no_texts
        if config.reads_text:
            self.text = TokenTexts(find_tokenizer(request.model, request.tokenizer, TEXT_USE))
        parts = call, self.target, self.draft, self.scorer, self.processors, self.text
        self.residual = Residual(*parts) if config.residual == "exact" else None
        self.phases = [DRAFT if config.first_segment == "draft" else REVISE] * batch
        self.segments = [
            Segment(config.segment_stop, config.think_end, config.max_segment_tokens) for _ in range(batch)
        ]
        self.drafted = list(self.segments)  # what the draft makes of each row's segment
        self.limits = [call.rules.room] * batch
        self.records = Records(call)
        self.since: dict[int, int] = {}
        self.dictated: dict[int, list[int]] = {}  # what rows are to get from the target, where that is decided already

    @property
    def running(self) -> bool:
        """Whether any row is still open."""
        return any(phase != ENDED for phase in self.phases)

    def rows_in(self, *phases: str) -> list[int]:
        """The rows that are in one of `phases`."""
        return [row for row in self.call.rows if self.phases[row] in phases]

    def write(self) -> Draft | None:
        """DRAFT: every row in that phase gets a segment on the canvas, behind what it has; `None` if none has room.

        A segment ends where the draft knows none of the ids that the processors leave; the target writes if that is at
        once.
        """
        call, canvas, config = self.call, self.call.canvas, self.config
        rows = self.rows_in(DRAFT)
        limits = [0] * call.batch
        for row in rows:
            room = self.context + 1 - canvas.prompt_lengths[row]
            limits[row] = min(call.rules.room, canvas.generated[row] + config.max_segment_tokens, room)
            if limits[row] <= canvas.generated[row]:
                warn_of_context(self.context)
                self.phases[row] = FINISH
        rows = self.rows_in(DRAFT)
        if not rows:
            return None
        starts = [canvas.generated[row] for row in rows]
        for row in rows:
            self.drafted[row] = self.segments[row].copy()
        self.draft.bring(rows)
        turn = Writing(
            call.within(stats=self.drafting, criteria=False),
            self.draft.model,
            NoDrafts(),
            rows,
            with_laws=self.scorer.needs_laws,
            limits=limits,
            pause=self._stops_drafting,
            keep_states=len(rows) > 1,
            pause_masked=True,
            processors=self.processors,
            with_features=self.scorer.needs_features,
        )
        turn.run([self.draft.cached[row] for row in rows])
        self.draft.take(turn, turn.target_states, canvas.lengths(call.rows))
        self.written, self.until, self.unfinished = turn.evidence(call.rows), limits, turn.masked
        counts = [canvas.generated[row] - start for row, start in zip(rows, starts, strict=True)]
        for row, start in zip(rows, starts, strict=True):
            canvas.hold(row, start)
        return self._without_thoughts(rows, counts)

    def _stops_drafting(self, row: int, ids: list[int]) -> bool:
        return self.drafted[row].add(self.text(ids), len(ids))

    def _without_thoughts(self, rows: list[int], counts: list[int]) -> Draft | None:
        """The drafted segments but empty ones and those that end the reasoning, which the target is to do itself."""
        call, canvas = self.call, self.call.canvas
        kept = []
        for row, count in zip(rows, counts, strict=True):
            if count == 0:
                self.phases[row] = REVISE
            elif self.drafted[row].thought_ended and self.residual is None:
                call.clear(row, canvas.generated[row], canvas.generated[row] + count)
                self.draft.roll_back(row, canvas.lengths([row])[0])
                self._finish(row)
            else:
                kept.append((row, count))
        if not kept:
            return None
        most = max(count for _, count in kept)
        ids = canvas.read([row for row, _ in kept], 0, most).unsqueeze(1).clone()  # the commit writes over it
        broken = torch.zeros((), dtype=torch.bool, device=call.device)
        return Draft(ids, None, [count for _, count in kept], None, broken)

    def check(self, draft: Draft) -> Reading:
        """CHECK: one target pass over [pending ; d] of the rows that have drafted."""
        rows = self.rows_in(DRAFT)
        self.target.bring(rows)
        return self.reader(rows, draft.counts, [self.target.cached[row] for row in rows])

    def scores(self, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """P̂ and Q̂ of each drafted segment, (rows,), linear."""
        return self.scorer(reading.counts, reading.evidence, self.written.of(self.rows_in(DRAFT)))

    def judge(self, reading: Reading, scores: tuple[torch.Tensor, torch.Tensor]) -> Acceptance:
        """Which segments stand, how many tokens of the others do, and the law of the token that follows."""
        call, config = self.call, self.config
        counts = torch.tensor(reading.counts, device=call.device)
        uniforms = call.randomness.uniforms(len(counts)) if call.sampling else None
        by_score = accepted(score_ratio(*scores), uniforms, config.accept_floor, config.accept_ratio)
        # Only with an exact residual is a segment here that ends the reasoning: it is drawn anew, too. So is one that
        # the draft could not finish: to the target that is no segment.
        anew = [
            self.drafted[row].thought_ended or (self.residual is not None and row in self.unfinished)
            for row in self.rows_in(DRAFT)
        ]
        by_score = by_score & ~torch.tensor(anew, device=call.device) & (config.scorer != "none")
        ok = by_score if reading.top_k is None else by_score | reading.top_k
        self.records.judged(scores, by_score)
        kept = torch.zeros_like(counts)
        if config.salvage and not call.sampling:
            kept = leading_matches(reading.choices, reading.ids, counts)
        number = torch.where(ok, counts, kept)
        outcome = torch.where(ok, torch.full_like(number, BONUS), torch.full_like(number, RESIDUAL))
        if not call.sampling:
            token = reading.choices.gather(1, number.unsqueeze(1)).squeeze(1)
            return Acceptance(number, outcome, token=token)
        law = functional.softmax(torch.where(ok.unsqueeze(1), reading.last, reading.first), dim=-1)
        return Acceptance(number, outcome, law)

    def redraw(self, draft: Draft, reading: Reading, decision: Acceptance) -> Reading:
        """With `residual="exact"`: where a segment fell the target writes until one is kept; then it reads again."""
        if self.residual is None:
            return reading
        found = self.residual(self.rows_in(DRAFT), decision.outcome, self.segments, self.until)
        self.dictated |= found
        return self.check(draft) if found and len(reading.counts) > 1 else reading

    def commit(self, draft: Draft, reading: Reading, decision: Acceptance) -> None:
        """Append what was decided, and let each row go on in the phase that follows from it."""
        call, canvas, rows = self.call, self.call.canvas, self.rows_in(DRAFT)
        starts = [canvas.generated[row] for row in rows]
        limits = list(self.limits)
        if not self.config.bonus:  # a segment that stands leaves no room for one
            for row, start, count in zip(rows, starts, draft.counts, strict=True):
                limits[row] = min(limits[row], start + count)
        turn = Turn(
            call,
            self.target.model,
            self.no_drafts,
            rows,
            limits=limits,
            keep_states=not self.config.bonus,
            dictated=self.dictated,
        )
        decided = turn.commit(reading.block(rows, draft, call.sampling), decision)
        self.target.take(turn, turn.target_states, call.lengths(call.rows))
        goes_on = {*turn.live, *turn.paused}
        for i, row in enumerate(rows):
            stands = decided.outcomes[i] == BONUS
            call.stats.segments += 1
            call.stats.accepted_segments += stands
            self.draft.roll_back(row, canvas.lengths([row])[0])
            ids = decided.tokens[i][: max(canvas.generated[row] - starts[i], 0)]
            self.records.drafted(row, i, starts[i], draft.counts[i], stands)
            if row not in goes_on:
                self._end(row)
            elif stands:
                self._next(row, self.text(ids[draft.counts[i] :]))
            else:
                self.phases[row] = REVISE
                self._target_wrote(row, ids)
        self._close_judged()

    def revise(self) -> None:
        """REVISE: the target writes on in the rows that failed, or that it writes alone, each to the end of its
        segment; for at most `revise_chunk` tokens if others wait to draft."""
        rows = self.rows_in(REVISE, FINISH)
        if not rows:
            return
        call, canvas, config = self.call, self.call.canvas, self.config
        self.target.bring(rows)
        drafter: Drafter = self.no_drafts
        if config.revise_with is not None:
            model = self.draft.model
            assert isinstance(model, MappedModel)
            if drafts := asks_for_model(config.revise_with):
                self.draft.park_all()
            drafter = make_drafter(call, config.revise_with, self.reviser.with_laws, rows, model)
            if drafts:
                drafter.resume([self.draft.states(row) for row in rows], canvas.lengths(rows))
        if drafter.chains > 1:
            canvas.set_chains(drafter.chains)
        self.since = dict.fromkeys(rows, 0)
        several = len(rows) > 1 or config.revise_with is not None
        turn = Turn(
            call,
            self.target.model,
            drafter,
            rows,
            with_laws=self.reviser.with_laws,
            limits=self.limits,
            pause=self._stops_revising,
            keep_states=several,
            dictated=self.dictated,
        )
        cached = [self.target.cached[row] for row in rows]
        if any(held < length - 1 for held, length in zip(cached, call.lengths(rows), strict=True)):
            turn.prefill(cached)
        elif drafter.chains > 1:
            turn.expand()
        self.reviser.run(turn)
        if drafter.chains > 1:
            canvas.set_chains(1)
        self.target.take(turn, turn.target_states, call.lengths(call.rows))
        if config.revise_with is not None and asks_for_model(config.revise_with):
            for row in turn.paused:
                self.draft.park(row, turn.draft_states[row])
        for row in rows:
            if row not in turn.paused:
                self._end(row)
            elif canvas.generated[row] >= self.limits[row] and not call.ended(row):
                call.end(row, canvas.generated[row])  # at `max_finish_tokens`
                self._close(row)
                call.settle([])
        self._close_judged()

    def _close_judged(self) -> None:
        """End the rows that a criterion of the caller's has ended while they waited for others."""
        for row in self.rows_in(DRAFT, REVISE, FINISH):
            if self.call.ended(row):
                self._close(row)

    def _close(self, row: int) -> None:
        """End a row that waits."""
        call = self.call
        states = self.target.parked.pop(row, None)
        if call.keep_cache and states is None:
            self.target.bring([row])
            states = self.target.model.cache.rows(0, self.target.cached[row])
        call.keep(row, states or [])
        self.target.bring([other for other in self.target.rows if other != row])
        self._end(row)

    def _stops_revising(self, row: int, ids: list[int]) -> bool:
        self._target_wrote(row, ids)
        self.since[row] += len(ids)
        others_wait = bool(self.rows_in(DRAFT))
        return self.phases[row] == DRAFT or (others_wait and self.since[row] >= self.config.revise_chunk)

    def _target_wrote(self, row: int, ids: Sequence[int]) -> None:
        """Go on with the row's segment by what the target has committed."""
        if self.phases[row] == FINISH:
            return
        segment = self.segments[row]
        segment.add(self.text(ids), len(ids))
        if segment.thought_ended:
            self._finish(row)
        elif segment.ended:
            self._next(row, segment.rest)

    def _next(self, row: int, text: str) -> None:
        """The draft is to write the row's next segment, behind `text` of the target's."""
        self.records.close(row)
        self.segments[row].begin(text)
        self.phases[row] = DRAFT
        if self.segments[row].thought_ended:
            self._finish(row)

    def _finish(self, row: int) -> None:
        """From here on the target writes alone."""
        self.records.close(row)
        self.phases[row] = FINISH
        if self.config.max_finish_tokens is not None:
            most = self.call.canvas.generated[row] + self.config.max_finish_tokens
            self.limits[row] = min(self.limits[row], most)

    def _end(self, row: int) -> None:
        self.records.close(row, "finish" if self.phases[row] == FINISH else "")
        self.phases[row] = ENDED

    def output(self) -> tuple[Any, DecodingStats]:
        """What `generate` returns, with the segments, and the statistics."""
        output, stats = self.call.output(self.target.model, self.draft.model)
        stats.drafting = self.drafting
        warn_of_low_acceptance(stats, self.call.request)
        self.reviser.attach(output, stats)
        if not isinstance(output, torch.Tensor):
            output.segments = self.records.read()
            if self.call.trace is not None:
                mark_segments(output.trace, output.segments)
        return output, stats
