"""Processors and criteria that several tests pass to `generate`."""

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from tests.models import VOCAB


class ForceAt(LogitsProcessor):
    """Leaves only `token` once a row has `width` columns."""

    def __init__(self, width: int, token: int) -> None:
        self.width, self.token = width, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != self.width:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


def parity(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    """Row 0 may write even ids, row 1 odd ones, row 2 those that follow from its last token."""
    if batch_id == 2:
        return list(range(2 + int(input_ids[-1]) % 7, VOCAB, 7))
    return list(range(2 + batch_id, VOCAB, 2))


class OnToken(StoppingCriteria):
    """Ends a row as soon as its last token is `token`."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token
