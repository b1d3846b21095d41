"""Laws of the committed meaning that the rules of `semantic` lead to, in closed form."""

import torch
from torch import Tensor


def committed_law(target: Tensor, draft: Tensor, acceptance: Tensor) -> Tensor:
    """Law of the committed meaning where a drafted one stands with probability `acceptance` and the target writes
    otherwise: Q·a + (1 - A)·P with A = Σ Q·a.

    With the true P and Q and a = min(1, P/Q) this is min(P, Q) + (1 - A)·P, and its total variation to P is at most
    A·(1 - A) <= 1/4.

    Args:
        target, draft, acceptance (`(..., M)`): P, Q and a of each meaning.
    """
    kept = draft * acceptance
    return kept + (1 - kept.sum(dim=-1, keepdim=True)) * target


def exact_law(target: Tensor, draft: Tensor, acceptance: Tensor, keep: Tensor) -> Tensor:
    """Law of the committed meaning where after a rejection the target writes until what it wrote is kept, with
    probability `keep` (`(..., M)`) for each meaning; P itself for `residual_keep_probability`."""
    stands = draft * acceptance
    kept = target * keep
    mass = kept.sum(dim=-1, keepdim=True)
    residual = torch.where(mass > 0, kept / mass.clamp(min=torch.finfo(kept.dtype).tiny), target)
    return stands + (1 - stands.sum(dim=-1, keepdim=True)) * residual
