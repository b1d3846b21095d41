"""examples/schemes: what each rule does, by enumeration; its strictest setting is `lossless`, its loosest is not."""

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_semspec import SemSpecConfig
from hf_semspec.schemes import BONUS, RESIDUAL, Block
from tests.helpers import WEAK_DRAFTS
from tests.models import draft_of, prompts, tiny
from tests.own_schemes import loaded, registered
from tests.rules import block

pytestmark = WEAK_DRAFTS

FLY, CACTUS = loaded("fly"), loaded("cactus")
SETTINGS = {
    "fly": (FLY, {"threshold": 1.5}, {"threshold": 0, "window": 1}),
    "cactus": (CACTUS, {"delta": 0}, {"delta": 100}),
}


@pytest.fixture(autouse=True)
def _registered() -> Any:
    with registered(FLY), registered(CACTUS):
        yield


def one_chain(drafts: list[int], **laws: Any) -> Block:
    valid = laws.pop("valid", None)
    laws = {name: torch.as_tensor(value)[None, None] for name, value in laws.items()}
    valid = None if valid is None else torch.tensor(valid)[None, None]
    return block(torch.tensor(drafts)[None, None], valid, **laws).one_chain()


# FLy


SURE, UNSURE = [0.97, 0.01, 0.02], [0.4, 0.3, 0.3]  # both prefer token 0; their entropies are 0.14 and 0.99 of log 3


def fly_by_words(passed: tuple[bool, ...], unsure: tuple[bool, ...], valid: list[bool], window: int) -> int:
    """How many drafts stand, in plain words."""
    for t in range(len(passed)):
        following = range(t + 1, t + 1 + window)
        agrees = all(i < len(passed) and valid[i] and passed[i] for i in following)
        if not valid[t] or not (passed[t] or (unsure[t] and agrees)):
            return t
    return len(passed)


def fly_without_the_gate(passed: tuple[bool, ...], unsure: tuple[bool, ...], valid: list[bool], window: int) -> int:
    return fly_by_words(passed, (True,) * len(passed), valid, window)


def fly_beyond_the_end(passed: tuple[bool, ...], unsure: tuple[bool, ...], valid: list[bool], window: int) -> int:
    return fly_by_words((*passed, *(True,) * window), (*unsure, *unsure), [*valid, *(True,) * window], window)


def greedy_fly_agrees(expected: Any) -> bool:
    """Over all mismatches, gates and lengths of a block of four, and windows of 1 to 4."""
    laws = {False: SURE, True: UNSURE}
    agrees = True
    for window, drafted in itertools.product(range(1, 5), range(1, 5)):
        valid = [t < drafted for t in range(4)]
        for passed, unsure in itertools.product(itertools.product([True, False], repeat=4), repeat=2):
            log_p = torch.tensor([*(laws[u] for u in unsure), UNSURE]).log()
            drafts = [0 if ok else 1 for ok in passed]
            decision = FLY.accept(
                one_chain(drafts, log_p=log_p, choices=[0] * 5, valid=valid), FLY.FlyConfig(window=window)
            )
            accepted = int(decision.num_accepted)
            assert decision.token is not None
            assert decision.token.tolist() == [0]
            assert int(decision.outcome) == (RESIDUAL if accepted < drafted else BONUS)
            agrees &= accepted == min(expected(passed, unsure, valid, window), drafted)
    return agrees


def test_a_mismatch_stands_iff_the_target_is_unsure_and_the_next_window_agrees() -> None:
    assert greedy_fly_agrees(fly_by_words)


@pytest.mark.parametrize("wrong", [fly_without_the_gate, fly_beyond_the_end])
def test_a_wrong_fly_fails_that_enumeration(wrong: Any) -> None:
    assert not greedy_fly_agrees(wrong)


@pytest.mark.parametrize(("threshold", "stands"), [(0.9, 3), (1.0, 0)])
def test_the_gate_is_entropy_over_that_of_the_even_law(threshold: float, stands: int) -> None:
    log_p = torch.tensor([UNSURE, SURE, SURE, SURE]).log()
    laws = {"log_p": log_p, "choices": [0] * 4}
    decision = FLY.accept(one_chain([1, 0, 0], **laws), FLY.FlyConfig(window=2, threshold=threshold))
    assert int(decision.num_accepted) == stands


def test_what_a_processor_forbids_never_stands() -> None:
    log_p = torch.tensor([[0.5, 0.0, 0.5], SURE, SURE, SURE]).log()
    config = FLY.FlyConfig(window=2)
    assert int(FLY.accept(one_chain([2, 0, 0], log_p=log_p, choices=[0] * 4), config).num_accepted) == 3
    assert int(FLY.accept(one_chain([1, 0, 0], log_p=log_p, choices=[0] * 4), config).num_accepted) == 0


def test_sampled_drafts_stand_as_often_as_the_docstring_says() -> None:
    """d_1 with probability r + (1 - r)·w, w that of passing in the window of one; the rest from the residual."""
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.3, 0.1])
    log_p, log_q = torch.stack([p, p, p]).log(), torch.stack([q, q]).log()
    grid = (torch.arange(100) + 0.5) / 100
    stood = torch.zeros(100, 100)
    for (i, u), (j, v) in itertools.product(enumerate(grid.tolist()), repeat=2):
        laws = {"log_p": log_p, "log_q": log_q, "uniforms": [u, v]}
        decision = FLY.accept(one_chain([0, 0], **laws), FLY.FlyConfig(window=1))
        stood[i, j] = decision.num_accepted > 0
        if not decision.num_accepted:
            torch.testing.assert_close(decision.law, ((p - q).clamp(min=0) / (p - q).clamp(min=0).sum())[None])
    r = 1 / 3
    assert stood.mean().item() == pytest.approx(r + (1 - r) * r, abs=0.01)


# Cactus


LAWS = [torch.tensor(law, dtype=torch.float64) for law in ([0.5, 0.3, 0.2], [0.9, 0.1, 0.0], [0.02, 0.08, 0.9])]
DELTAS = (0.0, 0.01, 0.2, 1.0, 5.0)


def chi_square(h: Tensor, p: Tensor) -> float:
    return float(((h - p) ** 2 / p)[p > 0].sum())


def within_budget(favoured: Any) -> bool:
    """Every law of every draft is a law, is within χ² ≤ 2δ and KL ≤ log(1 + 2δ), and uses the budget or is certain."""
    good = True
    for p, d, delta in itertools.product(LAWS, range(3), DELTAS):
        h = favoured(p[None], torch.tensor([[d]]), delta)[0]
        some = h > 0
        kl = float((h[some] * (h[some] / p[some]).log()).sum())
        good &= abs(float(h.sum()) - 1) < 1e-9 and bool((h[p == 0] == 0).all())
        good &= chi_square(h, p) <= 2 * delta + 1e-9 and kl <= math.log1p(2 * delta) + 1e-9
        good &= p[d] == 0 or bool(h[d] > 1 - 1e-9) or abs(chi_square(h, p) - 2 * delta) < 1e-9
        good &= bool(h[d] >= p[d])
    return good


def test_the_divergence_budget_holds_and_is_used() -> None:
    assert within_budget(CACTUS.favoured)


def twice_the_budget(p: Tensor, drafted: Tensor, delta: float) -> Tensor:
    return CACTUS.favoured(p, drafted, 2 * delta)


def not_scaled(p: Tensor, drafted: Tensor, delta: float) -> Tensor:
    return p.scatter(-1, drafted, CACTUS.boosted(p.gather(-1, drafted), delta))


@pytest.mark.parametrize("wrong", [twice_the_budget, not_scaled])
def test_a_wrong_cactus_breaks_the_budget(wrong: Any) -> None:
    assert not within_budget(wrong)


def committed(p: Tensor, q: Tensor, delta: float) -> Tensor:
    """The law of the first token of a round: each draft and each of many coins through the rule."""
    law, steps = torch.zeros(3, dtype=torch.float64), 2000
    log_p, log_q = torch.stack([p, p]).log(), q[None].log()
    for d in range(3):
        coins = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
        drafts = torch.full((steps, 1, 1), d)
        laws = {"log_p": log_p.expand(steps, 1, 2, 3), "uniforms": coins[:, None, None]}
        many = block(drafts, None, log_q.expand(steps, 1, 1, 3), **laws).one_chain()
        decision = CACTUS.accept(many, CACTUS.CactusConfig(delta=delta))
        stood = decision.num_accepted == 1
        law[d] += q[d] * stood.double().mean()
        law += q[d] * decision.law[~stood].sum(0) / steps
    return law


def by_formula(p: Tensor, q: Tensor, delta: float) -> Tensor:
    """min(q(x), h_x(x)) + Σ_d max(q(d) - h_d(d), 0)·norm(max(h_d - q, 0))(x), written out."""
    law = torch.zeros(3, dtype=torch.float64)
    for d in range(3):
        raised = min(1.0, float(p[d] + (2 * delta * p[d] * (1 - p[d])) ** 0.5))
        h = p * (1 - raised) / (1 - p[d])
        h[d] = raised
        law[d] += min(q[d], h[d])
        if q[d] > h[d]:
            excess = (h - q).clamp(min=0)
            law += (q[d] - h[d]) * excess / excess.sum()
    return law


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("p", LAWS)
def test_the_committed_law_is_what_the_formula_says(p: Tensor, delta: float) -> None:
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    torch.testing.assert_close(committed(p, q, delta), by_formula(p, q, delta), rtol=0, atol=1e-3)
    if delta == 0:
        torch.testing.assert_close(by_formula(p, q, 0), p)


@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.4])
def test_the_committed_law_is_not_that_of_another_budget(wrong: float) -> None:
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    assert not torch.allclose(committed(LAWS[0], q, 0.2), by_formula(LAWS[0], q, wrong), rtol=0, atol=1e-3)


# Calls


def call(name: str, lengths: tuple[int, ...], sampled: bool, **fields: Any) -> Tensor:
    """New tokens of a call with 8 drafts a round."""
    target = tiny()
    own = {"num_draft_tokens": 8, "max_new_tokens": 24, "do_sample": sampled, **fields}
    models = {} if own.get("draft") == "ngram" else {"assistant_model": draft_of(target, "near")}
    torch.manual_seed(3)
    output: Tensor = target.generate(**prompts(lengths), **models, generation_config=SemSpecConfig(name, **own))
    return output


CALLS = [
    *itertools.product([False], [{}, {"draft": "ngram"}, {"draft": "ngram+model"}]),
    *itertools.product([True], [{}, {"draft": "ngram"}, {"top_k": 5}]),
]


@pytest.mark.parametrize("lengths", [(5,), (6, 3, 9)], ids=["one", "padded"])
@pytest.mark.parametrize(("sampled", "fields"), CALLS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_strictest_setting_is_lossless(name: str, sampled: bool, lengths: tuple[int, ...], fields: Any) -> None:
    strict = SETTINGS[name][1]
    exact = call("lossless", lengths, sampled, verification="token", **fields)
    assert torch.equal(call(name, lengths, sampled, **strict, **fields), exact)


@pytest.mark.parametrize("lengths", [(5,), (6, 3, 9)], ids=["one", "padded"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_loosest_setting_is_not(name: str, sampled: bool, lengths: tuple[int, ...]) -> None:
    loose = call(name, lengths, sampled, **SETTINGS[name][2])
    same = torch.equal(loose, call("lossless", lengths, sampled, verification="token"))
    assert same == (name == "cactus" and not sampled)  # where p is a point mass cactus adds nothing


@pytest.mark.parametrize("module", [FLY, CACTUS], ids=["fly", "cactus"])
def test_each_is_at_most_eighty_lines(module: ModuleType) -> None:
    assert module.__file__
    with open(module.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) <= 80
