"""The state of one call of `parse`: answers written by the draft, judged, kept or cut, and revised by the target."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...drafts.choose import drafter as make_drafter
from ...drafts.vocabulary import first_clash
from ...engine.cache import RowStates, held
from ...engine.call import CallState
from ...engine.draft import Drafter, NoDrafts
from ...engine.mapped_model import MappedModel
from ...engine.misfits import warn_of_low_acceptance
from ...engine.outputs import DecodingStats
from ...engine.request import Request
from ...engine.rounds import Speculation
from ..revising import make_rounds
from .answers import AnswerWriter
from .config import PARSEConfig
from .judge import Answer, Judge, Verdict, decide
from .other_tokenizer import TranslatingWriter
from .prefixes import monotonicity_violations, segment_ended


class Verification:
    """One call, from the first answer to the output. The target's cache holds the open rows, in order."""

    def __init__(self, request: Request) -> None:
        config: PARSEConfig = request.scheme
        self.config = config
        self.call = call = CallState(request)
        self.target = call.target(judges=True)
        self.judges = Judge(call, self.target, config)
        run = make_rounds(call, None).run
        self.writer = AnswerWriter(call, run, config.draft_ngram)
        if first_clash(request.tokenizer, request.assistant_tokenizer) is not None:
            self.writer = TranslatingWriter(call, run, config.draft_ngram, self.judges.tokenizer)
        self.reviser = make_rounds(call, config.revise_with)
        if call.batch > 1 and not (self.target.takes_masks and self.writer.model.takes_masks):
            raise ValueError(
                "flash attention takes no 4-D mask, without which rows of unequal length cannot be told apart: pass "
                'one prompt at a time, or load both models with attn_implementation="sdpa"'
            )
        self.open_rows = list(call.rows)
        self.cached = list(call.inputs.cached)
        self.confidences: list[list[float]] = [[] for _ in call.rows]
        self.boundaries: list[list[int]] = [[] for _ in call.rows]

    @property
    def running(self) -> bool:
        """Whether any row is still open."""
        return bool(self.open_rows)

    def write(self) -> list[Answer]:
        """A complete answer by the draft for every open row."""
        return self.writer.write(self.open_rows)

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """The target's confidence in every answer and its prefixes."""
        verdicts = self.judges(self.open_rows, answers, self.cached)
        for row, answer, verdict in zip(self.open_rows, answers, verdicts, strict=True):
            self.confidences[row] += verdict.confidences
            self.boundaries[row] += [answer.start + length for length in verdict.lengths]
        return verdicts

    def keep(self, answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> None:
        """Return answers that the target is confident in; cut the others to the prefix that the boundary rule
        keeps."""
        call, config, rows = self.call, self.config, self.open_rows
        uniforms = [0.0] * len(rows)
        if config.boundary == "random":
            uniforms = call.randomness.uniforms(len(rows)).tolist()
        for row, answer, verdict, uniform in zip(rows, answers, verdicts, uniforms, strict=True):
            kept, accepted = decide(config, answer, verdict, uniform)
            total = answer.start + kept
            if call.trace is not None:
                written = call.canvas.texts([row])[0][-answer.written :] if answer.written else []
                call.trace.answer(row, answer.start, written, kept, accepted, verdict.lengths, verdict.confidences)
            call.clear(row, total, answer.start + answer.written)
            call.canvas.hold(row, answer.start)
            self._count(row, answer, verdict, kept, accepted)
            call.canvas.hold(row, total)
            if (kept == answer.written and answer.finished) or total == call.rules.room:
                call.end(row, total)
            self.writer.forget(row, call.canvas.lengths([row])[0])
        lengths = call.lengths(rows)
        leaving = call.settle(rows)
        if call.keep_cache:
            for i in leaving:
                call.keep(rows[i], self.target.cache.rows(i, lengths[i]))
        staying = [i for i in range(len(rows)) if i not in leaving]
        self.open_rows = [rows[i] for i in staying]
        if staying:
            self.target.cache.select(staying)

    def _count(self, row: int, answer: Answer, verdict: Verdict, kept: int, accepted: bool) -> None:
        stats = self.call.stats
        stats.answers += 1
        stats.full_accepts += accepted
        stats.monotonicity_violations += monotonicity_violations(verdict.confidences, self.config.prefix_threshold)
        stats.rows[row].written += answer.written
        self.call.count(row, kept, 0, 0, "kept")
        stats.rows[row].emitted += kept

    def revise(self, to_the_end: bool) -> None:
        """Let the target go on with the open rows: until they end, or until each has one segment more."""
        if not self.open_rows:
            return
        call, canvas, rows = self.call, self.call.canvas, self.open_rows
        drafter: Drafter = NoDrafts()
        if self.config.revise_with is not None:
            own = self.writer.model if isinstance(self.writer.model, MappedModel) else None
            drafter = make_drafter(call, self.config.revise_with, self.reviser.with_laws, rows, own)
            if own is not None:
                drafter.resume(self.writer.held(rows), canvas.lengths(rows))
        canvas.set_chains(drafter.chains)
        state = Speculation(
            call,
            self.target,
            drafter,
            rows,
            with_laws=self.reviser.with_laws,
            pause=None if to_the_end else self._pauses(),
            keep_states=not to_the_end,
        )
        if drafter.chains > 1:
            state.expand()
        self.reviser.run(state)
        canvas.set_chains(1)
        if drafter.decoder not in (None, self.writer.model):  # a draft that translates reads the text anew each time
            self.writer.model.count(drafter.decoder)
        self.open_rows = sorted(row for row in state.paused if not call.ended(row))
        if self.open_rows:
            self._take_over(state, drafter)

    def _take_over(self, state: Speculation, drafter: Drafter) -> None:
        """Bring what both caches hold of the rows that paused to where the next answer begins."""
        states: list[RowStates] = [state.target_states[row] for row in self.open_rows]
        self.target.cache.load(states)
        self.cached = [held(row) for row in states]
        if drafter.decoder is self.writer.model:
            self.writer.take(state.draft_states)

    def _pauses(self) -> Callable[[int, list[int]], bool]:
        texts: dict[int, list[int]] = {row: [] for row in self.open_rows}

        def pauses(row: int, ids: list[int]) -> bool:
            texts[row] += ids
            return segment_ended(self.judges.pieces(texts[row]), self.config.segment_tokens)

        return pauses

    def output(self) -> tuple[Any, DecodingStats]:
        """What `generate` returns, with the scheme's record, and the statistics."""
        output, stats = self.call.output(self.target, self.writer.model)
        stats.judging = "packed" if self.target.reads_packed else "expanded"
        stats.drafting = self.writer.stats
        warn_of_low_acceptance(stats, self.call.request)
        self.reviser.attach(output, stats)
        if not isinstance(output, torch.Tensor):
            device = output.sequences.device
            most = max(len(row) for row in self.boundaries)
            output.verdicts = torch.tensor(
                [row + [math.nan] * (most - len(row)) for row in self.confidences], device=device
            )
            output.boundaries = torch.tensor(
                [row + [-1] * (most - len(row)) for row in self.boundaries], device=device
            )
            output.kept_tokens = torch.tensor([row.kept for row in stats.rows], device=device)
        return output, stats
