"""What the tests of `smc` share."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.helpers import Inputs, new_tokens
from tests.models import PAD, draft_of, tiny


def sample(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """One call with the whole output."""
    config = SemSpecConfig("smc", **{"return_dict_in_generate": True, "pad_token_id": PAD, **fields})
    torch.manual_seed(seed)
    return target.generate(**inputs, **(call or {}), assistant_model=draft, generation_config=config)


def pair(seed: int = 0, noise: float = 0.02, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft near enough that some particles keep their weight and some do not."""
    target = tiny("llama", seed, attention="sdpa", **kwargs)
    return target, draft_of(target, "near", noise=noise)


def lengths_of(output: Any, inputs: Inputs, eos: set[int]) -> list[int]:
    """New tokens of every row up to its EOS."""
    return [
        next((t + 1 for t, token in enumerate(row) if token in eos), len(row))
        for row in new_tokens(output, inputs).tolist()
    ]


class Laws:
    """log-probabilities after a text, by a forward over the whole of it."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.model, self.prompt = model, prompt
        self.known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, text: list[int]) -> list[float]:
        key = tuple(text)
        if key not in self.known:
            with torch.no_grad():
                logits = self.model(torch.cat([self.prompt, torch.tensor(text, dtype=torch.long)])[None]).logits
            for end in range(len(text) + 1):
                row = logits[0, len(self.prompt) - 1 + end].float().double().log_softmax(-1)
                self.known[key[:end]] = row.tolist()
        return self.known[key]
