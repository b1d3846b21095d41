"""Controlled pairs are what they say, whatever their size; a forward of theirs is timed behind its own cache."""

import random
from itertools import pairwise

import pytest
import torch

from hf_semspec import SemSpecConfig
from hf_semspec.bench import controlled_pair
from hf_semspec.bench.costs import forward_seconds
from hf_semspec.bench.pairs import random_llama
from hf_semspec.bench.sizes import LLAMA_8B, SIZES, Size, size_by_name
from tests.bench.shared import SMALL, small_pair


class TestControlledPair:
    def test_default_sizes_are_those_of_the_goals(self):
        pair = controlled_pair(0.65)
        millions = [sum(p.numel() for p in model.parameters()) / 1e6 for model in (pair.model, pair.draft)]
        assert millions == pytest.approx([98, 1.5], rel=0.03)

    def test_greedy_text_is_the_cycle(self):
        pair = small_pair(0.5)
        ids = pair.prompts(2, 5)
        text = pair.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60)
        assert text.shape == (2, 65)
        following = dict(pairwise([*pair.cycle.tolist(), int(pair.cycle[0])]))
        for row in text.tolist():
            assert [following[token] for token in row[:-1]] == row[1:]

    @pytest.mark.parametrize("agreement", [0.0, 0.35, 0.65, 0.9, 1.0])
    def test_the_draft_agrees_on_the_chosen_share(self, agreement):
        pair = small_pair(agreement)
        assert pair.agrees.float().mean() == pytest.approx(agreement, abs=0.01)
        measured = pair.measure(pair.prompts(1, 400))
        assert measured.greedy == pytest.approx(agreement, abs=0.02)
        # Short stretches show it too: disagreements are spread evenly along the cycle.
        short = pair.agrees[pair.prompts(1, 100)[0]].float().mean()
        assert short == pytest.approx(agreement, abs=0.06)

    def test_agrees_says_by_token_where_the_argmaxes_meet(self):
        pair = small_pair(0.6)
        text = pair.cycle[None]
        same = pair.model(text).logits.argmax(-1) == pair.draft(text).logits.argmax(-1)
        assert torch.equal(same[0], pair.agrees[text[0]])

    def test_the_logit_scale_sets_the_entropy(self):
        entropies = []
        for scale in (6.0, 9.0, 12.0):
            pair = small_pair(0.65, logit_scale=scale)
            entropies.append(pair.measure(pair.prompts(1, 200)).target_entropy)
        assert entropies[0] > 2 * entropies[1] > 4 * entropies[2]

    def test_leaves_the_global_generators_alone_and_repeats(self):
        state, python_state = torch.random.get_rng_state(), random.getstate()
        one, two = small_pair(0.65, seed=3), small_pair(0.65, seed=3)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert random.getstate() == python_state
        assert torch.equal(one.cycle, two.cycle)
        assert torch.equal(one.agrees, two.agrees)
        assert torch.equal(one.model(one.cycle[None]).logits, two.model(two.cycle[None]).logits)

    @pytest.mark.parametrize(
        ("agreement", "vocab", "name"), [(1.5, 400, "agreement"), (-0.1, 400, "agreement"), (0.5, 3, "vocab")]
    )
    def test_bad_values(self, agreement, vocab, name):
        with pytest.raises(ValueError, match=name):
            controlled_pair(agreement, target_size=SMALL, draft_size=SMALL, vocab=vocab)

    @pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
    def test_ideal_rounds_are_those_that_lossless_makes(self, num_draft_tokens):
        pair = small_pair(0.65)
        ids = pair.prompts(1, 6)
        output = pair.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=pair.draft,
            generation_config=SemSpecConfig(
                "lossless", num_draft_tokens=num_draft_tokens, max_new_tokens=40, return_dict_in_generate=True
            ),
        )
        assert pair.ideal_rounds(output.sequences[0, 5:], num_draft_tokens) == output.stats.rounds

    def test_ideal_rounds_by_hand(self):
        pair = small_pair(1.0)
        text = pair.prompts(1, 11)[0]  # the prompt's last token, then ten new ones; the prefill gives the first
        assert [pair.ideal_rounds(text, n) for n in (1, 2, 4, 8)] == [5, 3, 2, 1]


class TestPairsOfAnySize:
    def test_sizes_by_name_or_by_shape(self):
        assert size_by_name("--x", "llama-3.1-8b") is LLAMA_8B is SIZES["llama-3.1-8b"]
        assert size_by_name("--x", "2x64x96x4/2") == Size(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_grouped_heads_and_half_precision_keep_the_cycle(self, dtype):
        size = Size(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab=160)
        pair = controlled_pair(0.6, target_size=size, draft_size=size, dtype=dtype)
        assert pair.model.dtype == dtype
        assert pair.model.config.num_key_value_heads == 2
        text = pair.cycle[None]
        following = pair.model(text).logits[0].argmax(-1)
        assert torch.equal(following, pair.cycle.roll(-1))
        assert pair.measure(text).greedy == pytest.approx(0.6, abs=0.02)
        # The norms and the rotary table are not left as the memory they were made in.
        assert all(bool((p == 1).all()) for p in pair.model.parameters() if p.dim() == 1)
        assert pair.model.model.rotary_emb.inv_freq[0] == 1


def test_every_pass_is_timed_behind_its_own_cache():
    model, draft = random_llama(SIZES["0.7M"], vocab=50), random_llama(SMALL, vocab=50)
    seen = []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    seconds = forward_seconds({"1": (model, 1), "5": (model, 5), "q": (draft, 1)}, batch=2, context=7, repeats=2)
    assert seconds.keys() == {"1", "5", "q"}
    assert all(value > 0 for value in seconds.values())
    assert seen == [(2, 7), (2, 7), *[(2, 1), (2, 5)] * 3]
