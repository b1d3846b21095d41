"""Block verification: its law and its tokens, enumerated; wrong rules that must fail; the reference; its option."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_semspec import LosslessConfig, SemSpecConfig
from hf_semspec.engine.acceptance import BONUS, RESIDUAL, Acceptance, residual_law
from hf_semspec.schemes.lossless.block import accept_block, survival
from tests import reference
from tests.helpers import WEAK_DRAFTS, check_identities
from tests.models import draft_of, prompts, tiny
from tests.reference import block_branches
from tests.rules import accept_chain
from tests.statistics import total_variation
from tests.toy import KINDS, Toy, batch, committed, log

ZEROS = ("free", "masked target", "masked draft", "equal", "certain", "disjoint")


def by_block(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor, **options: Any) -> Acceptance:
    """The rule in the shapes of several chains, of which there is one."""
    options = {name: value[:, 0] for name, value in options.items()}
    decision = accept_block(log_p[:, 0], log_q[:, 0], drafts[:, 0], uniforms[:, 0], **options)
    return decision._replace(chain=decision.lead)


@pytest.mark.parametrize(("vocab", "gamma"), [*itertools.product([3], range(1, 6)), *itertools.product([4], [2, 5])])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_enumerated_law_is_p(vocab: int, gamma: int, seed: int) -> None:
    check_law(vocab, gamma, seed)


@pytest.mark.grid
@pytest.mark.parametrize("gamma", range(1, 6))
@pytest.mark.parametrize("seed", range(10))
def test_the_enumerated_law_is_p_grid(gamma: int, seed: int) -> None:
    check_law(4, gamma, seed)


def check_law(vocab: int, gamma: int, seed: int) -> None:
    toy = Toy(vocab, seed, ZEROS)
    law = committed(toy, by_block, 1, gamma, block_branches)
    torch.testing.assert_close(law, toy.joint(gamma + 1), rtol=0, atol=1e-12)


def shorter(p: Any, q: Any, drafts: Any) -> Any:
    """The uniforms' ways where only the first two tokens of a chain were drafted."""
    for weight, uniforms in block_branches([p[0][:3]], [q[0][:2]], [drafts[0][:2]]):
        yield weight, [[*uniforms[0], *[0.0] * (len(drafts[0]) - 2)]]


def test_the_enumerated_law_of_a_shorter_row_is_p() -> None:
    """What is behind a row's own block has no law, and is not looked at."""

    def ragged(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor) -> Acceptance:
        valid = (torch.arange(4) < 2).expand_as(drafts)
        log_q[:, :, 2:] = math.nan
        log_p[:, :, 3:] = math.nan
        return by_block(log_p, log_q, drafts, uniforms, valid=valid)

    toy = Toy(3, 5, ("free", "masked target", "masked draft"))
    law = committed(toy, ragged, 1, 4, shorter)
    torch.testing.assert_close(law, toy.joint(5), rtol=0, atol=1e-12)


def literal(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor) -> Acceptance:
    """The reference in the rule's place."""
    rows = zip(log_p[:, 0].exp(), log_q[:, 0].exp(), drafts[:, 0], uniforms[:, 0], strict=True)
    decisions = [reference.block_chain(*(part.tolist() for part in row)) for row in rows]
    counts, outcomes, laws = zip(*decisions, strict=True)
    count = torch.tensor(counts)
    return Acceptance(count, torch.tensor(outcomes), torch.tensor(laws, dtype=torch.float64), chain=0 * count)


@pytest.mark.parametrize("fault", ["residual", "chance", "plain chance"])
def test_wrong_rules_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of the token rule; h of the last position everywhere; h without the mass that is left over."""
    toy = Toy(3, 1)
    decide: Any = literal
    if fault == "residual":

        def decide(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor) -> Acceptance:
            decision = by_block(log_p, log_q, drafts, uniforms)
            at = torch.arange(len(log_p)), 0, decision.num_accepted
            q = log_q[at[0], 0, decision.num_accepted.clamp(max=log_q.shape[2] - 1)].exp()
            law = residual_law(log_p[at].exp(), q)
            return decision._replace(law=torch.where((decision.outcome == RESIDUAL)[:, None], law, decision.law))

    elif fault == "chance":
        monkeypatch.setattr(reference, "block_chances", lambda *laws: reference.block_survival(*laws)[1:])
    else:

        def chances(p: Any, q: Any, drafts: Any) -> list[float]:
            kept, gamma = reference.block_survival(p, q, drafts), len(drafts)
            left = [math.fsum(reference.block_excess(p[i], q[i], kept[i])) for i in range(1, gamma)]
            return [*left, kept[gamma]]

        monkeypatch.setattr(reference, "block_chances", chances)
    assert total_variation(committed(toy, decide, 1, 3, block_branches), toy.joint(4)) > 1e-3


def tokens_of(toy: Toy, gamma: int, decide: Any, fall: Any) -> float:
    """Expected drafted tokens that stand in a round."""
    weights, parts = [], []
    for drafts in itertools.product(range(toy.vocab), repeat=gamma):
        p, q, _ = toy.along(list(drafts))
        drawn = math.prod(law[token] for law, token in zip(q, drafts, strict=True))
        for weight, uniforms in fall([p], [q], [list(drafts)]) if drawn else ():
            weights.append(drawn * weight)
            parts.append(([p], [q], [list(drafts)], uniforms))
    p, q, drafts, uniforms = (list(part) for part in zip(*parts, strict=True))  # type: ignore[assignment]
    decision = decide(log(p), log(q), torch.tensor(drafts), torch.tensor(uniforms, dtype=torch.float64))
    return float((torch.tensor(weights, dtype=torch.float64) * decision.num_accepted).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([("free",), ZEROS]))
def test_it_never_keeps_fewer_tokens_than_the_token_rule(
    vocab: int, gamma: int, seed: int, kinds: tuple[str, ...]
) -> None:
    toy = Toy(vocab, seed, kinds)
    block, token = (
        tokens_of(toy, gamma, decide, fall)
        for decide, fall in ((by_block, block_branches), (accept_chains_of, reference.branches))
    )
    assert block >= token - 1e-12
    if gamma == 1:
        assert block == pytest.approx(token, abs=1e-12)
    expected = 0.0
    for drafts in itertools.product(range(vocab), repeat=gamma):
        p, q, _ = toy.along(list(drafts))
        drawn = math.prod(law[token] for law, token in zip(q, drafts, strict=True))
        expected += drawn * sum(reference.block_survival(p, q, list(drafts))[1:]) if drawn else 0
    assert block == pytest.approx(expected, abs=1e-12)


def accept_chains_of(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor) -> Acceptance:
    return accept_chain(log_p[:, 0], log_q[:, 0], drafts[:, 0], uniforms[:, 0])


def test_it_keeps_more_where_a_likely_token_follows_an_unlikely_one() -> None:
    """What the first token lacks the second makes up for: p = (1/4, 3/4) twice, q = (3/4, 1/4) and then (1/4, 3/4)."""
    p, q = [0.25, 0.75], [0.75, 0.25]
    laws = {(): (p, q, False), (0,): (q, p, False), (1,): (q, p, False)}
    toy = Toy(2, laws=laws | {(a, b): (p, p, False) for a in (0, 1) for b in (0, 1)})
    assert tokens_of(toy, 2, by_block, block_branches) > tokens_of(toy, 2, accept_chains_of, reference.branches) + 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_batch_decides_as_the_reference(gamma: int, dtype: torch.dtype) -> None:
    log_p, log_q, drafts, uniforms, _ = batch(Toy(4, 3, KINDS), 1, gamma, rows=60, seed=gamma)
    decision = accept_block(log_p[:, 0].to(dtype), log_q[:, 0].to(dtype), drafts[:, 0], uniforms[:, 0].to(dtype))
    expected = literal(log_p, log_q, drafts, uniforms)
    assert decision.num_accepted.tolist() == expected.num_accepted.tolist()
    assert decision.outcome.tolist() == expected.outcome.tolist()
    assert 0 < decision.num_accepted.sum() < gamma * 60
    assert decision.law is not None and expected.law is not None
    torch.testing.assert_close(
        decision.law.double(), expected.law, rtol=0, atol=1e-12 if dtype.itemsize == 8 else 1e-5
    )


def test_a_uniform_of_zero_lets_nothing_through_that_the_target_excludes() -> None:
    """Nor does a position where 0/0 tokens are left: p = q before and after it."""
    p, q, even = [0.0, 1.0], [1.0, 0.0], [0.5, 0.5]
    zeros = torch.zeros(1, 2).double()
    decision = accept_block(log([[p, even, even]]), log([[q, even]]), torch.tensor([[0, 1]]), zeros)
    assert (decision.num_accepted.item(), decision.outcome.item()) == (0, RESIDUAL)
    assert decision.law is not None and decision.law.tolist() == [p]
    decision = accept_block(log([[even, even, p]]), log([[even, even]]), torch.tensor([[0, 1]]), zeros + 1 - 1e-9)
    assert (decision.num_accepted.item(), decision.outcome.item()) == (2, BONUS)
    assert decision.law is not None and decision.law.tolist() == [p]


def test_what_stands_is_at_most_as_probable_as_the_ratio_of_the_texts() -> None:
    p, q = log([[[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]]), log([[[0.25, 0.75], [0.5, 0.5]]])
    assert survival(p, q, torch.tensor([[0, 1]])).tolist() == [[1.0, pytest.approx(0.2)]]
    assert survival(p, q, torch.tensor([[1, 0]])).tolist() == [[pytest.approx(2 / 3), 1.0]]


@WEAK_DRAFTS
def test_one_of_the_drafted_tokens_counts_as_rejected_and_those_behind_as_untested() -> None:
    target = tiny()
    config = {"num_draft_tokens": 4, "max_new_tokens": 40, "do_sample": True, "trace": True}
    torch.manual_seed(1)
    call = {"assistant_model": draft_of(target, "near"), "generation_config": SemSpecConfig("lossless", **config)}
    output = target.generate(**prompts((5, 3)), **call)
    check_identities(output.stats, [40, 40])
    assert output.stats.rejected > 0 < output.stats.untested
    assert output.trace.settings["verification"] == "block"
    for row in output.trace.rows:
        kinds = [event.kind for event in row.events]
        assert kinds.count("rejected") == kinds.count("residual") > 0


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "block"),
        ({"num_chains": 2}, "token"),
        ({"verification": "token"}, "token"),
        ({"verification": "block"}, "block"),
        ({"verification": "token", "num_chains": 2}, "token"),
        ({"draft": "ngram"}, "block"),
    ],
)
def test_the_rule_by_default(fields: dict[str, Any], rule: str) -> None:
    config = LosslessConfig(**fields)
    assert config.rule == config.resolved_dict()["verification"] == rule
    assert config.to_dict()["verification"] == fields.get("verification")


def test_several_chains_are_not_a_block() -> None:
    with pytest.raises(ValueError, match=r"judges one chain, but `num_chains` is 2"):
        LosslessConfig(verification="block", num_chains=2)
    with pytest.raises(ValueError, match=r'`verification` must be one of "block", "token"'):
        LosslessConfig(verification="tree")  # type: ignore[arg-type]
