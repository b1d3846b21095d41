"""The goals: turns interleave, sections add up, the page is made from the result."""

import copy
import json

import pytest
import torch

from examples.benchmarks import __main__ as command
from examples.benchmarks import goals, page, report, ways
from examples.benchmarks.marks import marks
from examples.benchmarks.timing import Contender, interleave, median_ratio, threads
from tests.bench.shared import SMALL, small_pair


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
        text = ways.stock_assisted(pair.model, pair.draft, ids, 21, 3).run()
        hook.remove()
        assert torch.equal(text, ways.plain(pair.model, ids, 21).run())
        # One call a row; after its prefill every pass reads the last token and three drafted ones, the end excepted.
        assert len(widths) % 2 == 0
        assert set(widths[1 : len(widths) // 2 - 1]) == {4}
        ways.stock_assisted(pair.model, pair.draft, ids, 21, None).run()
        assert pair.draft.generation_config.to_dict() == before.to_dict()


@pytest.fixture(scope="module")
def result():
    plan = goals.Plan(
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
    return goals.run_goals(plan, command="the command")


class TestGoals:
    def test_a_result_is_json_and_names_its_origin(self, result):
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert result["meta"]["command"] == "the command"
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
        assert not {goal["what"]: goal for goal in goals.goals(changed)}[tuned["what"]]["met"]

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
            assert command.main(["page", str(text), "--out", str(tmp_path)]) == 0
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
