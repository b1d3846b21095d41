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
        law (`(B, V)`, or `None` if greedy): probabilities that the next token is drawn from; sums to 1.
        token (`(B,)` int64, or `None` if sampling): the next token.
        chain (`(B,)` int64): the first of the chains that carry the accepted tokens; 0 for a single chain.
        triggered (`(B,)` int64, or `None`): where the outcome is `RESAMPLED`, the token that passed; `None` if that
            is the drafted one of `chain`.
    """

    num_accepted: Tensor
    outcome: Tensor
    law: Tensor | None
    token: Tensor | None
    chain: Tensor
    triggered: Tensor | None = None


def residual_law(p: Tensor, q: Tensor) -> Tensor:
    """Law of the token that replaces a rejected one, norm(max(p - q, 0)) (arXiv 2211.17192, section 2.3).

    Args:
        p (`(..., V)`): target probabilities.
        q (`(..., V)`): draft probabilities.

    Returns:
        `(..., V)` probabilities; p itself where the residual's mass is within rounding of 0 (at most the dtype's eps):
        what is left there is noise, and a row is sent there with a chance of that size only.
    """
    return _normalised_excess(p, q, p)


def accept_chain(
    log_p: Tensor,
    log_q: Tensor,
    drafts: Tensor,
    uniforms: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    penalty: float = 0.0,
) -> Acceptance:
    """Speculative sampling of one chain a row (arXiv 2211.17192, algorithm 1), with easd's triggers (2512.23765).

    Token d stands iff u·q(d) < p(d). Without triggers the committed tokens follow p exactly.

    Args:
        log_p (`(B, γ+1, V)`): log-probabilities of the target at every drafted position and the one after; -inf is 0.
        log_q (`(B, γ, V)`): log-probabilities that each drafted token was drawn from.
        drafts (`(B, γ)` int64): drafted tokens.
        uniforms (`(B, γ)`): draws from [0, 1).
        valid (`(B, γ)` bool): tokens that were really drafted; at the first that was not, the row stops without a
            test and its next token is from p. Default: all.
        triggers (`(B, γ)` bool): positions where a token that passes the test is drawn again from p with the token's
            own probability multiplied by `penalty`. Where that leaves no mass, the token stands. Default: none.
        penalty (`float` in [0, 1]): 0 excludes the token, 1 is a plain draw from p.

    Returns:
        The `Acceptance`, with `law`.
    """
    gamma = drafts.shape[1]
    index = drafts.unsqueeze(-1)
    p_drafted = log_p[:, :gamma].gather(-1, index).squeeze(-1).exp()  # (B, γ)
    q_drafted = log_q.gather(-1, index).squeeze(-1).exp()  # (B, γ)
    passed = uniforms * q_drafted < p_drafted
    if triggers is not None:
        triggers = triggers & _has_mass(p_drafted, penalty)
    num_accepted, outcome = _stop(passed, valid, triggers)
    p = _rows(log_p, num_accepted).exp_()  # (B, V)
    chain = torch.zeros_like(num_accepted)
    if gamma == 0:
        return Acceptance(num_accepted, outcome, p, None, chain)
    last_tested = num_accepted.clamp(max=gamma - 1)
    q = _rows(log_q, last_tested).exp_().mul_((outcome == RESIDUAL).unsqueeze(-1))  # (B, V)
    token = None if triggers is None else drafts.gather(-1, last_tested.unsqueeze(-1))
    return Acceptance(num_accepted, outcome, _next_law(p, q, outcome, token, penalty), None, chain)


def accept_chain_greedy(
    choices: Tensor,
    drafts: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    log_p: Tensor | None = None,
    penalty: float = 0.0,
) -> Acceptance:
    """Greedy acceptance of one chain a row: a token stands iff it is the target's choice.

    Without triggers the committed tokens are those of greedy decoding.

    Args:
        choices (`(B, γ+1)` int64): argmax of the target's processed scores, after every drafted prefix.
        drafts (`(B, γ)` int64): drafted tokens.
        valid (`(B, γ)` bool): as for [`accept_chain`].
        triggers (`(B, γ)` bool): as for [`accept_chain`]; the token drawn again is the argmax (the drafted one on a
            tie).
        log_p (`(B, γ+1, V)`): log-probabilities of the target; needed with `triggers` only.
        penalty (`float` in [0, 1]): as for [`accept_chain`]; 1 never changes the output.

    Returns:
        The `Acceptance`, with `token`.

    Raises:
        ValueError: `triggers` without `log_p`.
    """
    num_accepted, outcome = _stop(drafts == choices[:, :-1], valid, _greedy_triggers(log_p, drafts, triggers, penalty))
    token = choices.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)
    if triggers is not None and log_p is not None:
        token = _next_choice(_rows(log_p, num_accepted).exp_(), token, outcome, penalty)
    return Acceptance(num_accepted, outcome, None, token, torch.zeros_like(num_accepted))


def accept_chains(
    log_p: Tensor,
    log_q: Tensor,
    drafts: Tensor,
    uniforms: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    penalty: float = 0.0,
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
        triggers (`(B, N, γ)` bool): as for [`accept_chain`], of the token that the rule accepted; read at the first
            chain that carries the prefix. Default: none.
        penalty (`float` in [0, 1]): as for [`accept_chain`].

    Returns:
        The `Acceptance`, with `law`.
    """
    batch, num_chains, gamma = drafts.shape
    if num_chains == 1 or gamma == 0:
        flags = [None if mask is None else mask[:, 0] for mask in (valid, triggers)]
        return accept_chain(
            log_p[:, 0], log_q[:, 0], drafts[:, 0], uniforms[:, 0], valid=flags[0], triggers=flags[1], penalty=penalty
        )
    nothing = drafts.new_zeros(batch)
    carries = torch.ones_like(drafts[:, :, 0], dtype=torch.bool)  # (B, N)
    goes, outcomes, leads, tokens, scales = [], [], [nothing], [], []
    for t in range(gamma):
        p, q = _rows(log_p[:, :, t], leads[t]).exp_(), _rows(log_q[:, :, t], leads[t]).exp_()  # (B, V)
        tested = carries if valid is None else carries & valid[:, :, t]
        hit, token, scale = _test_depth(p, q, drafts[:, :, t], uniforms[:, :, t], tested)
        triggered = torch.zeros_like(hit)
        if triggers is not None:
            p_token = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
            marked = triggers[:, :, t].gather(-1, leads[t].unsqueeze(-1)).squeeze(-1)
            triggered = hit & marked & _has_mass(p_token, penalty)
        carries = tested & (drafts[:, :, t] == token.unsqueeze(-1))
        goes.append(hit & ~triggered)
        outcomes.append(tested.any(-1).long() + triggered.long())
        leads.append(carries.long().argmax(-1))
        tokens.append(token)
        scales.append(scale)
    num_accepted = _leading(torch.stack(goes, -1))
    at, last_tested = num_accepted.unsqueeze(-1), num_accepted.clamp(max=gamma - 1).unsqueeze(-1)
    outcome = torch.stack([*outcomes, nothing], -1).gather(-1, at).squeeze(-1)
    chain = torch.stack(leads, -1).gather(-1, at).squeeze(-1)
    scale = torch.cat(scales, -1).gather(-1, last_tested) * (outcome == RESIDUAL).unsqueeze(-1)
    p = _rows(log_p.flatten(1, 2), chain * (gamma + 1) + num_accepted).exp_()
    q = _rows(log_q.flatten(1, 2), chain * gamma + last_tested.squeeze(-1)).exp_().mul_(scale)
    stopped_at = None if triggers is None else torch.stack(tokens, -1).gather(-1, last_tested)
    passed = None if stopped_at is None else stopped_at.squeeze(-1)
    return Acceptance(num_accepted, outcome, _next_law(p, q, outcome, stopped_at, penalty), None, chain, passed)


def accept_chains_greedy(
    choices: Tensor,
    drafts: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    log_p: Tensor | None = None,
    penalty: float = 0.0,
) -> Acceptance:
    """Greedy acceptance of N chains a row: the longest chain of the target's own choices stands.

    Without triggers the committed tokens are those of greedy decoding. Chains that share a prefix must share the
    choice and the trigger after it.

    Args:
        choices (`(B, N, γ+1)` int64): argmax of the target's processed scores, after every prefix of every chain.
        drafts (`(B, N, γ)` int64): drafted tokens.
        valid (`(B, N, γ)` bool): as for [`accept_chains`].
        triggers (`(B, N, γ)` bool): as for [`accept_chain_greedy`].
        log_p (`(B, N, γ+1, V)`): log-probabilities of the target; needed with `triggers` only.
        penalty (`float` in [0, 1]): as for [`accept_chain_greedy`].

    Returns:
        The `Acceptance`, with `token`.

    Raises:
        ValueError: `triggers` without `log_p`.
    """
    if drafts.shape[1] == 1:
        flags = [None if mask is None else mask[:, 0] for mask in (valid, triggers)]
        first_log_p = None if log_p is None else log_p[:, 0]
        return accept_chain_greedy(
            choices[:, 0], drafts[:, 0], valid=flags[0], triggers=flags[1], log_p=first_log_p, penalty=penalty
        )
    lengths, outcomes = _stop(
        drafts == choices[..., :-1], valid, _greedy_triggers(log_p, drafts, triggers, penalty)
    )  # (B, N)
    num_accepted, chain = lengths.max(-1)
    # Of the chains that carry the prefix one may have been tested where another was not drafted.
    outcome = (outcomes * (lengths == num_accepted.unsqueeze(-1))).amax(-1)
    positions = chain * choices.shape[-1] + num_accepted
    passed = choices.flatten(1).gather(-1, positions.unsqueeze(-1)).squeeze(-1)
    token = passed
    if triggers is not None and log_p is not None:
        token = _next_choice(_rows(log_p.flatten(1, 2), positions).exp_(), token, outcome, penalty)
    return Acceptance(num_accepted, outcome, None, token, chain, None if triggers is None else passed)


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


def _leading(flags: Tensor) -> Tensor:
    """Number of True before the first False along the last dimension."""
    return flags.cumprod(-1).sum(-1)


def _has_mass(p_drafted: Tensor, penalty: float) -> Tensor:
    """Whether p keeps mass to draw from once the probability of one token is multiplied by `penalty`."""
    return 1 - (1 - penalty) * p_drafted > torch.finfo(p_drafted.dtype).eps


def _greedy_triggers(log_p: Tensor | None, drafts: Tensor, triggers: Tensor | None, penalty: float) -> Tensor | None:
    if triggers is None:
        return None
    if log_p is None:
        raise ValueError("log_p = None: triggers need the target's log-probabilities, a tensor")
    p_drafted = log_p[..., :-1, :].gather(-1, drafts.unsqueeze(-1)).squeeze(-1).exp()
    return triggers & _has_mass(p_drafted, penalty)


def _stop(passed: Tensor, valid: Tensor | None, triggers: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each chain stops and why: number of accepted tokens and outcome, int64, reducing the last dimension.

    A chain that stops before its first undrafted position stopped at a test; if the ordinary tests alone would have
    let it go further, at a trigger.
    """
    if valid is None:
        limit: Tensor | int = passed.shape[-1]
    else:
        limit, passed = _leading(valid), passed & valid
    passing = _leading(passed)
    if triggers is None:
        return passing, (passing < limit).long()
    num_accepted = _leading(passed & ~triggers)
    return num_accepted, (num_accepted < limit).long() + (num_accepted < passing).long()


def _next_law(p: Tensor, q: Tensor, outcome: Tensor, stopped_at: Tensor | None, penalty: float) -> Tensor:
    """Law `(B, V)` of the next token, from p where each row stopped and q there, scaled to what the residual takes
    away.

    `stopped_at` `(B, 1)` is the token there, with triggers.
    """
    if stopped_at is None:
        return _normalised_excess(p, q, p)
    factor = 1 - (1 - penalty) * (outcome == RESAMPLED).unsqueeze(-1).to(p.dtype)
    return _normalised_excess(p.scatter(-1, stopped_at, p.gather(-1, stopped_at) * factor), q, p)


def _next_choice(p: Tensor, token: Tensor, outcome: Tensor, penalty: float) -> Tensor:
    """Greedy counterpart of `_next_law`: `token` `(B,)` is the target's choice where the row stopped."""
    index = token.unsqueeze(-1)
    best, other = p.scatter(-1, index, -1.0).max(-1)
    changed = (outcome == RESAMPLED) & (p.gather(-1, index).squeeze(-1) * penalty < best)
    return torch.where(changed, other, token)


def _normalised_excess(weights: Tensor, q: Tensor, otherwise: Tensor) -> Tensor:
    """norm(max(weights - q, 0)), and `otherwise` in the rows where that is numerically empty."""
    excess = (weights - q).clamp_(min=0)
    mass = excess.sum(-1, keepdim=True)
    some = mass > torch.finfo(mass.dtype).eps
    # Two scaled additions cost a third of a `torch.where` over the vocabulary.
    return excess.mul_(torch.where(some, 1 / mass, 0.0)).addcmul_(otherwise, (~some).to(mass.dtype))


def _rows(x: Tensor, index: Tensor) -> Tensor:
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
