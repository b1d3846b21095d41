"""Forecasts: the formulas on cases that can be enumerated, the laws they rest on, and how costs are read off."""

import itertools
import math

import pytest
import torch

from hf_semspec.bench.advice import compare_vocabularies, forecast_all, warnings_of
from hf_semspec.bench.agreement import Agreement, agreement_on, block_chi2
from hf_semspec.bench.costs import forecast, needed
from hf_semspec.bench.prediction import best_particles, best_verified, expected_tokens, interpolated, speed_up
from hf_semspec.bench.rivals import DEFAULT_SCHEMES, Way, wanted_way
from hf_semspec.bench.subject import Subject
from hf_semspec.evaluation.contenders import Contender as Wanted
from tests.models import draft_of, prompts, tiny, tokenizer


def one(rows, width):
    return 1.0


class TestFormulas:
    @pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.65, 1.0])
    @pytest.mark.parametrize("length", [0, 1, 2, 4])
    def test_expected_tokens_are_those_of_all_ways_a_round_can_go(self, acceptance, length):
        total = 0.0
        for passes in itertools.product((True, False), repeat=length):
            chance = math.prod(acceptance if each else 1 - acceptance for each in passes)
            total += chance * (1 + next((i for i, each in enumerate(passes) if not each), length))
        assert expected_tokens(acceptance, length) == pytest.approx(total, abs=1e-12)

    def test_speed_up_by_hand(self):
        # Three tokens for a target pass worth 1.5 steps and two drafts worth a quarter each.
        assert speed_up(3.0, 2, 1.5, 0.25) == 1.5

    @pytest.mark.parametrize(("acceptance", "best"), [(0.0, 1), (0.5, 2), (0.9, 8), (1.0, 8)])
    def test_the_best_length_grows_with_acceptance(self, acceptance, best):
        lengths = (1, 2, 4, 8)
        found = best_verified(acceptance, lambda r, w: 1 + 0.02 * w, lambda r, w: 0.1, batch=1, lengths=lengths)
        gains = [expected_tokens(acceptance, n) / (1 + 0.02 * (n + 1) + 0.1 * n) for n in lengths]
        assert (found.num_draft_tokens, found.speed_up) == (lengths[gains.index(max(gains))], max(gains))
        assert found.num_draft_tokens == best

    def test_an_extra_rejection_costs_what_its_law_says(self):
        kept = best_verified(0.8, one, lambda r, w: 0.0, batch=1, lengths=(3,), keeps=0.9)
        assert kept.tokens == pytest.approx(1 + 0.72 + 0.72**2 + 0.72**3)

    def test_particles_count_for_nothing_where_their_weights_do_not(self):
        chi2 = {2: 0.2, 4: 0.9, 8: 1.5}
        target = interpolated({(1, 1): 1.0, (8, 1): 1.0, (1, 16): 1.0, (8, 16): 4.0})
        found = best_particles(chi2, target, one, batch=1, numbers=(4, 8))
        costs = {(g, n): (g + 1) / (target(n, g + 1) + g) for g in (2, 4) for n in (4, 8)}
        assert (found.num_draft_tokens, found.num_particles) == max(costs, key=costs.__getitem__)
        assert found.num_draft_tokens != 8
        assert best_particles({2: 3.0}, target, one, batch=1, numbers=(4,)) is None

    def test_costs_are_read_off_between_and_beyond_what_was_measured(self):
        cost = interpolated({(1, 1): 1.0, (1, 3): 2.0, (2, 1): 3.0, (2, 3): 6.0})
        assert [cost(1, 1), cost(1, 3), cost(2, 3)] == [1.0, 2.0, 6.0]
        assert cost(1, 2) == 1.5
        assert cost(2, 2) == 4.5
        assert cost(2, 6) == 12.0
        assert cost(4, 3) == 12.0
        assert interpolated({(1, 1): 2.0})(1, 4) == 8.0


SECONDS = {("target", 2, 1): 2.0, ("target", 2, 4): 3.0, ("draft", 2, 1): 0.5} | {
    ("target", 1, 4): 1.5,
    ("draft", 1, 1): 0.25,
    ("target", 8, 4): 6.0,
    ("draft", 8, 1): 1.0,
}
ACCEPTANCE = {"greedy": 0.5, "sampling": 0.25, "easd": 0.8}


class TestForecasts:
    def way(self, kind, mode="greedy", *, alone=False, number=1, keeps=1.0, length=3, options=None):
        return Way(kind, kind, mode, False, alone, lambda batch, tokens: None, length, number, keeps, options or {})

    def test_by_hand(self):
        def found(*args, **kwargs):
            return forecast(self.way(*args, **kwargs), 2, SECONDS, ACCEPTANCE)

        assert found("lossless") == pytest.approx((1 + 0.5 + 0.25 + 0.125) / (1.5 + 3 * 0.25))
        assert found("lossless", "sampling") == pytest.approx((1 + 0.25 + 0.0625 + 0.25**3) / 2.25)
        assert found("easd", keeps=None) == pytest.approx((1 + 0.4 + 0.16 + 0.064) / 2.25)
        assert found("easd", keeps=0.5) == pytest.approx((1 + 0.25 + 0.0625 + 0.25**3) / 2.25)
        # Four particles of each of two prompts; every token counts.
        assert found("smc", "sampling", number=4) == pytest.approx(4 / (3.0 + 3 * 0.5))
        # Segments that are all kept, each with a bonus.
        assert found("semantic") == pytest.approx(4 / (1.5 + 3 * 0.25))
        # One prompt after the other: its own round costs 2.25 s for 1.875 tokens, plain makes one a second.
        assert found("assisted", alone=True) == pytest.approx(1.875 / (1.5 + 0.75))

    @pytest.mark.parametrize("changed", [{"number": 4}, {"length": None}, {"options": {"draft": "ngram"}}])
    def test_nothing_is_said_of_what_has_no_formula(self, changed):
        assert forecast(self.way("lossless", **changed), 2, SECONDS, ACCEPTANCE) is None
        assert forecast(self.way("parse"), 2, SECONDS, ACCEPTANCE) is None

    def test_segments_have_a_length_only_where_all_are_kept(self):
        model = tiny(layers=1)
        ways = {name: wanted_way(Subject(model, model, []), Wanted(name, *rest)) for name, *rest in DEFAULT_SCHEMES}
        lengths = {name: way.length for name, way in ways.items() if way.kind == "semantic"}
        assert lengths == {"semantic, all kept": 16, "semantic, none kept": None}

    def test_what_a_forecast_needs_is_measured(self):
        ways = [self.way("smc", number=4), self.way("assisted", alone=True), self.way("lossless"), self.way("parse")]
        places = needed(ways, 2)
        measured = dict.fromkeys(
            [("target", *place) for place in places["target"]] + [("draft", *place) for place in places["draft"]], 1.0
        )
        assert measured.keys() == SECONDS.keys()


class TestAdvice:
    GOOD = Agreement(0.8, 0.7, 1.0, 1.0)

    def costs(self, draft):
        places = [(rows, width) for rows in (1, 8) for width in (1, 32)]
        return {("target", *p): 1.0 + 0.01 * p[1] for p in places} | {("draft", *p): draft for p in places}

    def forecasts(self, draft, chi2=0.1):
        both = {"greedy": self.GOOD, "sampling": self.GOOD}
        return forecast_all(both, {1: chi2, 4: 4 * chi2}, self.costs(draft), [1, 8], answer=30)

    def test_every_scheme_at_every_batch(self):
        found = {(entry["scheme"], entry["batch"]): entry for entry in self.forecasts(0.05)}
        assert len(found) == 12
        lossless = found["lossless, greedy", 1]
        n, step = lossless["num_draft_tokens"], 1.01
        own = expected_tokens(0.8, n) / ((1 + 0.01 * (n + 1)) / step + n * 0.05 / step)
        assert lossless["speed_up"] == pytest.approx(own)
        assert found["lossless, sampling", 1]["speed_up"] < lossless["speed_up"]
        parse, semantic = found["parse, all kept", 8], found["semantic, segments of 32, all kept", 1]
        assert parse["speed_up"] == pytest.approx(30 * step / (1 + 0.31 + 30 * 0.05))
        assert semantic["speed_up"] > 10
        for whole, length in ((parse, 30), (semantic, 32)):
            # A share k kept, the rest at a target step a token: as fast as plain decoding at the share named.
            cost = (1 + 0.01 * (length + 1)) * max(1, (length + 1) / 32) + length * 0.05
            spent = cost / step + (1 - whole["break_even"]) * length
            assert spent == pytest.approx(length, rel=1e-2)
        assert lossless["break_even"] is None
        assert found["smc, half the particles alive", 1]["num_particles"] in (2, 4, 8, 16)

    def test_a_draft_as_dear_as_its_target_is_warned_of(self):
        same = {"kind": "same", "note": ""}
        both = {"greedy": self.GOOD, "sampling": self.GOOD}
        cheap, dear = self.forecasts(0.05), self.forecasts(2.0)
        assert warnings_of(same, both, cheap) == []
        warned = warnings_of(same, both, dear)
        assert [text.split(":")[0] for text in warned] == ["batch 1", "batch 8", "semantic", "parse"]
        assert "no token-level scheme can win" in warned[0]

    def test_particles_without_weight_are_warned_of(self):
        both = {"greedy": self.GOOD, "sampling": self.GOOD}
        found = self.forecasts(0.05, chi2=9.0)
        assert {entry["speed_up"] for entry in found if entry["scheme"].startswith("smc")} == {None}
        assert any(text.startswith("smc") for text in warnings_of({"kind": "same", "note": ""}, both, found))

    @pytest.mark.parametrize(
        ("sizes", "tokenizers", "kind"),
        [
            ((97, 97), (0, 0), "same"),
            ((97, 97), (None, None), "same"),
            ((97, 101), (0, 0), "padded"),
            ((97, 101), (None, None), "padded"),
            ((97, 97), (0, 5), "foreign"),
            ((97, 2000), (None, None), "unequal"),
        ],
    )
    def test_vocabularies(self, sizes, tokenizers, kind):
        models = [tiny(vocab=size, layers=1) for size in sizes]
        words = [None if each is None else tokenizer(permute=each) for each in tokenizers]
        assert compare_vocabularies(Subject(*models, [], *words))["kind"] == kind


class TestLaws:
    def test_every_figure_is_the_mean_over_the_positions(self):
        model = tiny(dtype=torch.float32)
        draft = draft_of(model, "near", noise=0.3)
        text = prompts((9,))["input_ids"]
        found = agreement_on(model, draft, text, easd={"target_entropy_threshold": 0.0, "overlap_threshold": 0.0})
        p, q = (each(text).logits[0].detach().double().softmax(-1) for each in (model, draft))
        assert found.greedy == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        assert found.overlap == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
        assert found.overlap == pytest.approx(float(1 - (p - q).abs().sum(-1).mean() / 2), abs=1e-5)
        assert found.target_entropy == pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-4)
        assert found.draft_entropy == pytest.approx(float(-(q * q.log()).sum(-1).mean()), abs=1e-4)
        chi2 = ((p**2 / q).sum(-1) - 1).median()
        assert found.one_token_chi2 == pytest.approx(float(chi2), rel=1e-3)
        unsure = float((-(q * q.log()).sum(-1) >= 1.0).double().mean())
        assert found.uncertain == pytest.approx(unsure)
        assert found.positions == 9

    def test_padding_counts_for_nothing(self):
        model = tiny(dtype=torch.float32)
        draft = draft_of(model, "near", noise=0.3)
        padded = prompts((5, 9))
        both = agreement_on(model, draft, padded["input_ids"], padded["attention_mask"])
        alone = [agreement_on(model, draft, padded["input_ids"][i : i + 1, 9 - n :]) for i, n in enumerate((5, 9))]
        assert both.positions == 14
        assert both.overlap == pytest.approx((5 * alone[0].overlap + 9 * alone[1].overlap) / 14, abs=1e-5)

    def test_a_draft_that_lacks_ids_of_the_target(self):
        model, draft = tiny(dtype=torch.float32), tiny(vocab=60, dtype=torch.float32)
        found = agreement_on(model, draft, prompts((9,))["input_ids"])
        assert 0 <= found.overlap < 1
        assert found.one_token_chi2 == math.inf
        assert found.to_dict()["one_token_chi2"] is None

    def test_chi2_of_one_token_is_that_of_the_laws(self):
        model = tiny(vocab=5, seed=1, initializer_range=0.1, dtype=torch.float32)
        draft = draft_of(model, "near", noise=0.6)
        prompt = torch.tensor([1, 4, 2])
        p, q = (each(prompt[None]).logits[0, -1].detach().double().softmax(-1) for each in (model, draft))
        exact, swapped = (float((a**2 / b).sum() - 1) for a, b in ((p, q), (q, p)))
        found = block_chi2(model, draft, [prompt], (1,), blocks=4000)[1]
        assert found == pytest.approx(exact, rel=0.15)
        assert swapped != pytest.approx(exact, rel=0.15)  # the assertion can fail

    def test_chi2_grows_with_the_block_and_vanishes_where_the_models_are_one(self):
        model = tiny(dtype=torch.float32)
        state = torch.random.get_rng_state()
        assert block_chi2(model, model, [torch.tensor([3, 4])], (1, 4), blocks=8)[4] == pytest.approx(0, abs=1e-4)
        found = block_chi2(model, draft_of(model, "near", noise=0.2), [torch.tensor([3, 4])], (1, 2, 4), blocks=64)
        assert 0 < found[1] < found[2] < found[4] <= 63 + 1e-6
        assert torch.equal(torch.random.get_rng_state(), state)
