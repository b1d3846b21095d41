"""Drafts looked up in the text itself: what followed the last time its final n-gram occurred (prompt lookup)."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .canvas import Canvas
from .drafting import Draft, NoDrafts

MAX_NGRAM = 3


class NGramGenerator(NoDrafts, CandidateGenerator):
    """Drafts without a model. Its law is certain of what it found, so verification stays exact.

    Args:
        vocabulary (`int`): the target's vocabulary size.
        num_draft_tokens (`int`): γ, the most tokens drafted a round.
        texts: for each row of the call, by its index, the ids that it begins with.
        max_length (`int`): the longest a row may become, in tokens.
        with_laws (`bool`): give `log_q`.
        device: where ids and laws live.
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
    ) -> None:
        self.vocabulary = vocabulary
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.with_laws = with_laws
        self.device = device
        self.texts: dict[int, list[int]] = {row: [] for row in texts}
        self.followers: dict[int, dict[tuple[int, ...], int]] = {row: {} for row in texts}
        self.found: list[list[int]] = []
        for row, ids in texts.items():
            self.learn(row, ids)

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """Append `ids` to the text of `row`."""
        text, followers = self.texts[row], self.followers[row]
        for token in ids:
            end = len(text)
            for size in range(1, min(MAX_NGRAM, end) + 1):
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
        for size in range(min(MAX_NGRAM, len(text)), 0, -1):
            at = followers.get(tuple(text[-size:]))
            if at is not None:
                return text[at : at + self.num_draft_tokens]
        return []

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Put what `plan` found on `canvas`, behind the tokens of the rows `live`."""
        num_tokens = max(counts)
        filled = [ids + [canvas.pad] * (num_tokens - len(ids)) for ids in self.found]
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
