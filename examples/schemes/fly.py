"""FLy (arXiv 2511.22972): a draft that fails stands all the same where the target is unsure and soon agrees again.

A round goes through its drafts d_1..d_γ by the test of `lossless`: d_t passes greedily iff it is the target's choice,
sampling with probability min(1, p_t(d_t) / q_t(d_t)). Then

    gate      H(p_t) / log V >= threshold: the target is unsure; below it the failure is an error
    window    d_{t+1}..d_{t+window} all pass: the target goes on as if d_t had been its own
    stands    d_t if it passes, or if both hold and p_t(d_t) > 0

and the round ends at the first that does not stand, with the next token of `lossless`. A window that does not fit in
what was drafted is a refusal: a failure among the last `window` drafts of a block ends it, so blocks should be longer.

From the paper: gate, window, the defaults 0.3 and 6; from the authors' code: the block's end. Ours: the test under
sampling (theirs draws from p and compares), p_t(d_t) > 0, which keeps out what `top_k` or a grammar forbids, and
`num_draft_tokens`. Their code takes the entropy of the three likeliest tokens, in nats: there 0.3 is another gate; and
it counts d_t as the window's first.

Sampled tokens do not follow p. Given what came before, d_t stands with probability min(1, p/q) + (1 - min(1, p/q))·w,
with w the chance that gate and window hold; what replaces it is from norm(max(p - q, 0)).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from hf_semspec import register_scheme
from hf_semspec.schemes import Acceptance, Block, TokenLevelConfig, next_law, stop, within


@dataclass(frozen=True, kw_only=True)
class FlyConfig(TokenLevelConfig):
    """The fields of `fly`, beside those of every token-level scheme.

    Args:
        window: following drafts that must pass, in [1, 63].
        threshold: normalised entropy from which the target is unsure, >= 0; above 1 nothing is, which is `lossless`.
        num_draft_tokens: as everywhere, but 12 by default, twice the window. Ours.
    """

    window: int = within(6, 1, 63)
    threshold: float = within(0.3, 0)
    num_draft_tokens: int | Literal["auto"] = within(12, 1, 64)


def accept(block: Block, config: FlyConfig) -> Acceptance:
    """The rule above, for every row of a block."""
    log_p = block.log_p[:, :-1]  # (rows, γ, V)
    log_p_drafted = log_p.gather(-1, block.drafts.unsqueeze(-1)).squeeze(-1)  # (rows, γ)
    if block.choices is not None:
        passed = block.drafts == block.choices[:, :-1]
    else:
        log_q_drafted = block.log_q.gather(-1, block.drafts.unsqueeze(-1)).squeeze(-1)
        passed = block.uniforms * log_q_drafted.exp() < log_p_drafted.exp()
    if block.valid is not None:
        passed = passed & block.valid
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    unsure = entropy / math.log(log_p.shape[-1]) >= config.threshold
    stands = passed | (unsure & window_agrees(passed, config.window) & (log_p_drafted > -math.inf))
    num_accepted, outcome = stop(stands, block.valid)
    if block.choices is not None:
        return Acceptance(num_accepted, outcome, token=block.choices.gather(-1, num_accepted[:, None]).squeeze(-1))
    return Acceptance(num_accepted, outcome, law=next_law(block.log_p, block.log_q, num_accepted, outcome))


def window_agrees(passed: torch.Tensor, window: int) -> torch.Tensor:
    """Whether the `window` drafts after each all pass; not where there are fewer."""
    agrees = torch.zeros_like(passed)
    if passed.shape[-1] > window:
        agrees[:, :-window] = passed[:, 1:].unfold(-1, window, 1).all(-1)
    return agrees


register_scheme("fly", FlyConfig, accept=accept)
