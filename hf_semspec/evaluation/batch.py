"""Prompts as a batch of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..tools.loading import encode


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left: `ids` and `mask` of shape (B, length), and the ids that end and fill a text."""

    ids: torch.Tensor
    mask: torch.Tensor
    eos: list[int]
    pad: int

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor], eos: list[int], pad: int, device: torch.device) -> Batch:
        """The prompts `rows`, ids of shape (length,) each, on `device`."""
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), pad, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return cls(ids, mask, eos, pad)

    @property
    def width(self) -> int:
        """Columns of the prompts."""
        return self.ids.shape[1]

    def answers(self, sequences: torch.Tensor) -> list[list[int]]:
        """The new ids of each row of `sequences` `(rows, length)`, to the first EOS, without padding."""
        return [_trim(row, self.eos) for row in sequences[:, self.width :].tolist()]


def prepare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, chat: bool
) -> Batch:
    """The prompts as a batch on the model's device; the tokenizer's own padding settings are left alone."""
    rows = encode_all(tokenizer, prompts, chat=chat)
    return Batch.of(rows, *ends_and_pad(model, tokenizer), model.device)


def encode_all(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, chat: bool) -> list[torch.Tensor]:
    """The ids (length,) of each prompt.

    Raises:
        ValueError: a prompt has none.
    """
    rows = [encode(tokenizer, prompt, chat=chat)[0] for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not len(row):
            raise ValueError(f"the prompt {prompt!r} has no tokens")
    return rows


def ends_and_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """The ids that end a text, the model's before the tokenizer's, and the one that fills it."""
    config = model.generation_config
    eos = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pads = (tokenizer.pad_token_id, config.pad_token_id, *ends, 0)
    return ends, next(int(pad) for pad in pads if pad is not None)


def _trim(row: list[int], eos: list[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
    return row[:end]
