"""Drafts for particles: each draws its own tokens and keeps how likely the draft held them."""

from collections.abc import Sequence
from typing import Any

import torch

from ...drafts.chain import ChainGenerator
from ...engine.draft import Draft
from ...engine.tokens import Canvas
from .weights import draw


class ParticleGenerator(ChainGenerator):
    """Drafts the particles of every prompt; `log_q` is that of the drawn ids alone.

    Its drafts serve our loop only: a particle without its weight is no candidate.

    Args:
        shared_start (`bool`): whether the particles of a prompt have their first token in common.
        others: as [`ChainGenerator`]; `chains` are the particles.
    """

    def __init__(self, *args: Any, shared_start: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared_start = shared_start

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Draft for each particle; `log_q` (rows, N, γ) is float64, -inf where no id had mass, nan for nan logits."""
        if self.chains > 1 and not self.decoder.cache.is_filled:
            if any(canvas.generated[row] != 1 for row in live):
                self.decoder.cache.select(self._copies(live))  # the texts differ: each is read on its own
            elif not self.shared_start:
                lengths = [length - 1 for length in canvas.lengths(live)]
                prompts = canvas.read(live, max(lengths) + 1, 0)[:: self.chains, :-1]
                self.read_prompts(prompts, lengths, self._copies(live))
        return super().propose(canvas, live, counts)

    def _copies(self, live: Sequence[int]) -> list[int]:
        return [row for row in range(len(live)) for _ in range(self.chains)]

    def _pick(self, scores: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert self.randomness is not None
        tokens, log_q = draw(scores, self.randomness.uniforms(*scores.shape[:2], dtype=torch.float64))
        return tokens, log_q, log_q

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Refused: transformers' loop accepts or rejects one candidate, and has no use for weighted ones."""
        raise NotImplementedError(
            "ParticleGenerator drafts weighted particles: use ChainGenerator in assisted decoding"
        )
