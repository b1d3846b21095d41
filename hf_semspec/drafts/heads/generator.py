"""Drafting with an EAGLE-3 head: true features as far as the target has read, then the head's own output."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ...engine.draft import Draft
from ...engine.mapped_model import MappedModel
from ...engine.model import Fed
from ...engine.sources import Source
from ...engine.tokens import Canvas
from ..chain import ChainGenerator
from .module import EagleHead


class HeadDecoder(MappedModel):
    """A head as a draft model; `features` (rows, width, size) go into its next forward, which leaves its own there."""

    features: torch.Tensor

    def __init__(self, head: EagleHead, vocabulary: int, device: torch.device, batch: int, last_position: int) -> None:
        super().__init__(head, vocabulary, device, batch, last_position)
        self.own_ids = head.ids().to(device)

    def _call(
        self,
        source: Source,
        ids: torch.Tensor,
        mask: Any,
        positions: torch.Tensor,
        keep: int | torch.Tensor,
        with_hidden: Any = False,
    ) -> Fed:
        features = self.features.repeat_interleave(len(ids) // len(self.features), dim=0)
        with torch.inference_mode() if self.inference_mode else torch.no_grad():
            output = self.model(
                input_ids=ids.to(self.device),
                features=features,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=source.cache,
                logits_to_keep=keep,
            )
        self.features = output.hidden_states[0][:, -1:]
        return Fed(output.logits, None)

    def _mapped(self, logits: torch.Tensor) -> torch.Tensor:
        """Its `logits` on the target's vocabulary."""
        whole = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        whole[..., self.own_ids] = logits
        return whole


class HeadGenerator(ChainGenerator):
    """Drafts token by token from a head.

    Column c of its cache belongs to token c+1 of a row, so it reads one id less than the row has. Only keys over true
    features count as read: those of drafted tokens are written again.

    Args:
        head, vocabulary, and all others: as [`ChainGenerator`].
    """

    def __init__(
        self,
        head: EagleHead,
        vocabulary: int,
        *args: Any,
        batch: int,
        max_length: int,
        device: torch.device,
        **kw: Any,
    ) -> None:
        decoder = HeadDecoder(head, vocabulary, device, batch, max_length - 2)
        kw |= {"batch": batch, "max_length": max_length, "device": device, "decoder": decoder}
        super().__init__(head, vocabulary, *args, **kw)
        self.head = head
        self.taps = head.taps
        weight = head.fc.weight
        self.known = torch.zeros((batch, 64, weight.shape[0]), dtype=weight.dtype, device=weight.device)

    def lengths(self, canvas: Canvas, live: Sequence[int]) -> list[int]:
        """How many ids the head reads of each of the rows `live`: all but the first."""
        return [length - 1 for length in canvas.lengths(live)]

    @torch.no_grad()
    def see(self, states: torch.Tensor, starts: Sequence[int]) -> None:
        """Take the target's hidden states of tokens from `starts` on, (rows, width, states * size)."""
        features, width = self.head.features(states), states.shape[1]
        end = max(starts) + width
        if end > self.known.shape[1]:
            self.known = functional.pad(self.known, (0, 0, 0, max(end, 2 * self.known.shape[1]) - self.known.shape[1]))
        for row, start in enumerate(starts):
            surplus = max(-start, 0)  # ids that a row shorter than the block has no place for
            self.known[row, start + surplus : start + width] = features[row, surplus:]

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """As [`ChainGenerator.propose`]."""
        lengths, before = self.lengths(canvas, live), self.filled
        gaps = [length - filled for length, filled in zip(lengths, before, strict=True)]
        back = max(gap for gap, count in zip(gaps, counts, strict=True) if count)
        places = torch.tensor(lengths, device=self.known.device).unsqueeze(1) + torch.arange(
            -back, 0, device=self.known.device
        )
        rows = torch.arange(len(live), device=self.known.device).unsqueeze(1)
        assert isinstance(self.decoder, HeadDecoder)
        self.decoder.features = self.known[rows, places.clamp(min=0)]
        draft = super().propose(canvas, live, counts)
        self.filled = [min(length, filled) for length, filled in zip(lengths, self.filled, strict=True)]
        return draft

    def commit(self, lengths: Sequence[int]) -> None:
        """Roll back to what was committed."""
        super().commit([length - 1 for length in lengths])

    def select(self, rows: list[int]) -> None:
        """Keep only `rows` of the current batch."""
        super().select(rows)
        self.known = self.known[rows]
