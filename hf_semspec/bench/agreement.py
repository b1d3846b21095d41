"""How far two models agree on a text: argmaxes, overlap, entropies, and the χ² that decides what weights are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..engine.acceptance import entropy
from ..engine.cache import text_config
from ..schemes.easd.agreement import uncertain_agreement

# Texts are read so many probabilities at a time: the laws of a large vocabulary are what takes memory.
READ_AT_ONCE = 2**26


@dataclass(frozen=True)
class Agreement:
    """How far a pair agrees on a text; means over its positions, entropies in nats.

    Args:
        greedy (`float`): share of positions where both argmaxes are the same token.
        overlap (`float`): Σ min(p, q) = 1 − TV, the acceptance rate under plain sampling at temperature 1.
        target_entropy (`float`): H(p).
        draft_entropy (`float`): H(q).
        one_token_chi2 (`float`): median over the positions of Σ p²/q − 1, infinite where q lacks what p has.
        uncertain (`float`): share of positions where easd's rule of entropies and overlap holds at its defaults.
        positions (`int`): how many were read.
    """

    greedy: float
    overlap: float
    target_entropy: float
    draft_entropy: float
    one_token_chi2: float = math.nan
    uncertain: float = 0.0
    positions: int = 0

    def to_dict(self) -> dict[str, float | None]:
        """JSON-safe: what is no finite number is `None`."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


@torch.no_grad()
def agreement_on(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    text: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    easd: dict[str, Any] | None = None,
) -> Agreement:
    """Agreement on `text`, every position read by both models once.

    Args:
        model, draft (`PreTrainedModel`): p and q, laws at temperature 1.
        text (`torch.LongTensor` of shape `(batch, length)`): padded on the left if at all.
        mask (`torch.LongTensor` of shape `(batch, length)`, *optional*): 1 where a token counts; everywhere by
            default.
        easd (`dict`, *optional*): thresholds of [`uncertain_agreement`] that `uncertain` is counted with.
    """
    rule = {"target_entropy_threshold": 1.0, "draft_entropy_threshold": 1.0, "overlap_threshold": 0.8, "top_n": 10}
    columns: list[torch.Tensor] = []
    mask = torch.ones_like(text) if mask is None else mask
    step = max(1, READ_AT_ONCE // (text.shape[1] * int(text_config(model).vocab_size)))
    for row in range(0, len(text), step):
        ids, shown = text[row : row + step], mask[row : row + step].bool()
        log_p, log_q = (log_laws(each, ids, shown)[shown] for each in (model, draft))  # (positions, vocab)
        width = min(log_p.shape[-1], log_q.shape[-1])
        same = log_p.argmax(-1) == log_q.argmax(-1)
        p, q = log_p.exp(), log_q.exp()
        overlap = torch.minimum(p[:, :width], q[:, :width]).sum(-1)
        # In log space: the square of a small p over a smaller q is no number in float32.
        log_ratio = 2 * log_p[:, :width].double() - log_q[:, :width].double()
        squares = log_ratio.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).logsumexp(-1).exp()
        squares = torch.where(p[:, width:].sum(-1) > 0, torch.inf, squares)
        unsure = uncertain_agreement(log_p[:, :width], log_q[:, :width], **{**rule, **(easd or {})})
        parts = (same, overlap, entropy(log_p), entropy(log_q), squares - 1, unsure)
        columns.append(torch.stack([part.double().cpu() for part in parts]))
    values = torch.cat(columns, dim=1)
    means = values.mean(dim=1).tolist()
    return Agreement(
        greedy=means[0],
        overlap=means[1],
        target_entropy=means[2],
        draft_entropy=means[3],
        one_token_chi2=float(values[4].median()),
        uncertain=means[5],
        positions=values.shape[1],
    )


def log_laws(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows, length, vocab) float32 log-probabilities; `mask` (rows, length) is false where there is padding."""
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    # A draft is fed some other id in place of one that it has no embedding for, as in decoding.
    ids = ids.masked_fill(ids >= int(text_config(model).vocab_size), 0)
    logits = model(
        input_ids=ids.to(model.device),
        attention_mask=None if bool(mask.all()) else mask.long().to(model.device),
        position_ids=positions.to(model.device),
    ).logits
    laws: torch.Tensor = logits.float().log_softmax(-1).to(ids.device)
    return laws


@torch.no_grad()
def block_chi2(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    lengths: Sequence[int],
    *,
    blocks: int = 64,
    seed: int = 0,
) -> dict[int, float]:
    """χ² of blocks of γ drafted tokens, E_q[(p/q)²]/E_q[p/q]² − 1, for every γ in `lengths`; the median over prompts.

    Blocks are drawn from q and scored by p, both at temperature 1. Few blocks carry most of a heavy-tailed sum, so
    the estimate is at most `blocks` − 1 and too small where it comes near that.

    Args:
        model, draft (`PreTrainedModel`): p and q.
        prompts (`Sequence[torch.LongTensor]`): contexts `(length,)`, without padding.
        lengths (`Sequence[int]`): γ.
        blocks (`int`): drawn for each prompt.
        seed (`int`): of the draws; the global generator is left where it was.
    """
    longest = max(lengths)
    found: dict[int, list[float]] = {length: [] for length in lengths}
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=longest,
        min_new_tokens=longest,
        num_return_sequences=blocks,
        pad_token_id=0,
    )
    devices = [draft.device] if draft.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = prompt[None].to(draft.device)
            plainly = {"semspec": None} if getattr(draft.generation_config, "semspec", None) is not None else {}
            text = draft.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **plainly)
            text = text.to(model.device)
            tokens = text[:, len(prompt) :]
            parts = list(zip(text.split(8), tokens.split(8), strict=True))
            log_p, log_q = (torch.cat([_of_tokens(each, part, new) for part, new in parts]) for each in (model, draft))
            log_w = (log_p - log_q).cumsum(-1)  # (blocks, longest)
            for length in lengths:
                w = log_w[:, length - 1]
                chi2 = float((2 * w).logsumexp(0) - 2 * w.logsumexp(0) + math.log(blocks))
                found[length].append(math.expm1(chi2) if math.isfinite(chi2) else math.inf)
    return {length: sorted(values)[len(values) // 2] for length, values in found.items()}


def _of_tokens(model: PreTrainedModel, text: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """(rows, n) float64 log-probabilities of the last n ids `new` of `text`; -inf where the model has no such id."""
    laws = log_laws(model, text, torch.ones_like(text).bool())[:, -new.shape[1] - 1 : -1]
    size = laws.shape[-1]
    log = laws.gather(-1, new.clamp(max=size - 1).unsqueeze(-1))[..., 0]
    return log.masked_fill(new >= size, -torch.inf).double()
