"""Laws of short texts, enumerated with transformers' own processors."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 5


def law_of_next(model: PreTrainedModel, ids: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """The processed law after each row of `ids`, (rows, V), with transformers' own processors."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(settings.get("temperature", 1.0)))
    if settings.get("top_k"):
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    with torch.no_grad():
        return processors(ids, model(ids).logits[:, -1].float()).softmax(dim=-1).double()


Step = Callable[[torch.Tensor], torch.Tensor]


def joint(prompt: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    """Law of the texts of `len(steps)` tokens, in lexicographic order, from the law of each next token."""
    mass, texts = torch.ones(1, dtype=torch.float64), prompt
    for step in steps:
        mass = (mass.unsqueeze(-1) * step(texts)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], dim=1)
    return mass


def cells(tokens: torch.Tensor) -> torch.Tensor:
    """The index of each row of `tokens` in lexicographic order."""
    powers = VOCAB ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(dim=1)
