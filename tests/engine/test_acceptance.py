"""Acceptance rules under forced uniforms, in the limits, and against the slow reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_semspec.engine import acceptance
from hf_semspec.engine.acceptance import BONUS, RESAMPLED, RESIDUAL, Acceptance, residual_law
from hf_semspec.schemes.easd.agreement import uncertain_agreement
from tests import reference
from tests.rules import accept_chain, accept_chain_greedy, accept_chains, accept_chains_greedy
from tests.toy import KINDS, Toy, assert_exact, batch, log


def same(a: Acceptance, b: Acceptance) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Forced: the uniforms are given.


@pytest.mark.parametrize(("u", "n"), [(0.0, 1), (0.5 - 1e-9, 1), (0.5 + 1e-9, 0), (1 - 1e-9, 0)])
def test_forced_uniform_at_the_ratio(u: float, n: int) -> None:
    p, q = [0.3, 0.7], [0.6, 0.4]
    out = accept_chain(
        log([[p, [0.1, 0.9]]]), log([[q]]), torch.tensor([[0]]), torch.tensor([[u]], dtype=torch.float64)
    )
    assert out.num_accepted.tolist() == [n]
    assert out.outcome.tolist() == [BONUS if n else RESIDUAL]
    assert_exact(out.law, [[0.1, 0.9] if n else [0.0, 1.0]])


def test_forced_second_chain_is_tested_against_the_residual() -> None:
    p, q = [0.4, 0.3, 0.3], [0.8, 0.2, 0.0]
    # Chain 0's token 0 has the ratio .5 and fails; the residual is (0, .25, .75), so chain 1's token 1 has .25/.2.
    log_p, log_q = log([[[p, p], [p, p]]]), log([[[q], [q]]])
    out = accept_chains(
        log_p, log_q, torch.tensor([[[0], [1]]]), torch.tensor([[[0.51], [0.999]]], dtype=torch.float64)
    )
    assert (out.num_accepted.item(), out.outcome.item(), out.chain.item()) == (1, BONUS, 1)
    # Token 0 again: the residual has none of it, so it fails, and the residual's residual is (0, .05, .75)/.8.
    out = accept_chains(log_p, log_q, torch.tensor([[[0], [0]]]), torch.tensor([[[0.51], [0.0]]], dtype=torch.float64))
    assert (out.num_accepted.item(), out.outcome.item(), out.chain.item()) == (0, RESIDUAL, 0)
    assert_exact(out.law, [[0.0, 0.0625, 0.9375]])


def test_forced_invalid_position_stops_without_a_test() -> None:
    p, q = [0.3, 0.7], [0.6, 0.4]
    valid = torch.tensor([[True, False, True]])
    arguments = log([[p] * 4]), log([[q] * 3]), torch.tensor([[1, 0, 1]]), torch.zeros(1, 3).double()
    out = accept_chain(*arguments, valid=valid)
    assert (out.num_accepted.item(), out.outcome.item()) == (1, BONUS)
    assert_exact(out.law, [p])
    out = accept_chain_greedy(torch.tensor([[1, 0, 1, 0]]), torch.tensor([[1, 0, 1]]), valid=valid)
    assert (out.num_accepted.item(), out.outcome.item(), out.token.item()) == (1, BONUS, 0)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("num_chains", [1, 2])
def test_forced_nothing_drafted_is_a_draw_from_p(num_chains: int, gamma: int) -> None:
    toy = Toy(vocab=3)
    p = torch.tensor(toy.p(()), dtype=torch.float64).expand(2, num_chains, gamma + 1, 3)
    drafts, uniforms = torch.zeros(2, num_chains, gamma).long(), torch.zeros(2, num_chains, gamma).double()
    valid = torch.zeros_like(drafts).bool()
    out = accept_chains(p.log(), p[:, :, :gamma].log(), drafts, uniforms, valid=valid)
    assert out.num_accepted.tolist() == out.outcome.tolist() == out.chain.tolist() == [0, 0]
    assert_exact(out.law, p[:, 0, 0])
    greedy = accept_chains_greedy(p.argmax(-1), drafts, valid=valid)
    assert greedy.token.tolist() == p[:, 0, 0].argmax(-1).tolist()


# The cases of USER_ISSUES UI-10.


def test_ui10_residual_of_equal_laws_is_p() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    assert torch.equal(residual_law(p, p), p)


def test_ui10_residual_is_divided_by_its_sum() -> None:
    p, q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]], dtype=torch.float64)
    assert_exact(residual_law(p, q), [0.0, 0.5, 0.5])


def test_ui10_disjoint_one_hot_laws_always_reject() -> None:
    p, q = [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]
    out = accept_chain(log([[p, p]]), log([[q]]), torch.tensor([[0]]), torch.zeros(1, 1).double())
    assert (out.num_accepted.item(), out.outcome.item()) == (0, RESIDUAL)
    assert out.law.tolist() == [p]


def test_ui10_draft_on_a_subset_of_the_target() -> None:
    p, q = [0.2, 0.2, 0.6], [0.5, 0.5, 0.0]
    out = accept_chain(log([[p, p]]), log([[q]]), torch.tensor([[0]]), torch.full((1, 1), 0.9).double())
    assert (out.num_accepted.item(), out.outcome.item()) == (0, RESIDUAL)
    assert_exact(out.law, [[0.0, 0.0, 1.0]])


def test_ui10_greedy_compares_argmaxes_not_probabilities() -> None:
    p, a, b = torch.tensor([0.3, 0.5, 0.2]), 0, 1  # q(a) = .2 < p(a): the ratio would let a pass
    out = accept_chain_greedy(p.argmax().expand(1, 2), torch.tensor([[a]]))
    assert (out.num_accepted.item(), out.outcome.item(), out.token.item()) == (0, RESIDUAL, b)


@pytest.mark.parametrize("num_chains", [1, 2])
def test_easd_without_mass_left_the_token_stands_untriggered(num_chains: int) -> None:
    p, shape = [0.0, 1.0], (1, num_chains, 1)
    drafts, triggers = torch.ones(shape).long(), torch.ones(shape).bool()
    log_p, log_q = log([[[p, [0.5, 0.5]]] * num_chains]), log([[[p]] * num_chains])
    out = accept_chains(log_p, log_q, drafts, torch.zeros(shape).double(), triggers=triggers)
    assert (out.num_accepted.item(), out.outcome.item(), out.law.tolist()) == (1, BONUS, [[0.5, 0.5]])
    greedy = accept_chains_greedy(torch.ones(1, num_chains, 2).long(), drafts, triggers=triggers, log_p=log_p)
    assert (greedy.num_accepted.item(), greedy.outcome.item()) == (1, BONUS)
    kept = accept_chains(log_p, log_q, drafts, torch.zeros(shape).double(), triggers=triggers, penalty=0.5)
    assert (kept.num_accepted.item(), kept.outcome.item(), kept.law.tolist()) == (0, RESAMPLED, [p])


# Limits.


@pytest.mark.parametrize("num_chains", [1, 3])
def test_limit_equal_laws_accept_everything(num_chains: int) -> None:
    log_p, log_q, drafts, _, _ = batch(Toy(5, kinds=("equal",)), num_chains, 4, rows=8, seed=0)
    almost_one = torch.full(drafts.shape, 1 - 2**-53, dtype=torch.float64)
    out = accept_chains(log_p, log_q, drafts, almost_one)
    assert out.num_accepted.tolist() == [4] * 8
    assert out.outcome.tolist() == [BONUS] * 8


@pytest.mark.parametrize("masked", [False, True])
def test_limit_the_rule_for_several_chains_with_one_is_that_for_one(masked: bool) -> None:
    log_p, log_q, drafts, uniforms, triggers = batch(Toy(6, kinds=KINDS), 1, 4, rows=32, seed=1)
    options: dict[str, Any] = {"valid": uniforms < 0.8, "triggers": triggers} if masked else {}
    several = acceptance.accept_chains(log_p, log_q, drafts, uniforms, **options)
    one = accept_chains(log_p, log_q, drafts, uniforms, **options, penalty=1.0)
    assert same(several._replace(triggered=None, law=None), one._replace(law=None))
    assert_exact(several.law, one.law)


def test_limit_copies_of_a_certain_chain_equal_one_chain() -> None:
    """A draft that is certain of its tokens draws equal chains: N of them commit what one does, whatever N."""
    toy = Toy(4, laws={})
    q = torch.eye(4, dtype=torch.float64)
    for row in range(16):
        p = [toy.p((row, t)) for t in range(4)]
        drafts = torch.tensor([row % 4, (row + 1) % 4, (row + 2) % 4])
        uniforms = torch.rand(1, 3, 3, generator=torch.Generator().manual_seed(row)).double()
        log_q = q[drafts].log()
        one = accept_chain(log(p)[None], log_q[None], drafts[None], uniforms[:, 0])
        three = accept_chains(
            log(p).expand(1, 3, 4, 4), log_q.expand(1, 3, 3, 4), drafts.expand(1, 3, 3), uniforms.clone()
        )
        assert three.num_accepted.item() == one.num_accepted.item()
        assert_exact(three.law, one.law)


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("limits", [(math.inf, 0.0, 0.8), (0.0, math.inf, 0.8), (0.0, 0.0, 1.01)])
def test_limit_triggers_that_never_fire_change_no_bit(num_chains: int, limits: tuple[float, float, float]) -> None:
    log_p, log_q, drafts, uniforms, _ = batch(Toy(6, kinds=KINDS), num_chains, 4, rows=32, seed=2)
    triggers = uncertain_agreement(
        log_p[..., :-1, :],
        log_q,
        target_entropy_threshold=limits[0],
        draft_entropy_threshold=limits[1],
        overlap_threshold=limits[2],
        top_n=3,
    )
    with_triggers = accept_chains(log_p, log_q, drafts, uniforms, triggers=triggers)
    assert same(with_triggers._replace(triggered=None), accept_chains(log_p, log_q, drafts, uniforms))
    choices = log_p.argmax(-1)
    greedy = accept_chains_greedy(choices, drafts, triggers=triggers, log_p=log_p)
    assert same(greedy._replace(triggered=None), accept_chains_greedy(choices, drafts))


@pytest.mark.parametrize("num_chains", [1, 3])
def test_limit_plain_resampling_never_changes_greedy_output(num_chains: int) -> None:
    log_p, _, drafts, _, _ = batch(Toy(3, kinds=KINDS), num_chains, 4, rows=64, seed=3)
    choices, triggers = log_p.argmax(-1), torch.ones_like(drafts, dtype=torch.bool)
    out = accept_chains_greedy(choices, drafts, triggers=triggers, log_p=log_p, penalty=1.0)
    rows = torch.arange(64)
    assert torch.equal(out.token, choices[rows, out.chain, out.num_accepted])
    assert set(out.outcome.tolist()) == {RESIDUAL, RESAMPLED}


@pytest.mark.parametrize("choice", [0, 1])
def test_limit_plain_resampling_keeps_the_choice_of_a_tie(choice: int) -> None:
    one = torch.tensor([[choice]])
    log_p = log([[[0.4, 0.4, 0.2]] * 2])
    out = accept_chain_greedy(one.expand(1, 2), one, triggers=torch.ones(1, 1).bool(), log_p=log_p, penalty=1.0)
    assert (out.outcome.item(), out.token.item()) == (RESAMPLED, choice)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_chains", [1, 3])
@pytest.mark.parametrize("with_triggers", [False, True])
def test_laws_are_laws_in_every_dtype(dtype: torch.dtype, num_chains: int, with_triggers: bool) -> None:
    log_p, log_q, drafts, uniforms, triggers = batch(Toy(7, kinds=KINDS), num_chains, 3, rows=64, seed=4)
    options: dict[str, Any] = {"triggers": triggers} if with_triggers else {}
    law = accept_chains(log_p.to(dtype), log_q.to(dtype), drafts, uniforms.to(dtype), **options).law
    assert law is not None
    assert law.dtype == dtype
    assert law.isfinite().all()
    assert (law >= 0).all()
    torch.testing.assert_close(law.double().sum(-1), torch.ones(64).double(), rtol=0, atol=8 * torch.finfo(dtype).eps)


# Reference: the same uniforms give the same decision as the slow transcription.


Round = tuple[int, int, int, int, int, bool, bool, float]


def rounds() -> st.SearchStrategy[Round]:
    """Seed; rows, chains, γ, V; whether positions are invalid, and triggered; penalty."""
    sizes = (st.integers(1, high) for high in (3, 4, 4, 7))
    penalty = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)
    return st.tuples(st.integers(0, 2**31), *sizes, st.booleans(), st.booleans(), penalty)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(rounds())
def test_reference_decides_the_same(case: Round) -> None:
    seed, rows, num_chains, gamma, vocab, with_valid, with_triggers, penalty = case
    log_p, log_q, drafts, uniforms, coins = batch(Toy(vocab, seed, KINDS), num_chains, gamma, rows=rows, seed=seed)
    valid = uniforms.flip(-1) < 0.8 if with_valid else None
    triggers = coins if with_triggers else None
    fast = accept_chains(log_p, log_q, drafts, uniforms, valid=valid, triggers=triggers, penalty=penalty)
    for row in range(rows):
        masks = [None if mask is None else mask[row].tolist() for mask in (valid, triggers)]
        p, q, tokens, u = (x[row].tolist() for x in (log_p.exp(), log_q.exp(), drafts, uniforms))
        n, outcome, law, viable = reference.chains(p, q, tokens, u, *masks, penalty)
        assert (fast.num_accepted[row], fast.outcome[row], fast.chain[row]) == (n, outcome, viable[0])
        assert_exact(fast.law[row], law)
        first = [None if mask is None else mask[0] for mask in masks]
        if num_chains == 1:
            assert (n, outcome, law) == reference.chain(p[0], q[0], tokens[0], u[0], *first, penalty)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(rounds())
def test_reference_decides_the_same_greedily(case: Round) -> None:
    seed, rows, num_chains, gamma, vocab, with_valid, with_triggers, penalty = case
    toy = Toy(vocab, seed, KINDS)
    log_p, _, drafts, uniforms, coins = batch(toy, num_chains, gamma, rows=rows, seed=seed, agreement=0.7)
    valid = uniforms < 0.8 if with_valid else None
    triggers = coins if with_triggers else None
    options: dict[str, Any] = {"valid": valid, "triggers": triggers, "log_p": log_p, "penalty": penalty}
    fast = accept_chains_greedy(log_p.argmax(-1), drafts, **options)
    for row in range(rows):
        masks = [None if mask is None else mask[row].tolist() for mask in (valid, triggers)]
        p, tokens = log_p[row].exp().tolist(), drafts[row].tolist()
        n, outcome, token, viable = reference.greedy_chains(p, tokens, *masks, penalty)
        assert (fast.num_accepted[row], fast.outcome[row], fast.token[row]) == (n, outcome, token)
        assert fast.chain[row] == viable[0]
    options = {name: x[:, 0] if isinstance(x, Tensor) else x for name, x in options.items()}
    one = accept_chain_greedy(log_p[:, 0].argmax(-1), drafts[:, 0], **options)
    for row in range(rows):
        masks = [None if mask is None else mask[row, 0].tolist() for mask in (valid, triggers)]
        slow = reference.greedy_chain(log_p[row, 0].exp().tolist(), drafts[row, 0].tolist(), *masks, penalty)
        assert (one.num_accepted[row], one.outcome[row], one.token[row]) == slow


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds(), st.floats(0.0, 1.5), st.floats(0.0, 1.5), st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.integers(1, 5))
def test_reference_of_easd_from_its_thresholds(
    case: Round, tau_p: float, tau_q: float, rho: float, top_n: int
) -> None:
    seed, rows, _, gamma, vocab, _, _, penalty = case
    log_p, log_q, drafts, uniforms, _ = (x[:, 0] for x in batch(Toy(vocab, seed), 1, gamma, rows=rows, seed=seed))
    triggers = uncertain_agreement(
        log_p[:, :-1],
        log_q,
        target_entropy_threshold=tau_p,
        draft_entropy_threshold=tau_q,
        overlap_threshold=rho,
        top_n=top_n,
    )
    fast = accept_chain(log_p, log_q, drafts, uniforms, triggers=triggers, penalty=penalty)
    for row in range(rows):
        p, q, tokens, u = (x[row].tolist() for x in (log_p.exp(), log_q.exp(), drafts, uniforms))
        marks = [reference.uncertain_agreement(p[t], q[t], tau_p, tau_q, rho, top_n) for t in range(gamma)]
        n, outcome, law = reference.chain(p, q, tokens, u, None, marks, penalty)
        assert (fast.num_accepted[row], fast.outcome[row]) == (n, outcome)
        assert_exact(fast.law[row], law)


# Host reads.


class NoHostReads(TorchDispatchMode):
    """Fails on every operation that makes the host wait for the device."""

    SYNCHRONISING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.SYNCHRONISING, f"host read: {func}"
        return func(*args, **(kwargs or {}))


def test_host_read_is_seen() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="host read"):
        torch.ones(1).item()


@pytest.mark.parametrize("num_chains", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_no_host_reads(num_chains: int, masked: bool) -> None:
    log_p, log_q, drafts, uniforms, triggers = batch(Toy(6), num_chains, 4, rows=3, seed=5)
    choices = log_p.argmax(-1)
    options: dict[str, Any] = {"valid": uniforms < 0.8, "triggers": triggers, "penalty": 0.2} if masked else {}
    with NoHostReads():
        accept_chains(log_p, log_q, drafts, uniforms, **options)
        accept_chains_greedy(choices, drafts, **options, log_p=log_p)
        options = {name: mask[:, 0] if isinstance(mask, Tensor) else mask for name, mask in options.items()}
        accept_chain(log_p[:, 0], log_q[:, 0], drafts[:, 0], uniforms[:, 0], **options)
        accept_chain_greedy(choices[:, 0], drafts[:, 0], **options, log_p=log_p[:, 0])
