"""Block verification (arXiv 2403.10444): how much of a drafted chain stands is decided for all of it at once.

With p_0 = 1 and p_i = min(1, p_{i-1}·P_i(d_i)/Q_i(d_i)), where P_i and Q_i are the laws of the i-th token after the
ones before it, and d_1..d_γ is drawn from Q:

    Z_i = Σ_v max(p_i·P_{i+1}(v) - Q_{i+1}(v), 0),  h_i = Z_i / (Z_i + 1 - p_i) for i < γ,  h_γ = p_γ

the largest i in 1..γ with u_i < h_i is how many tokens stand, or none, and the next one is drawn from
max(p_i·P_{i+1} - Q_{i+1}, 0), normalised; from P after all γ. The law is exact. A round gives 1 + Σ E[p_i] tokens,
never fewer than testing them one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.acceptance import BONUS, RESIDUAL, Acceptance, leading, rows_at, switched


def accept_block(
    log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor, *, valid: Tensor | None = None
) -> Acceptance:
    """The rule above, for every row of a block of one chain.

    Args:
        log_p (`(B, γ+1, V)`): log-probabilities of the target after every prefix of the chain.
        log_q (`(B, γ, V)`): log-probabilities that the tokens were drawn from.
        drafts (`(B, γ)` int64): drafted tokens.
        uniforms (`(B, γ)`): draws from [0, 1).
        valid (`(B, γ)` bool): tokens that can be tested; a row's block ends before the first that cannot. Must depend
            on the prefix alone. Default: all.

    Returns:
        The `Acceptance`, with `law`: `BONUS` where the whole block of a row stands, else `RESIDUAL`. The law is P
        where what is left of it is within rounding of empty.
    """
    gamma = drafts.shape[1]
    sizes = torch.full_like(drafts[:, 0], gamma) if valid is None else leading(valid)  # (B,), γ of each row
    standing = survival(log_p, log_q, drafts)
    left = excess(log_p[:, 1:-1].exp(), log_q[:, 1:].exp(), standing[:, :-1]).sum(-1)  # Z_1..Z_{γ-1}
    left = torch.cat([left, standing[:, -1:]], -1)
    index, end = torch.arange(1, gamma + 1, device=drafts.device), sizes.unsqueeze(-1)
    # Strict, so that 0/0 is 0, and u = 0 does not let through what P excludes.
    passed = torch.where(index == end, uniforms < standing, uniforms * (left + 1 - standing) < left) & (index <= end)
    num_accepted = (passed * index).amax(-1)
    outcome = torch.where(num_accepted < sizes, RESIDUAL, BONUS)
    p = rows_at(log_p, num_accepted).exp_()
    q = switched(rows_at(log_q, num_accepted.clamp(max=gamma - 1)).exp_(), outcome == RESIDUAL)
    scale = torch.cat([torch.ones_like(standing[:, :1]), standing], -1).gather(-1, num_accepted.unsqueeze(-1))
    law = excess(p, q, scale.squeeze(-1))
    mass = law.sum(-1, keepdim=True)
    some = mass > torch.finfo(mass.dtype).eps
    law = law.mul_(torch.where(some, 1 / mass, 0.0)).addcmul_(p, (~some).to(p.dtype))
    return Acceptance(num_accepted, outcome, law)


def survival(log_p: Tensor, log_q: Tensor, drafts: Tensor) -> Tensor:
    """p_1..p_γ `(B, γ)` of the drafted chains: how probable it is that at least so many of its tokens stand.

    In logs the recursion is a walk that is held down at 0: its distance below the highest point it has reached.
    """
    index = drafts.unsqueeze(-1)
    steps = log_p[:, :-1].gather(-1, index) - log_q.gather(-1, index)
    walk = steps.squeeze(-1).cumsum(-1)
    return (walk - walk.cummax(-1).values.clamp(min=0)).exp()


def excess(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """max(scale·p - q, 0) of laws `(..., V)` and `scale` `(...)`, in the place of `q`."""
    return q.addcmul_(p, scale.unsqueeze(-1), value=-1).neg_().clamp_(min=0)
