"""Weights, resampling and evidence of a population of particles (arXiv 2604.15672): pure functions of tensors.

Shapes are (rows, N), one row a prompt and N particles each; log-weights are natural logs in float64, and -inf is a
particle of no weight. The weights are proper for p^α: with q > 0 wherever p > 0, the mean of exp(log-evidence) is
Σ p^α over complete texts, which is 1 for α = 1. Where q lacks ids that p has, it is the smaller for their share.
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional

RESAMPLINGS = ("systematic", "multinomial", "stratified", "residual")
SELECTIONS = ("sample", "best")
# A resampling only levels what rounding could not have made uneven.
ROUNDING = 1e-6


def draw(scores: torch.Tensor, uniforms: torch.Tensor, power: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """One id a row from softmax(power · scores), by inverting its cumulative sum in float64.

    One number a row instead of one for each id: noise over the whole vocabulary costs many times the rest of the draw.

    Args:
        scores: (..., vocabulary); ids at -inf are never drawn where another is finite.
        uniforms: (...) float64 in [0, 1).

    Returns:
        ids (...) int64, and their log-probabilities (...) float64: -inf where no id has mass, nan only where the
        scores hold nan.
    """
    exact = scores.double()
    peak = exact.amax(dim=-1, keepdim=True)
    exact = (exact - peak).mul_(power)
    cumulative = exact.exp().cumsum(dim=-1)
    mass = cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * mass, right=True).clamp_(max=scores.shape[-1] - 1)
    log_probs = torch.where(peak == -torch.inf, peak, exact.gather(-1, tokens) - mass.log())
    return tokens.squeeze(-1), log_probs.squeeze(-1)


def token_log_probs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of `tokens` (...) under softmax of `scores` (..., vocabulary), in float64.

    -inf for a token without mass, also where no id has any; nan only where the scores hold nan.
    """
    exact = scores.double()
    chosen = exact.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(chosen == -torch.inf, chosen, chosen - exact.logsumexp(dim=-1))


def log_normaliser(scores: torch.Tensor, power: float) -> torch.Tensor:
    """log Σ p^α for the law p = softmax of `scores` (..., vocabulary), (...) float64: lse(α·z) − α·lse(z).

    The weight of a token drawn from p^α: 0 where α = 1, and -inf where the law has no mass.
    """
    empty = scores.amax(dim=-1) == -torch.inf
    if power == 1:
        return torch.zeros(empty.shape, dtype=torch.float64, device=scores.device).masked_fill(empty, -torch.inf)
    exact = scores.double()
    exponent = (power * exact).logsumexp(dim=-1) - power * exact.logsumexp(dim=-1)
    return torch.where(empty, -torch.inf, exponent)


def log_increments(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    bonus: torch.Tensor,
    kept: torch.Tensor,
    power: float = 1.0,
    drafted: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a block adds to the log-weight of each particle: Σ α·log p − log q over its drafted tokens up to its end.

    Args:
        log_p, log_q: (rows, N, γ) of the drafted tokens.
        bonus: (rows, N), weight of the bonus token; counted only if no end came before it.
        kept: (rows, N), tokens of the block that belong to the text, the end included: γ + 1 if there was none, 0 for
            particles that were finished before.
        drafted: (rows, 1), the drafted tokens of rows that have room for less than γ; their bonus comes after those.

    Returns:
        (rows, N) float64; exactly 0 where nothing was kept.
    """
    limit = torch.full_like(kept[:, :1], log_p.shape[-1]) if drafted is None else drafted
    terms = power * log_p.double() - log_q.double()
    # A token that p excludes, or that q could not draw, ends the particle's weight.
    terms = terms.masked_fill((log_p == -torch.inf) | (log_q == -torch.inf), -torch.inf)
    counted = torch.arange(log_p.shape[-1], device=kept.device) < torch.minimum(kept, limit).unsqueeze(-1)
    return terms.masked_fill(~counted, 0.0).sum(dim=-1) + bonus.double().masked_fill(kept <= limit, 0.0)


def normalised(log_weights: torch.Tensor) -> torch.Tensor:
    """W = softmax(log_weights), (rows, N); uniform where every weight is 0."""
    empty = (log_weights == -torch.inf).all(dim=-1, keepdim=True)
    return log_weights.masked_fill(empty, 0.0).softmax(dim=-1)


def effective_sample_size(log_weights: torch.Tensor) -> torch.Tensor:
    """ESS = 1/ΣW², (rows,), between 1 and N."""
    return 1 / normalised(log_weights).square().sum(dim=-1)


def log_mean_weight(log_weights: torch.Tensor) -> torch.Tensor:
    """lse(log_weights) − ln N, (rows,): what the weights contribute to the log-evidence; -inf if all are 0."""
    return log_weights.logsumexp(dim=-1) - math.log(log_weights.shape[-1])


def resampling_counts(weights: torch.Tensor, method: str, uniforms: torch.Tensor) -> torch.Tensor:
    """How many copies each particle gets, (rows, N) int64, N in all; E[counts] = N·W for every method.

    Args:
        weights: (rows, N), W, summing to 1.
        method: one of `RESAMPLINGS`.
        uniforms: (rows, N) in [0, 1); systematic uses the first of each row.
    """
    number, uniforms = weights.shape[-1], uniforms.double()
    places = torch.arange(number, device=weights.device)
    if method == "systematic":
        return _count((uniforms[:, :1] + places) / number, weights)
    if method == "stratified":
        return _count((uniforms + places) / number, weights)
    if method == "multinomial":
        return _count(uniforms, weights)
    if method != "residual":
        raise ValueError(f"resampling must be one of {', '.join(RESAMPLINGS)}, but is {method!r}")
    sure = (number * weights).floor()
    missing = number - sure.sum(dim=-1, keepdim=True)
    rest = number * weights - sure
    rest = torch.where(missing > 0, rest / missing.clamp(min=1), weights)
    return sure.long() + _count(uniforms, rest, places < missing)


def _count(points: torch.Tensor, weights: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Points in each particle's share of [0, 1), (rows, N) int64; those not `counted` fall nowhere."""
    owners = _owners(points, weights)
    hits = torch.ones_like(owners) if counted is None else counted.expand_as(owners).long()
    return torch.zeros_like(owners).scatter_add_(-1, owners, hits)


def _owners(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The particle whose share of [0, 1) holds each point: (rows, points) int64; never one without weight."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=-1, keepdim=True)  # 0 also where the weights are nan
    cumulative = weights.cumsum(dim=-1)
    # Sums that round below 1 must not give the last points away.
    cumulative = torch.where(places >= last, 1.0, cumulative).cummax(dim=-1).values.clamp(max=1.0)
    owners = torch.searchsorted(cumulative, points.to(cumulative.dtype).contiguous(), right=True)
    return torch.minimum(owners, last)


def keep_survivors(counts: torch.Tensor) -> torch.Tensor:
    """Ancestors (rows, N) int64 with those counts: survivors stay in their slot, spare copies fill the dead slots."""
    number = counts.shape[-1]
    dead = counts == 0
    order = dead.long().cumsum(dim=-1) - 1  # (rows, N): the how-manieth dead slot
    spare = (counts - 1).clamp(min=0).cumsum(dim=-1)
    filler = torch.searchsorted(spare, order.clamp(min=0), right=True).clamp(max=number - 1)
    return torch.where(dead, filler, torch.arange(number, device=counts.device))


class Resampling(NamedTuple):
    """What a resampling makes of a population.

    Args:
        ancestors: (rows, N) int64, the identity where nothing was resampled.
        log_weights: (rows, N), 0 where something was.
        log_evidence: (rows,), with the mean weight added there.
        ess: (rows,), before resampling.
        resampled: (rows,) bool, where something was.
    """

    ancestors: torch.Tensor
    log_weights: torch.Tensor
    log_evidence: torch.Tensor
    ess: torch.Tensor
    resampled: torch.Tensor


def resample(
    log_weights: torch.Tensor,
    log_evidence: torch.Tensor,
    threshold: float,
    method: str,
    uniforms: torch.Tensor,
    going_on: torch.Tensor,
) -> Resampling:
    """Resample the rows with N >= 2 and ESS < threshold·N.

    Args:
        log_weights: (rows, N) float64, not all -inf in any row.
        log_evidence: (rows,) float64.
        uniforms: (rows, N) in [0, 1).
        going_on: (rows,) bool, the rows that another block follows. At the end the choice of what to return takes the
            place of resampling.
    """
    number = log_weights.shape[-1]
    ess = effective_sample_size(log_weights)
    uneven = (ess < threshold * number * (1 - ROUNDING)) & going_on & (number >= 2)
    chosen = keep_survivors(resampling_counts(normalised(log_weights), method, uniforms))
    column = uneven.unsqueeze(-1)
    ancestors = torch.where(column, chosen, torch.arange(number, device=chosen.device))
    levelled = torch.where(column, 0.0, log_weights)
    evidence = torch.where(uneven, log_evidence + log_mean_weight(log_weights), log_evidence)
    return Resampling(ancestors, levelled, evidence, ess, uneven)


def select(log_weights: torch.Tensor, number: int, how: str, uniforms: torch.Tensor) -> torch.Tensor:
    """The `number` particles to return, (rows, number) int64.

    "sample": one systematic draw from W, so a particle of weight W comes up `number`·W times on average, perhaps more
    than once; in random order, so that each place alone follows W. "best": the heaviest, all distinct, heaviest first.

    Args:
        uniforms: (rows, 1 + number) in [0, 1); "best" uses none.
    """
    if how == "best":
        return log_weights.topk(number, dim=-1).indices
    if how != "sample":
        raise ValueError(f"select must be one of {', '.join(SELECTIONS)}, but is {how!r}")
    places = torch.arange(number, device=log_weights.device)
    drawn = _owners((uniforms[:, :1].double() + places) / number, normalised(log_weights))
    return drawn.gather(-1, uniforms[:, 1:].argsort(dim=-1))


def shared_prefix(tokens: torch.Tensor) -> torch.Tensor:
    """How many leading tokens all particles of a row have in common, (rows,) int64, for `tokens` (rows, N, length)."""
    if tokens.shape[-1] == 0:
        return tokens.new_zeros(tokens.shape[0])
    same = (tokens == tokens[:, :1]).all(dim=1)
    return functional.pad(same, (0, 1), value=False).long().argmin(dim=-1)
