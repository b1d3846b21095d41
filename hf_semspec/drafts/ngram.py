"""Drafts looked up in the text itself: what followed the last time its final n-gram occurred (prompt lookup)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.generation.candidate_generator import CandidateGenerator

from ..engine.cache import RowStates
from ..engine.draft import Draft, Drafter
from ..engine.tokens import Canvas
from .chain import ChainGenerator


class NGramGenerator(Drafter, CandidateGenerator):
    """Drafts without a model. Its law is certain of what it found, so verification stays exact.

    Args:
        vocabulary (`int`): the target's vocabulary size.
        num_draft_tokens (`int`): γ, the most tokens drafted a round.
        texts: for each row of the call, by its index, the ids that it begins with.
        max_length (`int`): the longest a row may become, in tokens.
        with_laws (`bool`): give `log_q`.
        device: where ids and laws live.
        max_ngram (`int`): the longest n-gram that is looked up, in tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        num_draft_tokens: int,
        texts: dict[int, list[int]],
        *,
        max_length: int,
        with_laws: bool,
        device: torch.device,
        max_ngram: int = 3,
    ) -> None:
        self.vocabulary = vocabulary
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.with_laws = with_laws
        self.device = device
        self.max_ngram = max_ngram
        self.texts: dict[int, list[int]] = {row: [] for row in texts}
        self.followers: dict[int, dict[tuple[int, ...], int]] = {row: {} for row in texts}
        self.ahead: dict[int, list[int]] = {}  # what is drafted already, by row
        self.found: list[list[int]] = []
        for row, ids in texts.items():
            self.learn(row, ids)

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """Append `ids` to the text of `row`."""
        text, followers = self.texts[row], self.followers[row]
        for token in ids:
            end = len(text)
            for size in range(1, min(self.max_ngram, end) + 1):
                followers[tuple(text[end - size :])] = end
            text.append(token)

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """For each row, how many tokens follow the latest earlier occurrence of its longest known final n-gram."""
        self.found = [
            self._lookup(row)[: min(self.num_draft_tokens, room - 1)] for row, room in zip(live, rooms, strict=True)
        ]
        return [len(ids) for ids in self.found]

    def _lookup(self, row: int) -> list[int]:
        text, followers = self.texts[row], self.followers[row]
        last = (text[-self.max_ngram :] + self.ahead.get(row, []))[-self.max_ngram :]
        for size in range(len(last), 0, -1):
            at = followers.get(tuple(last[-size:]))
            if at is not None:
                found = text[at : at + self.num_draft_tokens]
                # What repeats itself with a short period is drafted as if it went on, so that blocks are of one width.
                return [found[i % len(found)] for i in range(self.num_draft_tokens)]
        return []

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Put what `plan` found on `canvas`, behind the tokens of the rows `live`."""
        num_tokens = max(counts)
        filled = [ids + [canvas.filler] * (num_tokens - len(ids)) for ids in self.found]
        ids = torch.tensor(filled, device=self.device).unsqueeze(1)  # (rows, 1, γ)
        limits = torch.tensor(counts, device=self.device)[:, None, None]
        valid = torch.arange(num_tokens, device=self.device) < limits
        log_q = None
        if self.with_laws:
            log_q = torch.full((*ids.shape, self.vocabulary), -torch.inf, device=self.device)
            log_q.scatter_(-1, ids.unsqueeze(-1), 0.0)
        canvas.write(live, 0, ids)
        return Draft(ids, valid, counts, log_q, torch.zeros((), dtype=torch.bool, device=self.device))

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for transformers' own assisted loop: (1, length) ids in, (1, length + γ) out, no laws."""
        self.learn(0, input_ids[0, len(self.texts[0]) :].tolist())
        room = self.max_length - input_ids.shape[1]
        found = self._lookup(0)[: max(room - 1, 0)]
        return torch.cat([input_ids, input_ids.new_tensor([found])], dim=1) if found else input_ids, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt."""


class NGramFirst(Drafter):
    """Drafts rows from their own text where `ngrams` finds something there, and the others by `model`.

    Both draft one chain. The model goes along in a round where any row needs it, and not at all where none does; what
    it has missed it reads the next time it is asked.
    """

    def __init__(self, ngrams: NGramGenerator, model: ChainGenerator) -> None:
        self.ngrams = ngrams
        self.model = model
        self.own_vocabulary = model.own_vocabulary
        self.decoder = model.decoder
        self._asked: list[int] = []

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """For each row, how many tokens to draft this round; none of those found are more than the model would
        draft."""
        most = self.model.most(live)
        found = self.ngrams.plan(live, canvas, [min(room, most + 1) for room in rooms])
        self._asked = [0] * len(live)
        if not all(found):
            planned = self.model.counts(live, canvas, rooms, most)
            self._asked = [0 if count else other for count, other in zip(found, planned, strict=True)]
        counts = [count or other for count, other in zip(found, self._asked, strict=True)]
        self.begin(counts)
        return counts

    def begin(self, counts: Sequence[int]) -> None:
        """As the model."""
        self.model.begin(counts)

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Draft for the rows `live` and leave the ids on `canvas` behind their tokens."""
        if not any(self._asked):
            return self.ngrams.propose(canvas, live, counts)
        drafted = self.model.propose(canvas, live, self._asked)
        looked_up = [count > asked for count, asked in zip(counts, self._asked, strict=True)]
        if not any(looked_up):
            return drafted
        others = [0 if asked else count for count, asked in zip(counts, self._asked, strict=True)]
        found = self.ngrams.propose(canvas, live, others)
        return self._merged(canvas, live, counts, found, drafted, looked_up)

    def _merged(
        self,
        canvas: Canvas,
        live: Sequence[int],
        counts: list[int],
        found: Draft,
        drafted: Draft,
        looked_up: list[bool],
    ) -> Draft:
        device, width = found.ids.device, max(counts)
        rows = torch.tensor(looked_up, device=device)[:, None, None]
        ids = torch.where(rows, _widened(found.ids, width, canvas.filler), _widened(drafted.ids, width, canvas.filler))
        limits = torch.tensor(counts, device=device)[:, None, None]
        valid = torch.arange(width, device=device) < limits
        if drafted.valid is not None:
            valid = valid & (rows | _widened(drafted.valid, width, False))
        log_q = None
        if found.log_q is not None and drafted.log_q is not None:
            looked, written = (_widened(law.mT, width, 0.0).mT for law in (found.log_q, drafted.log_q))
            log_q = torch.where(rows.unsqueeze(-1), looked, written)
        canvas.write(live, 0, ids)
        return Draft(ids, valid, counts, log_q, drafted.broken)

    def observe(self, place: int, drafted: int, kept: int) -> None:
        """Tell the model's draft length what stands of its own tokens for the row at `place`."""
        if self._asked[place]:
            self.model.observe(place, drafted, kept)

    def report(self, call: Any) -> None:
        """As the model."""
        self.model.report(call)

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """Append `ids` to the text of `row`."""
        self.ngrams.learn(row, ids)
        self.model.learn(row, ids)

    def resume(self, states: Sequence[RowStates], lengths: Sequence[int]) -> None:
        """Go on with rows of which the model's cache held `states`."""
        self.model.resume(states, lengths)

    def commit(self, lengths: Sequence[int]) -> None:
        """Roll the model back to what was committed."""
        self.model.commit(lengths)

    def select(self, rows: list[int]) -> None:
        """Keep only `rows` of the current batch."""
        self.model.select(rows)

    def states(self, row: int) -> RowStates:
        """A copy of what the model's cache holds of a row."""
        return self.model.states(row)


def _widened(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """`values` (..., narrower) filled up on the right."""
    return functional.pad(values, (0, width - values.shape[-1]), value=fill)
