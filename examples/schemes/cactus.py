"""Cactus (arXiv 2604.04987): the drafted token is given as much more probability as a divergence budget allows.

For a drafted token d the target's law p is replaced by h, the law most favourable to d within the budget δ:

    h(d)  min(1, p(d) + sqrt(2·δ·p(d)·(1 - p(d))))
    h(x)  p(x)·(1 - h(d)) / (1 - p(d)) for all others, so they keep their proportions

and the round is that of `lossless` with h in the place of p:

    accept    d_t stands with probability min(1, h_t(d_t) / q_t(d_t))
    residual  the first that fails is replaced by x ~ norm(max(h_t - q_t, 0))
    bonus     where none fails, x ~ p_{γ+1} follows

From the paper: the above; its budget is in nats of KL(h || p), to second order. That order is exact for another
divergence: χ²(h || p) = Σ (h - p)² / p is at most 2δ, so KL(h || p) <= log(1 + 2δ). Ours: saying so, h = p where
p(d) = 1, the default δ, and the greedy case, in which p is a point mass, p·(1 - p) = 0, and nothing is added.

Sampled tokens do not follow p, nor one h: each draft d has its own, and x is committed with probability
min(q(x), h_x(x)) + Σ_d max(q(d) - h_d(d), 0)·norm(max(h_d - q, 0))(x). The budget bounds each h_d, not this law.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_semspec import register_scheme
from hf_semspec.schemes import RESIDUAL, Acceptance, Block, TokenLevelConfig, residual_law, stop, within


@dataclass(frozen=True, kw_only=True)
class CactusConfig(TokenLevelConfig):
    """The fields of `cactus`, beside those of every token-level scheme.

    Args:
        delta: δ, the budget a token, in [0, 100]; 0 is `lossless`. From (1 - p) / (2·p) on, a token always stands.
    """

    delta: float = within(1.0, 0, 100)


def accept(block: Block, config: CactusConfig) -> Acceptance:
    """The rule above, for every row of a block."""
    if block.choices is not None:
        num_accepted, outcome = stop(block.drafts == block.choices[:, :-1], block.valid)
        return Acceptance(num_accepted, outcome, token=block.choices.gather(-1, num_accepted[:, None]).squeeze(-1))
    at = block.drafts.unsqueeze(-1)  # (rows, γ, 1)
    h, q = boosted(block.log_p[:, :-1].gather(-1, at).exp(), config.delta), block.log_q.gather(-1, at).exp()
    num_accepted, outcome = stop(block.uniforms * q.squeeze(-1) < h.squeeze(-1), block.valid)
    # The law of the next token needs p, q and the draft at one place of each row only.
    rejected = outcome == RESIDUAL
    rows = torch.arange(len(rejected), device=rejected.device)
    last = num_accepted.clamp(max=block.drafts.shape[1] - 1)
    p, drafted = block.log_p[rows, num_accepted].exp(), block.drafts[rows, last].unsqueeze(-1)
    h = favoured(p, drafted, config.delta * rejected.to(p.dtype).unsqueeze(-1))
    q = block.log_q[rows, last].exp() * rejected.unsqueeze(-1)
    return Acceptance(num_accepted, outcome, law=residual_law(h, q))


def boosted(p: Tensor, delta: float | Tensor) -> Tensor:
    """h(d) for probabilities p(d)."""
    p = p.clamp(max=1)
    return (p + (2 * delta * p * (1 - p)).sqrt()).clamp(max=1)


def favoured(p: Tensor, drafted: Tensor, delta: float | Tensor) -> Tensor:
    """h, (rows, V), for laws p (rows, V) and drafted tokens (rows, 1)."""
    p_drafted = p.gather(-1, drafted).clamp(max=1)
    h_drafted = boosted(p_drafted, delta)
    others = ((1 - h_drafted) / (1 - p_drafted)).nan_to_num(nan=1.0)
    return (p * others).scatter(-1, drafted, h_drafted)


register_scheme("cactus", CactusConfig, accept=accept)
