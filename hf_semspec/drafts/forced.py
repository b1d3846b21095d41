"""Drafts of what must come: ids that the caller's processors leave no choice about need no forward of a draft."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..engine.cache import RaggedCache, RowStates
from ..engine.draft import Draft, Drafter
from ..engine.prefixes import Prefixes
from ..engine.processors import HISTORYLESS, Processors
from ..engine.tokens import Canvas
from .ngram import NGramFirst, NGramGenerator
from .other_tokenizer import ForeignGenerator

LONGEST_RUN = 64  # the logits of a block grow with it


class ForcedFirst(Drafter):
    """Drafts the ids that are forced behind a row's text, which do not count against γ, and lets `inner` go on.

    So each round brings every row at least one id that was open, or `LONGEST_RUN`. A forced EOS is not drafted: the
    target's own token brings it as soon.

    Args:
        inner: drafts one chain.
        processors: copies of its own; those that look at the scores alone are not asked.
        vocabulary (`int`): the target's vocabulary size.
        with_laws (`bool`): whether `inner` gives `log_q`.
        device: where ids and laws live.
    """

    def __init__(
        self, inner: Drafter, processors: Processors, vocabulary: int, with_laws: bool, device: torch.device
    ) -> None:
        self.inner = inner
        self.processors = Processors([one for one in processors.processors if type(one) not in HISTORYLESS])
        self.vocabulary = vocabulary
        self.with_laws = with_laws
        self.device = device
        self.own_vocabulary = inner.own_vocabulary
        self.decoder = inner.decoder
        self.taps = inner.taps
        self.ngrams = inner.ngrams if isinstance(inner, NGramFirst) else inner
        model = inner.model if isinstance(inner, NGramFirst) else inner
        # Text of its own, the target's states, or layers that cannot go back into what was read at once.
        recurrent = bool(getattr(inner.decoder, "recurrent", False))
        self.waits = isinstance(model, ForeignGenerator) or bool(inner.taps) or recurrent
        self._runs: list[list[int]] = []
        self._asked: list[int] = []

    @property
    def caches(self) -> list[RaggedCache]:
        """Those of `inner`."""
        return self.inner.caches

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """For each row, how many ids are forced and how many `inner` drafts behind them."""
        self._runs = self._forced(live, canvas, rooms)
        if isinstance(self.ngrams, NGramGenerator):
            self.ngrams.ahead = dict(zip(live, self._runs, strict=True))
        left = [1 if run and self.waits else room - len(run) for room, run in zip(rooms, self._runs, strict=True)]
        with self._ahead(live, canvas):
            self._asked = self.inner.plan(live, canvas, left)
        counts = [len(run) + count for run, count in zip(self._runs, self._asked, strict=True)]
        if any(self._runs):
            self.inner.begin(counts)
        return counts

    def _forced(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[list[int]]:
        """For each row, the ids that are forced behind its text, as far as there is room for one more."""
        runs: list[list[int]] = [[] for _ in live]
        texts = Prefixes(canvas, live)
        # One that picks the best of any scores forces nothing; it would pick this one, which is never drafted.
        best = min(canvas.eos_ids, default=0)
        going = [room > 1 for room in rooms]
        for t in range(LONGEST_RUN):
            if not any(going):
                break
            scores = torch.zeros(len(live), 1, 1, self.vocabulary, device=self.device)
            scores[..., best] = 1.0
            widths = [width + t for width in canvas.widths(live)]
            scores = self.processors(scores, canvas.shown, live, widths, texts.only(going)).squeeze(2)
            single = ((scores > -torch.inf).sum(dim=-1) == 1).squeeze(1).tolist()
            tokens = scores.argmax(dim=-1)
            found = tokens.squeeze(1).tolist()
            for i, token in enumerate(found):
                going[i] = going[i] and single[i] and token != best and token not in canvas.eos_ids
                if going[i]:
                    runs[i].append(token)
            if any(going):
                kept = torch.tensor(going, device=self.device).unsqueeze(1)
                canvas.write(live, t, tokens.where(kept, torch.full_like(tokens, canvas.pad)).unsqueeze(-1))
                texts.grow(tokens, scores)
            going = [more and len(run) < room - 1 for more, run, room in zip(going, runs, rooms, strict=True)]
        return runs

    @contextlib.contextmanager
    def _ahead(self, live: Sequence[int], canvas: Canvas) -> Iterator[None]:
        """Let `canvas` hold what is forced, for `inner`."""
        if self.waits:
            yield
            return
        before = [canvas.generated[row] for row in live]
        try:
            for row, run in zip(live, self._runs, strict=True):
                canvas.hold(row, canvas.generated[row] + len(run))
            yield
        finally:
            for row, count in zip(live, before, strict=True):
                canvas.hold(row, count)

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Leave the forced ids, and those of `inner` behind them, on `canvas`."""
        if not any(self._runs):
            return self.inner.propose(canvas, live, counts)
        drafted = None
        if any(self._asked):
            with self._ahead(live, canvas):
                drafted = self.inner.propose(canvas, live, self._asked)
        draft = self._joined(canvas, counts, drafted)
        canvas.write(live, 0, draft.ids)
        return draft

    def _joined(self, canvas: Canvas, counts: list[int], drafted: Draft | None) -> Draft:
        """The runs, each with what was drafted behind it."""
        width, device = max(counts), self.device
        filled = [run + [canvas.filler] * (width - len(run)) for run in self._runs]
        ids = torch.tensor(filled, device=device).unsqueeze(1)  # (rows, 1, width)
        places = torch.arange(width, device=device)
        sizes, limits = (
            torch.tensor(one, device=device)[:, None, None] for one in ([len(run) for run in self._runs], counts)
        )
        forced, valid = places < sizes, places < limits
        log_q = None
        if self.with_laws:
            log_q = torch.full((*ids.shape, self.vocabulary), -torch.inf, device=device)
            log_q.scatter_(-1, ids.unsqueeze(-1), 0.0)
        if drafted is None:
            return Draft(ids, valid, counts, log_q, torch.zeros((), dtype=torch.bool, device=device))
        index = (places - sizes).clamp(0, drafted.ids.shape[-1] - 1)
        behind = valid & ~forced
        ids = torch.where(behind, drafted.ids.gather(-1, index), ids)
        if drafted.valid is not None:
            valid = valid & (forced | drafted.valid.gather(-1, index))
        if log_q is not None and drafted.log_q is not None:
            laws = drafted.log_q.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, self.vocabulary))
            log_q = torch.where(behind.unsqueeze(-1), laws, log_q.to(laws.dtype))
        return Draft(ids, valid, counts, log_q, drafted.broken)

    def observe(self, place: int, drafted: int, kept: int) -> None:
        """Tell `inner` what stands of its own tokens for the row at `place`."""
        forced = len(self._runs[place])
        if self._asked[place] and kept >= forced:
            self.inner.observe(place, drafted - forced, kept - forced)

    def report(self, call: Any) -> None:
        """As `inner`."""
        self.inner.report(call)

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """As `inner`."""
        self.inner.learn(row, ids)

    def see(self, states: torch.Tensor, starts: Sequence[int]) -> None:
        """As `inner`."""
        self.inner.see(states, starts)

    def resume(self, states: Sequence[RowStates], lengths: Sequence[int]) -> None:
        """As `inner`."""
        self.inner.resume(states, lengths)

    def commit(self, lengths: Sequence[int]) -> None:
        """As `inner`."""
        self.inner.commit(lengths)

    def select(self, rows: list[int]) -> None:
        """As `inner`."""
        self.inner.select(rows)

    def states(self, row: int) -> RowStates:
        """As `inner`."""
        return self.inner.states(row)
