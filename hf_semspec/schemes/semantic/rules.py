"""Pure rules of the scheme `semantic`: when a drafted segment stands.

P and Q are the probabilities that target and draft give to a meaning (or to one segment), or estimates of them, in
linear scale. Nothing here reads a tensor on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def score_ratio(target: Tensor, draft: Tensor) -> Tensor:
    """P/Q; 0 where Q <= 0, so that what the draft is said never to write cannot stand."""
    return torch.where(draft > 0, target / draft.clamp(min=torch.finfo(draft.dtype).tiny), 0.0)


def acceptance_probability(ratio: Tensor, accept_floor: float) -> Tensor:
    """min(1, P/Q), and 0 below the floor."""
    return ratio.clamp(max=1.0).masked_fill(ratio < accept_floor, 0.0)


def accepted(ratio: Tensor, uniforms: Tensor | None, accept_floor: float, accept_ratio: float) -> Tensor:
    """Which segments stand by their score.

    Args:
        ratio (`(B,)`): P/Q.
        uniforms (`(B,)` in [0, 1), or `None` if greedy): a segment stands iff its number is below the acceptance
            probability; greedy iff `ratio` reaches both `accept_floor` and `accept_ratio`.

    Returns:
        `(B,)` bool.
    """
    if uniforms is None:
        return ratio >= max(accept_floor, accept_ratio)
    return uniforms < acceptance_probability(ratio, accept_floor)


def within_top_k(scores: Tensor, ids: Tensor, k: int) -> Tensor:
    """Whether each of `ids` (...) is among the `k` best of `scores` (..., V); ties count for it, ids without mass
    never."""
    own = scores.gather(-1, ids.unsqueeze(-1))
    better = (scores > own).sum(dim=-1)
    return (better < k) & (own.squeeze(-1) > -torch.inf)


def leading_matches(choices: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """The tokens of a failed segment that a greedy target keeps: the longest run that it would have written, all but
    the last, which then comes as the target's own.

    Args:
        choices (`(B, >= γ)` int64): the target's best id at each place.
        ids (`(B, γ)` int64): the segment.
        counts (`(B,)` int64): its length, >= 1.

    Returns:
        `(B,)` int64, below `counts`.
    """
    same = (choices[:, : ids.shape[1]] == ids).long().cumprod(dim=-1).sum(dim=-1)
    return torch.minimum(same, counts - 1)


def residual_keep_probability(target: Tensor, draft: Tensor, acceptance: Tensor) -> Tensor:
    """(1 - a·Q/P)_+, which is (1 - Q/P)_+ for a = min(1, P/Q): with this probability a segment that the target writes
    after a rejection is kept, and else drawn again, in the variant whose committed law is exactly P (ours)."""
    return (1 - acceptance * score_ratio(draft, target)).clamp(min=0.0)
