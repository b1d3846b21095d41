"""Ways to decode that the goals time: plain `generate`, the schemes, and transformers' assisted generation, tuned and
at its defaults."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.bench.rivals import GREEDY
from hf_semspec.common.fields import SchemeConfig
from hf_semspec.evaluation.decoding import stock_schedule

from .timing import Contender


def plain(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, mode: dict[str, Any] = GREEDY) -> Contender:
    """Plain `generate` of the batch `ids` `(batch, prompt)`, greedily unless `mode` says otherwise."""
    return Contender("plain", lambda: _generate(model, ids, new_tokens, **mode))


def stock_assisted(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    ids: torch.Tensor,
    new_tokens: int,
    num_draft_tokens: int | None,
    mode: dict[str, Any] = GREEDY,
) -> Contender:
    """Transformers' assisted generation, row by row since it takes one row at a time.

    Args:
        model, draft (`PreTrainedModel`): target and draft; the draft's generation config is put back after each run.
        ids (`torch.LongTensor` of shape `(batch, prompt)`): the prompts.
        new_tokens (`int`): tokens decoded a row.
        num_draft_tokens (`int`, *optional*): tuned to draft that many every round (constant schedule, no confidence
            threshold); `None` for transformers' defaults.
    """

    def run() -> torch.Tensor:
        with stock_schedule(draft, num_draft_tokens):
            return torch.cat([_generate(model, row[None], new_tokens, assistant_model=draft, **mode) for row in ids])

    return Contender("HF assisted" if num_draft_tokens is None else f"HF assisted γ={num_draft_tokens}", run)


def scheme(
    name: str,
    model: PreTrainedModel,
    draft: PreTrainedModel,
    ids: torch.Tensor,
    new_tokens: int,
    config: SchemeConfig,
    mode: dict[str, Any] = GREEDY,
) -> Contender:
    """One of this package's schemes on the batch `ids` `(batch, prompt)`; its result is the `SemSpecOutput`."""
    generation_config = SemSpecConfig(
        config, max_new_tokens=new_tokens, pad_token_id=0, return_dict_in_generate=True, **mode
    )

    def run() -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, generation_config=generation_config
        )

    return Contender(name, run)


def _generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **kwargs: Any) -> torch.Tensor:
    mask = torch.ones_like(ids)
    output: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, **kwargs
    )
    return output


def sequences(contender: Contender) -> torch.Tensor:
    """The ids `(batch, prompt + new)` of the contender's last run."""
    result = contender.result
    return result if isinstance(result, torch.Tensor) else result.sequences
