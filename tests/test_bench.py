"""The measuring side: controlled pairs are what they say, turns interleave, pages come from results."""

import copy
import json
import random
from itertools import pairwise

import pytest
import torch

from hf_semspec import LosslessConfig
from hf_semspec.bench import command, contenders, page, report, run
from hf_semspec.bench.pairs import controlled_pair, random_llama
from hf_semspec.bench.sizes import GOAL_LLAMA, Size
from hf_semspec.tools.pages import marks
from hf_semspec.tools.timing import Contender, forward_seconds, interleave, median_ratio, threads

SMALL = Size(layers=2, hidden=64, intermediate=64, heads=2)


def small_pair(agreement, **kwargs):
    return controlled_pair(agreement, target_size=SMALL, draft_size=SMALL, vocab=400, **kwargs)


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
        way = contenders.scheme(
            "lossless", pair.model, pair.draft, ids, 40, LosslessConfig(num_draft_tokens=num_draft_tokens)
        )
        output = way.run()
        assert pair.ideal_rounds(output.sequences[0, 5:], num_draft_tokens) == output.stats.rounds

    def test_ideal_rounds_by_hand(self):
        pair = small_pair(1.0)
        text = pair.prompts(1, 11)[0]  # the prompt's last token, then ten new ones; the prefill gives the first
        assert [pair.ideal_rounds(text, n) for n in (1, 2, 4, 8)] == [5, 3, 2, 1]


class TestTiming:
    def test_contenders_run_in_turns_and_warm_ups_are_dropped(self):
        order = []
        ways = [Contender(name, lambda name=name: order.append(name) or name) for name in "ABC"]
        interleave(ways, 2, warmup=1)
        assert "".join(order) == "ABCABCABC"
        assert [(len(way.seconds), len(way.cpu_seconds), way.result) for way in ways] == [(2, 2, n) for n in "ABC"]

    def test_ratios_pair_the_runs_of_a_turn(self):
        assert median_ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == 2.0
        with pytest.raises(ValueError):
            median_ratio([1.0], [1.0, 2.0])

    def test_threads_are_put_back(self):
        before = torch.get_num_threads()

        def fail():
            with threads(before + 1):
                assert torch.get_num_threads() == before + 1
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert torch.get_num_threads() == before

    def test_every_pass_is_timed_behind_its_own_cache(self):
        model, draft = random_llama(GOAL_LLAMA, vocab=50), random_llama(SMALL, vocab=50)
        seen = []
        model.register_forward_pre_hook(lambda m, a, k: seen.append(tuple(k["input_ids"].shape)), with_kwargs=True)
        seconds = forward_seconds({"1": (model, 1), "5": (model, 5), "q": (draft, 1)}, batch=2, context=7, repeats=2)
        assert seconds.keys() == {"1", "5", "q"}
        assert all(value > 0 for value in seconds.values())
        assert seen == [(2, 7), (2, 7), *[(2, 1), (2, 5)] * 3]


class TestContenders:
    # Stock's own assisted loop makes the calls that it reports as deprecated.
    @pytest.mark.deprecated
    def test_stock_drafts_what_it_was_tuned_to_and_the_draft_is_put_back(self):
        pair = small_pair(1.0)
        ids = pair.prompts(2, 5)
        before = copy.deepcopy(pair.draft.generation_config)
        widths = []
        hook = pair.model.register_forward_pre_hook(
            lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True
        )
        text = contenders.stock_assisted(pair.model, pair.draft, ids, 21, 3).run()
        hook.remove()
        assert torch.equal(text, contenders.plain(pair.model, ids, 21).run())
        # One call a row; after its prefill every pass reads the last token and three drafted ones, the end excepted.
        assert len(widths) % 2 == 0
        assert set(widths[1 : len(widths) // 2 - 1]) == {4}
        contenders.stock_assisted(pair.model, pair.draft, ids, 21, None).run()
        assert pair.draft.generation_config.to_dict() == before.to_dict()


@pytest.fixture(scope="module")
def result():
    plan = run.Plan(
        target=SMALL,
        draft=SMALL,
        vocab=200,
        new_tokens=12,
        prompt=4,
        lengths=(2, 3),
        repeats=1,
        overhead_tokens=8,
        overhead_repeats=1,
        batch=2,
        particles=(1, 2),
        particle_lengths=(3,),
    )
    return run.run_goals(plan, command="hf-semspec bench")


class TestGoals:
    def test_a_result_is_json_and_names_its_origin(self, result):
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert result["meta"]["command"] == "hf-semspec bench"
        assert {"torch", "transformers"} <= result["meta"]["versions"].keys()

    def test_exact_contenders_give_plain_decodings_tokens(self, result):
        for section in ("overhead", "batch1", "batch"):
            assert {row["same_tokens"] for row in result[section]["rows"]} == {1.0}

    def test_goals_follow_from_the_sections(self, result):
        entries = {goal["what"]: goal for goal in result["goals"]}
        assert len(entries) == 14
        tuned = entries["lossless over HF assisted, tuned, batch 1"]
        assert tuned["value"] == result["batch1"]["over_tuned"]
        assert tuned["met"] == (tuned["value"] >= 1.0)
        changed = copy.deepcopy(result)
        changed["batch1"]["over_tuned"] = 0.5
        assert not {goal["what"]: goal for goal in run.goals(changed)}[tuned["what"]]["met"]

    def test_thresholds_at_infinity_trigger_nothing(self, result):
        rows = {row["name"]: row for row in result["easd"]["rows"]}
        assert rows["easd, thresholds inf"]["trigger_rate"] == 0
        assert rows["easd, thresholds inf"]["target_forwards"] == rows["lossless"]["target_forwards"]

    def test_particles_are_measured_beside_as_many_chains(self, result):
        section = result["smc"]
        assert [(row["particles"], row["length"]) for row in section["rows"]] == [(1, 3), (2, 3)]
        assert section["rows"][0]["ess"] == pytest.approx(1.0)
        assert 1 <= section["rows"][1]["ess"] <= 2
        # The first token, then 4 a round; the last block has room for three.
        assert {row["target_forwards"] for row in section["rows"]} == {1 + 3}
        assert section["goal"]["name"] == "smc N=2 γ=3"
        assert section["goal"]["bound"] == pytest.approx(4 / (section["costs"]["c"] + 3 * section["costs"]["rho"]))
        memory = {(row["particles"], row["new_tokens"]): row for row in section["memory"]}
        assert memory.keys() == {(1, 6), (1, 12), (2, 6), (2, 12)}
        assert all(row["peak"] > row["states"] > 0 for row in memory.values())
        assert memory[2, 12]["states"] == 2 * memory[1, 12]["states"]
        assert "| 2 | 3 |" in report.markdown(result)

    def test_the_page_is_written_between_its_marks(self, result, tmp_path):
        text = tmp_path / "page.md"
        text.write_text(f"before\n{marks()[0]}\nold\n{marks()[1]}\nafter\n")
        (tmp_path / "goals.json").write_text(json.dumps(result))
        for _ in range(2):
            assert command.main(["--out", str(tmp_path), "--page", str(text)]) == 0
            written = text.read_text()
            assert written.startswith("before\n")
            assert written.endswith("\nafter\n")
            assert "\nold\n" not in written
            assert written.count("### Goals") == 1
            assert report.markdown(result) in written
            assert f"Not yet measured: `{page.COMMANDS['pairs']}`." in written
        text.write_text("no marks")
        with pytest.raises(ValueError, match="measured: begin"):
            page.write_page(tmp_path, text)
