"""Pure measures of uncertainty: entropies, top-N overlap and easd's trigger (arXiv 2512.23765).

p is the target's next-token law and q the draft's, both after the logits processors. Nothing here reads a tensor on
the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.acceptance import entropy


def top_overlap(log_p: Tensor, log_q: Tensor, n: int) -> Tensor:
    """Overlap of the two top-N sets, |TopN(p) ∩ TopN(q)| / min(n, |supp p|, |supp q|).

    TopN holds the n likeliest of the ids that have mass; ties go as `torch.topk` has them.

    Args:
        log_p (`(..., V)`): log-probabilities of the target.
        log_q (`(..., V)`): log-probabilities of the draft.
        n (`int` >= 1): size of the sets.

    Returns:
        `(...)`, between 0 and 1, in the dtype of `log_p`.

    Raises:
        ValueError: `n` < 1.
    """
    if n < 1:
        raise ValueError(f"n = {n}: must be at least 1")
    k = min(n, log_p.shape[-1])
    (top_p, ids_p), (top_q, ids_q) = log_p.topk(k), log_q.topk(k)  # (..., k)
    has_p, has_q = top_p.exp() > 0, top_q.exp() > 0
    same = (ids_p.unsqueeze(-1) == ids_q.unsqueeze(-2)) & has_p.unsqueeze(-1) & has_q.unsqueeze(-2)  # (..., k, k)
    smaller = torch.minimum(has_p.sum(-1), has_q.sum(-1)).clamp(min=1)
    return same.sum((-1, -2)).to(log_p.dtype) / smaller


def uncertain_agreement(
    log_p: Tensor,
    log_q: Tensor,
    *,
    target_entropy_threshold: float,
    draft_entropy_threshold: float,
    overlap_threshold: float,
    top_n: int,
    entropies: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Positions where both laws are uncertain and yet agree: where easd rejects a token that passed the ordinary test.

    Args:
        log_p (`(..., V)`): log-probabilities of the target.
        log_q (`(..., V)`): log-probabilities of the draft.
        target_entropy_threshold (`float`): nats, may be inf; H(p) must reach it.
        draft_entropy_threshold (`float`): nats, may be inf; H(q) must reach it.
        overlap_threshold (`float`): [`top_overlap`] must reach it; above 1 it never does.
        top_n (`int` >= 1): size of the top sets.
        entropies (two of `(...)`, *optional*): H(p) and H(q) in nats, where they are known already.

    Returns:
        `(...)` bool.

    Raises:
        ValueError: `top_n` < 1.
    """
    h_p, h_q = entropies or (entropy(log_p), entropy(log_q))
    uncertain = (h_p >= target_entropy_threshold) & (h_q >= draft_entropy_threshold)
    return uncertain & (top_overlap(log_p, log_q, top_n) >= overlap_threshold)
