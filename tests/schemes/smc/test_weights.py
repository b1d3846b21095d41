"""The mathematics of `smc`: weights, ESS, resampling, evidence; forced, enumerated, in the limit, against chance."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_semspec.schemes.smc import weights as particles
from hf_semspec.schemes.smc.weights import RESAMPLINGS
from tests.reference import normalised
from tests.schemes.smc import reference
from tests.schemes.smc.toy_particles import Population, fallings, total_variation
from tests.statistics import deviations
from tests.toy import Toy, assert_exact

INF = math.inf


def floats(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_draw_inverts_the_cumulative_sum() -> None:
    law = [0.25, 0.0, 0.5, 0.25]
    scores = floats(law).log().expand(6, 4)
    uniforms = floats([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])
    tokens, log_probs = particles.draw(scores, uniforms)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3], "an id without mass is never drawn"
    assert_exact(log_probs, floats(law).log()[tokens])


def test_a_draw_from_no_law_says_so() -> None:
    scores = floats([[-INF, -INF], [0.0, math.nan], [-INF, 1e4]])
    _, log_probs = particles.draw(scores, floats([0.5, 0.5, 0.5]))
    assert log_probs[0] == -INF and log_probs[1].isnan() and log_probs[2] == 0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_draws_follow_the_law_and_those_of_a_wrong_power_do_not(power: float) -> None:
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(7, generator=rng)
    uniforms = torch.rand(40_000, generator=rng, dtype=torch.float64)
    law = (power * scores).softmax(-1)
    tokens, log_probs = particles.draw(scores.expand(40_000, 7), uniforms, power)
    assert deviations(tokens, law) == []
    assert_exact(log_probs, (power * scores.double()).log_softmax(-1)[tokens])
    assert deviations(particles.draw(scores.expand(40_000, 7), uniforms, 1.5 * power)[0], law)


def test_log_probs_are_those_of_the_noise_free_law() -> None:
    scores = torch.randn(5, 11)
    tokens = torch.randint(11, (5,))
    exact = scores.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert_exact(particles.token_log_probs(scores, tokens), exact)
    holes = floats([[0.0, -INF], [-INF, -INF], [0.0, math.nan]])
    found = particles.token_log_probs(holes, torch.tensor([1, 0, 0]))
    assert found[:2].tolist() == [-INF, -INF]
    assert found[2].isnan()


def test_the_normaliser_of_a_power() -> None:
    scores = torch.randn(4, 6, dtype=torch.float64)
    p = scores.softmax(-1)
    for power in (0.5, 2.0, 3.0):
        assert_exact(particles.log_normaliser(scores, power), (p**power).sum(-1).log())
    assert particles.log_normaliser(scores, 1.0).tolist() == [0.0] * 4
    for power in (1.0, 2.0):
        assert particles.log_normaliser(torch.full((2, 3), -INF), power).tolist() == [-INF, -INF]


@given(st.integers(1, 4), st.integers(0, 3), st.floats(0.25, 3), st.integers(0, 2**31))
def test_increments_against_the_transcription(number: int, gamma: int, power: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    log_p, log_q = -torch.rand(2, 2, number, gamma, generator=rng, dtype=torch.float64)
    bonus = -torch.rand(2, number, generator=rng, dtype=torch.float64)
    kept = torch.randint(gamma + 2, (2, number), generator=rng)
    found = particles.log_increments(log_p, log_q, bonus, kept, power)
    for row, n in itertools.product(range(2), range(number)):
        own = int(kept[row, n])
        wanted = sum(power * float(log_p[row, n, t]) - float(log_q[row, n, t]) for t in range(min(own, gamma)))
        wanted += float(bonus[row, n]) if own == gamma + 1 else 0.0
        assert found[row, n] == pytest.approx(wanted, abs=1e-12)


def test_what_stands_past_an_end_counts_for_nothing() -> None:
    junk = math.nan
    log_p = floats([[[-1.0, junk], [junk, junk], [-1.0, -INF], [-1.0, -2.0]]])
    log_q = floats([[[-2.0, junk], [junk, junk], [-2.0, -1.0], [-1.0, -INF]]])
    kept = torch.tensor([[1, 0, 3, 3]])
    found = particles.log_increments(log_p, log_q, floats([[junk, junk, 0.0, 0.0]]), kept)
    assert found.tolist() == [[1.0, 0.0, -INF, -INF]]


def test_where_draft_and_target_are_one_every_weight_stays_zero() -> None:
    log_p = -torch.rand(3, 5, 4, dtype=torch.float64)
    kept = torch.randint(6, (3, 5))
    assert particles.log_increments(log_p, log_p.clone(), torch.zeros(3, 5), kept).eq(0).all()


def weights_of(seed: int, number: int, zeros: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    weights = torch.rand(number, generator=rng, dtype=torch.float64).pow(3) + 1e-4
    weights[torch.randperm(number, generator=rng)[:zeros]] = 0
    return weights / weights.sum()


def test_ess() -> None:
    log_w = floats([[0.0, 0.0, 0.0, 0.0], [0.0, -INF, -INF, -INF], [1.0, 2.0, 3.0, 4.0], [-900.0, -900.0, -INF, -INF]])
    found = particles.effective_sample_size(log_w)
    assert_exact(found, [4.0, 1.0, reference.effective_sample_size([1.0, 2.0, 3.0, 4.0]), 2.0])
    assert_exact(particles.log_mean_weight(log_w)[:2], [0.0, -math.log(4)])


@pytest.mark.parametrize("gamma", [1, 3])
def test_ess_of_one_block_tends_to_its_limit(gamma: int) -> None:
    """ESS/N -> 1/(1 + χ²(p, q)) of the block's law."""
    toy, number = Toy(4, seed=3), 20_000
    log_p, log_q, chi = [], [], 0.0
    law = []
    for block in itertools.product(range(4), repeat=gamma):
        p = math.prod(toy.p(block[:t])[y] for t, y in enumerate(block))
        # Half way to the target: the chi-squared of the toy itself would take millions of particles to see.
        q = math.prod((toy.q(block[:t])[y] + toy.p(block[:t])[y]) / 2 for t, y in enumerate(block))
        chi += p * p / q
        law.append(q)
        log_p.append(math.log(p))
        log_q.append(math.log(q))
    drawn = torch.multinomial(floats(law), number, replacement=True)
    parts = floats([log_p, log_q])[:, drawn].view(2, 1, number, 1)
    log_w = particles.log_increments(parts[0], parts[1], torch.zeros(1, number), torch.full((1, number), 2))
    assert float(particles.effective_sample_size(log_w)) / number == pytest.approx(1 / chi, rel=0.05)
    wrong = particles.log_increments(parts[0], parts[1], torch.zeros(1, number), torch.full((1, number), 2), 2.0)
    assert float(particles.effective_sample_size(wrong)) / number != pytest.approx(1 / chi, rel=0.05)


@pytest.mark.parametrize("method", RESAMPLINGS)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 2**31))
def test_counts_against_the_transcription(method: str, number: int, zeros: int, seed: int) -> None:
    weights = weights_of(seed, number, min(zeros, number - 1))
    uniforms = torch.rand(1, number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    counts = particles.resampling_counts(weights[None], method, uniforms)[0]
    assert counts.tolist() == reference.resampling_counts(weights.tolist(), method, uniforms[0].tolist())
    assert counts.sum() == number
    assert counts[weights == 0].eq(0).all()
    if method in ("systematic", "residual"):
        assert (counts >= (number * weights - 1e-9).floor()).all()
    if method == "systematic":
        assert (counts <= (number * weights + 1e-9).ceil()).all()


def test_multinomial_counts_are_not_floor_or_ceil() -> None:
    """The control of the bound that systematic resampling keeps."""
    weights = torch.full((1, 8), 1 / 8, dtype=torch.float64)
    uniforms = torch.rand(1, 8, dtype=torch.float64)
    assert particles.resampling_counts(weights, "systematic", uniforms).eq(1).all()
    assert particles.resampling_counts(weights, "multinomial", uniforms).max() > 1


@pytest.mark.parametrize("method", RESAMPLINGS)
def test_every_method_copies_by_weight_on_average(method: str) -> None:
    for seed, zeros in ((0, 0), (1, 1)):
        weights = weights_of(seed, 4, zeros)
        chances, uniforms = zip(*fallings(weights.tolist(), method), strict=True)
        counts = particles.resampling_counts(weights.expand(len(chances), 4), method, floats(uniforms))
        assert_exact((floats(chances)[:, None] * counts).sum(0), 4 * weights)


@pytest.mark.parametrize("method", RESAMPLINGS)
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_fall_on_particles_with_weight(method: str, uniform: float) -> None:
    """Sums of a hundred tenths round below 1, and what follows the last of them has no weight."""
    for weights in (floats([0.0, *[0.1] * 10, 0.0]), floats([0.0, 1 / 3, 1 / 3, 1 / 3, 0.0, 0.0])):
        number = len(weights)
        counts = particles.resampling_counts(weights[None], method, torch.full((1, number), uniform).double())[0]
        assert counts.sum() == number
        assert counts[weights == 0].eq(0).all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_survivors_keep_their_slot(shares: list[int]) -> None:
    number = len(shares)
    counts = reference.resampling_counts(normalised([s + 1e-9 for s in shares]), "systematic", [0.3] * number)
    ancestors = particles.keep_survivors(torch.tensor([counts]))[0].tolist()
    assert ancestors == reference.survivors_first(counts)
    assert [ancestors.count(i) for i in range(number)] == counts
    assert all(ancestors[i] == i for i in range(number) if counts[i])


def test_resampling_waits_for_the_threshold() -> None:
    log_w = floats([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -INF, -INF], [9.0, 0.0, 0.0, 0.0]])
    log_z, uniforms = floats([0.5, 0.5, 0.5]), torch.full((3, 4), 0.5).double()
    for threshold, expected in (
        (0.0, [False, False, False]),
        (0.5, [False, False, True]),
        (0.6, [False, True, True]),
        (1.0, [False, True, True]),
    ):
        ancestors, after, evidence, _, which = particles.resample(
            log_w, log_z, threshold, "systematic", uniforms, torch.ones(3, dtype=torch.bool)
        )
        assert which.tolist() == expected, threshold
        for row, resampled in enumerate(expected):
            if resampled:
                assert after[row].eq(0).all()
                assert_exact(evidence[row], 0.5 + particles.log_mean_weight(log_w)[row])
            else:
                assert ancestors[row].tolist() == [0, 1, 2, 3]
                assert torch.equal(after[row], log_w[row])
                assert evidence[row] == 0.5
    *_, which = particles.resample(log_w, log_z, 1.0, "systematic", uniforms, torch.tensor([True, False, True]))
    assert which.tolist() == [False, False, True], "nothing is resampled where no block follows"
    open_row = torch.tensor([True])
    *_, which = particles.resample(floats([[3.0]]), floats([0.0]), 1.0, "systematic", floats([[0.5]]), open_row)
    assert which.tolist() == [False], "one particle is never resampled"


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_each_returned_place_alone_follows_the_weights(number: int) -> None:
    rng, rows = torch.Generator().manual_seed(0), 30_000
    weights = weights_of(2, 5, 1)
    log_w = weights.log().expand(rows, 5)
    uniforms = torch.rand(rows, 1 + number, generator=rng)
    chosen = particles.select(log_w, number, "sample", uniforms)
    for place in range(number):
        assert deviations(chosen[:, place], weights) == []
    counts = torch.stack([(chosen == i).sum(1) for i in range(5)], dim=1)
    assert (counts - number * weights).abs().max() < 1, "one systematic draw, not several"
    assert deviations(chosen[:, 0], weights_of(3, 5, 1))


def test_the_best_are_the_heaviest_and_distinct() -> None:
    log_w = floats([[0.0, 3.0, -INF, 2.0]])
    assert particles.select(log_w, 3, "best", torch.rand(1, 4)).tolist() == [[1, 3, 0]]
    with pytest.raises(ValueError, match="select"):
        particles.select(log_w, 1, "worst", torch.rand(1, 2))
    with pytest.raises(ValueError, match="resampling"):
        particles.resampling_counts(log_w.softmax(-1), "simple", torch.rand(1, 4))


def test_the_shared_prefix() -> None:
    texts = torch.tensor([[[1, 2, 3], [1, 2, 4]], [[1, 1, 1], [1, 1, 1]], [[2, 1, 1], [1, 1, 1]]])
    assert particles.shared_prefix(texts).tolist() == [2, 3, 0]
    assert particles.shared_prefix(texts[:, :, :0]).tolist() == [0, 0, 0]


# Enumerated: every draw of the draft, every bonus token and every way the resampling can fall.


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("method", RESAMPLINGS)
def test_the_evidence_is_one_on_average(method: str, threshold: float) -> None:
    for toy in (Toy(2, seed=1), Toy(3, seed=2, kinds=("free", "equal", "masked target"))):
        population = Population(toy, number=2, threshold=threshold, method=method)
        assert population.evidence() == pytest.approx(1.0, abs=1e-9)
    assert Population(Toy(2, seed=3), 3, threshold=threshold, method=method).evidence() == pytest.approx(1.0, abs=1e-9)
    assert Population(Toy(2, seed=4), 2, gamma=2, method=method).evidence() == pytest.approx(1.0, abs=1e-9)


def test_resampling_happens_in_the_enumeration() -> None:
    """The control of the one above: with the rest equal, the threshold changes the law of the output."""
    laws = [Population(Toy(2, seed=1), 2, threshold=threshold).law() for threshold in (0.0, 1.0)]
    assert total_variation(*laws) > 1e-3


def past_the_end(log_p: Tensor, log_q: Tensor, bonus: Tensor, kept: Tensor, power: float) -> Tensor:
    """Counts what stands after an EOS, as if the text went on."""
    filled = [torch.where(part.isnan(), value, part) for part, value in ((log_p, -1.0), (log_q, -2.0))]
    whole = torch.full_like(kept, log_p.shape[-1] + 1).masked_fill(kept == 0, 0)
    return particles.log_increments(filled[0], filled[1], bonus.nan_to_num(), whole, power)


def without_the_ratio(log_p: Tensor, log_q: Tensor, bonus: Tensor, kept: Tensor, power: float) -> Tensor:
    return particles.log_increments(log_p, torch.zeros_like(log_q), bonus, kept, power)


@pytest.mark.parametrize("wrong", [past_the_end, without_the_ratio])
def test_wrong_weights_have_another_evidence(wrong: Any) -> None:
    for seed in (1, 2):
        evidence = Population(Toy(2, seed=seed), 2, gamma=2, rounds=1, increments=wrong).evidence()
        assert abs(evidence - 1) > 1e-3


def test_a_draft_that_lacks_a_token_leaves_evidence_below_one() -> None:
    toy = Toy(3, seed=2, kinds=("masked draft",))
    evidence = Population(toy, 2).evidence()
    assert evidence < 1 - 1e-3


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_the_evidence_of_a_power_is_the_sum_of_powers(power: float) -> None:
    for threshold in (0.0, 1.0):
        population = Population(Toy(2, seed=5), 2, threshold=threshold, power=power)
        wanted = math.fsum(w**power for w in population.target().values())
        assert population.evidence() == pytest.approx(wanted, rel=1e-9)
        assert Population(Toy(2, seed=5), 2, threshold=threshold).evidence() != pytest.approx(wanted, rel=1e-3)


def test_a_power_draws_likely_texts_more_often() -> None:
    """With more particles the output comes nearer to the normalised p², which plain weights do not."""
    toy = Toy(2, seed=5)
    target = Population(toy, 1).target()
    total = math.fsum(w**2 for w in target.values())
    squared = {text: w**2 / total for text, w in target.items()}
    distances = [total_variation(Population(toy, n, power=2.0, rounds=2).law(), squared) for n in (1, 2, 3)]
    assert distances[0] > distances[1] > distances[2]
    assert total_variation(Population(toy, 3).law(), squared) > 2 * distances[2]


def test_the_output_comes_nearer_to_the_target_with_more_particles() -> None:
    for seed, rounds in ((1, 2), (6, 1)):
        toy = Toy(2, seed=seed)
        laws = [Population(toy, n, rounds=rounds) for n in (1, 2, 3, 4)]
        distances = [total_variation(each.law(), each.target()) for each in laws]
        assert distances == sorted(distances, reverse=True), distances
        assert distances[-1] < 0.6 * distances[0]
        assert distances[-1] > 1e-6, "and never reaches it"


def test_one_particle_is_the_draft_and_a_bonus() -> None:
    population = Population(Toy(3, seed=7), 1, gamma=2, rounds=1)
    law, toy = population.law(), population.toy
    assert math.fsum(law.values()) == pytest.approx(1.0)
    for text, weight in law.items():
        wanted = toy.p(())[text[0]]
        wanted *= math.prod(toy.q(text[:t])[text[t]] for t in range(1, min(len(text), 3)))
        wanted *= toy.p(text[:3])[text[3]] if len(text) == 4 else 1.0
        assert weight == pytest.approx(wanted, abs=1e-12)
    assert total_variation(law, population.target()) > 0.01


def test_where_draft_and_target_are_one_the_output_is_the_target() -> None:
    population = Population(Toy(2, seed=8, kinds=("equal",)), 3, threshold=1.0)
    assert total_variation(population.law(), population.target()) < 1e-12
    assert all(abs(weight) < 1e-12 for state in population.runs() for weight in (state.log_z, *state.log_w))
