"""Pure acceptance rules: which drafted tokens stand, and the law of the token that follows them.

Throughout, p is the target's next-token law and q the draft's, both after the logits processors and in log space on
the way in. Nothing here reads a tensor on the host, so a round of speculative decoding can be decided on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BONUS, RESIDUAL, RESAMPLED = 0, 1, 2


class Acceptance(NamedTuple):
    """What one round decided, for `B` rows.

    Attributes:
        num_accepted (`(B,)` int64): drafted tokens that stand.
        outcome (`(B,)` int64): why the row stopped: `BONUS` (no token was left to test), `RESIDUAL` (a token failed
            the ordinary test) or `RESAMPLED` (a token passed it, but a trigger stopped the row).
        law (`(B, V)`, or `None` if `token` is given): probabilities that the next token is drawn from; sums to 1.
        token (`(B,)` int64, or `None` if sampling): the next token.
        chain (`(B,)` int64, or `None` for a single chain): the first of the chains that carry the accepted tokens.
        triggered (`(B,)` int64, or `None`): where the outcome is `RESAMPLED`, the token that passed; `None` if that
            is the drafted one of `chain`.
        lawless (`(B,)` bool, or `None`): where `token` was drawn from what is no law, so that it means nothing.
    """

    num_accepted: Tensor
    outcome: Tensor
    law: Tensor | None = None
    token: Tensor | None = None
    chain: Tensor | None = None
    triggered: Tensor | None = None
    lawless: Tensor | None = None

    @property
    def lead(self) -> Tensor:
        """`chain`, 0 where there is one chain only."""
        return torch.zeros_like(self.num_accepted) if self.chain is None else self.chain


def residual_law(p: Tensor, q: Tensor) -> Tensor:
    """Law of the token that replaces a rejected one, norm(max(p - q, 0)) (arXiv 2211.17192, section 2.3).

    Args:
        p (`(..., V)`): target probabilities.
        q (`(..., V)`): draft probabilities.

    Returns:
        `(..., V)` probabilities; p itself where the residual's mass is within rounding of 0 (at most the dtype's eps):
        what is left there is noise, and a row is sent there with a chance of that size only.
    """
    excess = (p - q).clamp_(min=0)
    mass = excess.sum(-1, keepdim=True)
    some = mass > torch.finfo(mass.dtype).eps
    # Two scaled additions cost a third of a `torch.where` over the vocabulary.
    return excess.mul_(torch.where(some, 1 / mass, 0.0)).addcmul_(p, (~some).to(mass.dtype))


def drafted(law: Tensor, ids: Tensor) -> Tensor:
    """Probability of each of `ids` (..., γ) under the log-probabilities `law` (..., >= γ, V) at its place."""
    return law[..., : ids.shape[-1], :].gather(-1, ids.unsqueeze(-1)).squeeze(-1).exp()


def next_law(log_p: Tensor, log_q: Tensor, num_accepted: Tensor, outcome: Tensor) -> Tensor:
    """Law `(B, V)` of the token that follows what stands of one chain a row: [`residual_law`] where a token failed
    the ordinary test, p elsewhere.

    Args:
        log_p (`(B, γ+1, V)`), log_q (`(B, γ, V)`): as for [`accept_chains`].
        num_accepted, outcome (`(B,)` int64): as [`stop`] gives them.
    """
    q = rows_at(log_q, num_accepted.clamp(max=log_q.shape[1] - 1)).exp_()
    return residual_law(rows_at(log_p, num_accepted).exp_(), switched(q, outcome == RESIDUAL))


def switched(values: Tensor, on: Tensor) -> Tensor:
    """`values` (..., V), which are overwritten: 0 where `on` (...) is False, also for nan, which a draft that has no
    law leaves. Masking the bits takes the time of a product, a sixth of `masked_fill_`."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    values.view(bits).bitwise_and_(-on.to(bits).unsqueeze(-1))
    return values


def accept_chains(
    log_p: Tensor,
    log_q: Tensor,
    drafts: Tensor,
    uniforms: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
) -> Acceptance:
    """Exact multi-draft acceptance of N chains a row, drawn independently from q (recursive rejection sampling).

    At each depth the chains that carry the accepted prefix are tested in turn: a token stands iff u·q(d) < β(d), with
    β = p at first and β = norm(max(β - q, 0)) after each rejection (β itself where that is within rounding of empty).
    If all fail, the next token is from β. Without triggers the committed tokens follow p exactly.

    Args:
        log_p (`(B, N, γ+1, V)`): log-probabilities of the target after every prefix of every chain.
        log_q (`(B, N, γ, V)`): log-probabilities that the tokens were drawn from, functions of the prefix.
        drafts (`(B, N, γ)` int64): drafted tokens.
        uniforms (`(B, N, γ)`): draws from [0, 1).
        valid (`(B, N, γ)` bool): tokens that were really drafted. Where no chain that carries the prefix has one, the
            row stops without a test and its next token is from p. Must depend on the prefix alone. Default: all.
        triggers (`(B, N, γ)` bool): positions where a chain that passes the test stops all the same (easd); read at
            the first chain that carries the token. Default: none.

    Returns:
        The `Acceptance`, with `law`; p where a trigger stopped the row.
    """
    batch, _, gamma = drafts.shape
    nothing = drafts.new_zeros(batch)
    carries = torch.ones_like(drafts[:, :, 0], dtype=torch.bool)  # (B, N)
    goes, outcomes, leads, tokens, scales = [], [], [nothing], [], []
    for t in range(gamma):
        p, q = rows_at(log_p[:, :, t], leads[t]).exp_(), rows_at(log_q[:, :, t], leads[t]).exp_()  # (B, V)
        tested = carries if valid is None else carries & valid[:, :, t]
        hit, token, scale = _test_depth(p, q, drafts[:, :, t], uniforms[:, :, t], tested)
        carries = tested & (drafts[:, :, t] == token.unsqueeze(-1))
        leads.append(carries.long().argmax(-1))
        triggered = torch.zeros_like(hit)
        if triggers is not None:
            triggered = hit & triggers[:, :, t].gather(-1, leads[-1].unsqueeze(-1)).squeeze(-1)
        goes.append(hit & ~triggered)
        outcomes.append(tested.any(-1).long() + triggered.long())
        tokens.append(token)
        scales.append(scale)
    num_accepted = leading(torch.stack(goes, -1))
    at, last_tested = num_accepted.unsqueeze(-1), num_accepted.clamp(max=gamma - 1).unsqueeze(-1)
    outcome = torch.stack([*outcomes, nothing], -1).gather(-1, at).squeeze(-1)
    chain = torch.stack(leads, -1).gather(-1, at).squeeze(-1)
    scale = torch.cat(scales, -1).gather(-1, last_tested)
    p = rows_at(log_p.flatten(1, 2), chain * (gamma + 1) + num_accepted).exp_()
    q = rows_at(log_q.flatten(1, 2), chain * gamma + last_tested.squeeze(-1)).exp_()
    q = switched(q, outcome == RESIDUAL).mul_(scale)
    stopped_at = None if triggers is None else torch.stack(tokens, -1).gather(-1, last_tested).squeeze(-1)
    return Acceptance(num_accepted, outcome, residual_law(p, q), None, chain, stopped_at)


def accept_chains_greedy(
    choices: Tensor,
    drafts: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
) -> Acceptance:
    """Greedy acceptance of N chains a row: the longest chain of the target's own choices stands.

    Without triggers the committed tokens are those of greedy decoding. Chains that share a prefix must share the
    choice and the trigger after it.

    Args:
        choices (`(B, N, γ+1)` int64): argmax of the target's processed scores, after every prefix of every chain.
        drafts (`(B, N, γ)` int64): drafted tokens.
        valid (`(B, N, γ)` bool): as for [`accept_chains`].
        triggers (`(B, N, γ)` bool): as for [`accept_chains`].

    Returns:
        The `Acceptance`, with `token`, the target's choice also where a trigger stopped the row.
    """
    lengths, outcomes = stop(drafts == choices[..., :-1], valid, triggers)  # (B, N)
    num_accepted, chain = lengths.max(-1)
    # Of the chains that carry the prefix one may have been tested where another was not drafted.
    outcome = (outcomes * (lengths == num_accepted.unsqueeze(-1))).amax(-1)
    positions = chain * choices.shape[-1] + num_accepted
    token = choices.flatten(1).gather(-1, positions.unsqueeze(-1)).squeeze(-1)
    return Acceptance(num_accepted, outcome, None, token, chain, None if triggers is None else token)


def _test_depth(
    p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor, tested: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tests one token of each chain in turn: whether one stands `(B,)`, which `(B,)`, the residual's scale `(B, 1)`.

    After k rejections β ∝ max(p - s_k·q, 0), with Z_k its mass, s_0 = 0, Z_0 = 1 and s_{k+1} = s_k + Z_k. So the
    (B, V) work is one mass a rejection, and all the tokens can be tested at once, each against the β of its turn.
    """
    scale, mass = torch.zeros_like(p[:, :1]), torch.ones_like(p[:, :1])
    scales, masses = [scale], [mass]
    for _ in range(tokens.shape[-1]):
        next_scale = scale + mass
        left = torch.addcmul(p, q, next_scale, value=-1).clamp_(min=0).sum(-1, keepdim=True)
        kept = left > torch.finfo(left.dtype).eps
        scale, mass = torch.where(kept, next_scale, scale), torch.where(kept, left, mass)
        scales.append(scale)
        masses.append(mass)
    s, z = torch.cat(scales, -1), torch.cat(masses, -1)  # (B, N+1)
    turn = tested.cumsum(-1)
    before = turn - tested.long()
    p_token, q_token = p.gather(-1, tokens), q.gather(-1, tokens)
    passed = tested & (uniforms * q_token * z.gather(-1, before) < p_token - s.gather(-1, before) * q_token)
    token = tokens.gather(-1, passed.long().argmax(-1, keepdim=True)).squeeze(-1)
    return passed.any(-1), token, s.gather(-1, turn[:, -1:])


def leading(flags: Tensor) -> Tensor:
    """Number of True before the first False along the last dimension."""
    return flags.cumprod(-1).sum(-1)


def stop(passed: Tensor, valid: Tensor | None, triggers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where each chain stops and why: number of accepted tokens and outcome, int64, reducing the last dimension.

    A chain that stops before its first undrafted position stopped at a test; if the ordinary tests alone would have
    let it go further, at a trigger.
    """
    if valid is None:
        limit: Tensor | int = passed.shape[-1]
    else:
        limit, passed = leading(valid), passed & valid
    passing = leading(passed)
    if triggers is None:
        return passing, (passing < limit).long()
    num_accepted = leading(passed & ~triggers)
    return num_accepted, (num_accepted < limit).long() + (num_accepted < passing).long()


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b]]`, a copy `(B, V)` of `x` `(B, T, V)`; far cheaper on the CPU than indexing with two tensors."""
    batch, length = x.shape[:2]
    if batch > 1:
        index = index + torch.arange(0, batch * length, length, device=x.device)
    return x.flatten(0, 1).index_select(0, index)


def entropy(log_p: Tensor) -> Tensor:
    """Shannon entropy in nats, with 0·log 0 = 0.

    Args:
        log_p (`(..., V)`): log-probabilities; -inf is probability 0.

    Returns:
        `(...)`, between 0 and log V.
    """
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
