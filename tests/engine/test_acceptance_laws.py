"""Laws of the committed tokens: enumerated exactly, and by Monte Carlo beside samplers that must fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_semspec.engine.acceptance import RESIDUAL, Acceptance
from tests import reference
from tests.rules import accept_chains
from tests.statistics import deviations, total_variation
from tests.toy import Toy, assert_exact, committed

# Enumerated: every draft, the uniforms integrated exactly.


@pytest.mark.parametrize(
    ("num_chains", "gamma", "vocab"), [(1, 1, 4), (1, 3, 4), (2, 1, 4), (2, 2, 3), (2, 3, 2), (3, 1, 4), (3, 2, 3)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_enumerated_committed_law_is_p(num_chains: int, gamma: int, vocab: int, seed: int) -> None:
    toy = Toy(vocab, seed, kinds=("free", "masked target", "masked draft", "equal"))
    decide = accept_chains
    assert_exact(committed(toy, decide, num_chains, gamma), toy.joint(gamma + 1))

    def cut(*arguments: Tensor) -> Acceptance:
        valid = torch.ones_like(arguments[2], dtype=torch.bool)
        valid[..., gamma // 2] = False
        return decide(*arguments, valid=valid)

    assert_exact(committed(toy, cut, num_chains, gamma), toy.joint(gamma + 1))


@pytest.mark.parametrize("num_chains", [1, 2])
def test_enumeration_sees_a_residual_replaced_by_p(num_chains: int) -> None:
    def wrong(*arguments: Tensor) -> Acceptance:
        return residual_replaced_by_p(accept_chains(*arguments), *arguments[:2])

    toy = Toy(vocab=3)
    assert total_variation(committed(toy, wrong, num_chains, 2), toy.joint(3)) > 1e-3


def easd_law(p: reference.Law, q: reference.Law, penalty: float, num_chains: int = 1) -> Tensor:
    """First token's law when every agreement is uncertain."""
    toy = Toy(len(p), laws={(): (p, q, True)})

    def decide(*arguments: Tensor) -> Acceptance:
        return accept_chains(*arguments, triggers=torch.ones_like(arguments[2], dtype=torch.bool), penalty=penalty)

    return committed(toy, decide, num_chains, 1).sum(-1)


@pytest.mark.parametrize("seed", range(4))
def test_enumerated_easd_laws(seed: int) -> None:
    p, q, _ = Toy(4, seed).at(())
    agree = [min(a, b) for a, b in zip(p, q, strict=True)]
    excess = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    exclude = [sum(agree[d] * p[y] / (1 - p[d]) for d in range(4) if d != y) + excess[y] for y in range(4)]
    plain = [sum(agree) * p[y] + excess[y] for y in range(4)]
    between = [
        sum(agree[d] * (reference.penalised(p, d, 0.3) or p)[y] for d in range(4)) + excess[y] for y in range(4)
    ]
    assert_exact(easd_law(p, q, 0.0), exclude)
    assert_exact(easd_law(p, q, 1.0), plain)
    assert_exact(easd_law(p, q, 0.3), between)
    assert total_variation(easd_law(p, q, 1.0), torch.tensor(p, dtype=torch.float64)) <= 1 - sum(agree) + 1e-12


def test_easd_exclude_swaps_two_equal_laws() -> None:
    law = easd_law([0.6, 0.4], [0.6, 0.4], 0.0)
    assert_exact(law, [0.4, 0.6])


# Monte Carlo: the rule must pass, and wrong samplers must fail the same assertion.


def residual_replaced_by_p(out: Acceptance, log_p: Tensor, log_q: Tensor) -> Acceptance:
    p = log_p[torch.arange(len(log_p)), out.chain, out.num_accepted].exp()
    return out._replace(law=torch.where((out.outcome == RESIDUAL)[:, None], p, out.law))


def residual_by_softmax(out: Acceptance, log_p: Tensor, log_q: Tensor) -> Acceptance:
    rows = torch.arange(len(log_p))
    difference = log_p.exp()[rows, out.chain, out.num_accepted]
    difference = difference - log_q.exp()[rows, out.chain, out.num_accepted.clamp(max=log_q.shape[2] - 1)]
    return out._replace(law=torch.where((out.outcome == RESIDUAL)[:, None], difference.softmax(-1), out.law))


def draw_pairs(
    num_chains: int, fault: str | None, dtype: torch.dtype = torch.float64, draws: int = 20_000, vocab: int = 8
) -> tuple[Tensor, Tensor]:
    """The first two committed tokens of many rounds as one integer, and the target's law of it."""
    rng = torch.Generator().manual_seed(1234)
    logits = 1.5 * torch.randn(2, 1 + vocab, vocab, generator=rng, dtype=torch.float64)
    # Row 0: no token yet; row 1 + d: after d. A third law, after any pair, serves the bonus.
    p, q = logits.softmax(-1)
    draw = lambda law: torch.multinomial(law, 1, generator=rng).squeeze(-1)  # noqa: E731
    drafts = torch.empty(draws * num_chains, 2).long()
    for t in range(2):
        law = q[0].expand(len(drafts), -1) if t == 0 else q[1 + drafts[:, 0]]
        drafts[:, t] = law.argmax(-1) if fault == "greedy draft" else draw(law)
    drafts = drafts.view(draws, num_chains, 2)
    if fault == "copied chains":
        drafts = drafts[:, :1].expand(-1, num_chains, -1).contiguous()
    states = torch.cat([torch.zeros_like(drafts[..., :1]), 1 + drafts], -1)  # (draws, N, 3)
    log_p, log_q = p[states].log().to(dtype), q[states[..., :2]].log().to(dtype)
    uniforms = torch.rand(drafts.shape, generator=rng, dtype=torch.float64)
    out = accept_chains(log_p, torch.zeros_like(log_q) if fault == "q set to one" else log_q, drafts, uniforms)
    if fault == "residual replaced by p":
        out = residual_replaced_by_p(out, log_p, log_q)
    elif fault == "residual by softmax":
        out = residual_by_softmax(out, log_p, log_q)
    rows, n = torch.arange(draws), out.num_accepted
    tokens = torch.cat([drafts[rows, out.chain], torch.zeros(draws, 1).long()], -1)
    tokens[rows, n] = draw(out.law)
    tokens[n == 0, 1] = draw(p[1 + tokens[:, 0]])[n == 0]
    return tokens[:, 0] * vocab + tokens[:, 1], p[0][:, None] * p[1:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_chains", [1, 2, 4])
def test_ui08_sampled_pairs_follow_the_target(num_chains: int, dtype: torch.dtype) -> None:
    draws, law = draw_pairs(num_chains, fault=None, dtype=dtype)
    assert not deviations(draws, law)


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("fault", ["greedy draft", "q set to one", "residual by softmax", "residual replaced by p"])
def test_ui08_wrong_samplers_are_seen(num_chains: int, fault: str) -> None:
    assert len(deviations(*draw_pairs(num_chains, fault))) == 2


def test_ui08_chains_that_are_not_independent_are_seen() -> None:
    assert len(deviations(*draw_pairs(4, "copied chains"))) == 2
