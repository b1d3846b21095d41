"""The arithmetic lab: its task, its tokenizer, its packed batches, its training, and the trained pair that is kept."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic_lab.evaluate import judge_rates, right_answers, write_solutions
from examples.arithmetic_lab.packing import IGNORE, Packer, Row, boundaries
from examples.arithmetic_lab.rows import Rows, drafted_rows
from examples.arithmetic_lab.settings import Settings
from examples.arithmetic_lab.task import (
    Problem,
    check,
    corrupt,
    corrupted_solution,
    extract_answer,
    parse_question,
    prefix_is_right,
    sample_problem,
    solution,
    split_of,
    step_is_right,
)
from examples.arithmetic_lab.tokenizer import build_tokenizer, judging_suffix, prompt_text
from examples.arithmetic_lab.train import Trainer, build_model

LAB = Path(__file__).parents[2] / "examples" / "arithmetic_lab"
MINUTE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
seeds = st.integers(0, 2**32)


@cache
def tokenizer():
    return build_tokenizer()


def row_of(problem, text, expected=None):
    return Row(problem, text, expected or [True] * len(text))


class TestTask:
    def test_reads_from_left_to_right(self):
        problem = parse_question("47+38-15*03=")
        assert solution(problem) == "47+38=85\n85-15=70\n70*03=10\n#10"
        assert problem.answer == "10"

    def test_wraps_below_zero(self):
        assert parse_question("10-35=").answer == "75"

    @pytest.mark.parametrize("text", ["", "47+38", "7+38=", "47/38=", "47+38=85", "="])
    def test_refuses_what_is_not_a_question(self, text):
        with pytest.raises(ValueError, match="not a question"):
            parse_question(text)

    @given(seeds)
    def test_a_question_reads_back(self, seed):
        problem = sample_problem(random.Random(seed), 1, 10)
        assert parse_question(problem.question) == problem

    @given(seeds)
    def test_the_solution_is_right_step_by_step(self, seed):
        problem = sample_problem(random.Random(seed))
        text = solution(problem)
        *lines, last = text.split("\n")
        assert len(lines) == len(problem.steps)
        assert 4 <= len(lines) <= 10
        assert all(step_is_right(line) for line in lines)
        assert all(before[6:] == after[:2] for before, after in zip(lines, lines[1:], strict=False))
        assert last == "#" + problem.answer
        assert check(text, problem.answer)
        assert all(prefix_is_right(problem, text[:cut]) for cut in boundaries(text))

    @given(seeds)
    def test_the_checker_finds_a_corrupted_solution(self, seed):
        rng = random.Random(seed)
        problem = sample_problem(rng)
        text, expected = corrupt(rng, problem)
        true = solution(problem)
        assert len(text) == len(expected) == len(true)
        first = next(index for index in range(len(true)) if text[index] != true[index])
        assert expected.index(False) == first
        for cut in boundaries(text):
            assert prefix_is_right(problem, text[:cut]) == (cut <= first)

    @given(seeds, st.integers(0, 3), st.sampled_from((6, 7)), st.integers(1, 9))
    def test_a_wrong_result_is_seen_on_its_line_and_carried_on(self, seed, line, column, shift):
        problem = sample_problem(random.Random(seed))
        digit = str((int(solution(problem)[9 * line + column]) + shift) % 10)
        text, expected = corrupted_solution(problem, {(line, column): digit})
        lines = text.split("\n")[:-1]
        assert [step_is_right(each) for each in lines] == [index != line for index in range(len(lines))]
        assert expected.count(False) == 1
        assert all(before[6:] == after[:2] for before, after in zip(lines, lines[1:], strict=False))
        assert extract_answer(text) == lines[-1][6:]

    @pytest.mark.parametrize("line", ["47+38=86", "47+38=8", "47+38-85", "x7+38=85", "47+38=85\n", ""])
    def test_a_wrong_step_is_not_right(self, line):
        assert not step_is_right(line)

    @pytest.mark.parametrize("text", ["47+38=85\n", "47+38=85\n#8", "#85x", ""])
    def test_no_answer_is_not_right(self, text):
        assert not check(text, "85")

    def test_is_a_function_of_the_seed(self):
        draws = [
            [sample_problem(random.Random(7)), corrupt(random.Random(7), Problem(5, (("+", 6),)))] for _ in range(2)
        ]
        assert draws[0] == draws[1]

    @given(seeds, st.sampled_from(("train", "heldout", "calibration", "validation")))
    def test_draws_from_the_split_asked_for(self, seed, split):
        assert split_of(sample_problem(random.Random(seed), 1, 10, split=split).question) == split


class TestTokenizer:
    @given(seeds)
    def test_round_trip_one_token_a_character(self, seed):
        text = solution(sample_problem(random.Random(seed)))
        ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer().unk_token_id not in ids
        assert tokenizer().decode(ids) == text

    def test_chat_template_of_several_turns(self):
        turns = ("user", "1+2="), ("assistant", "03"), ("user", "?")
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "1+2=<|answer|>03<|end|>?<|answer|>"
        assert prompt_text(tokenizer(), "1+2=") == "1+2=<|answer|>"

    def test_the_judging_suffix_is_three_tokens_and_a_label_is_one(self):
        assert judging_suffix(tokenizer()) == "<|end|>?<|answer|>"
        packer = Packer(tokenizer())
        assert len(packer.suffix) == 3
        assert all(len(packer.encode(label)) == 1 for label in "YN")
        assert tokenizer().pad_token_id != tokenizer().eos_token_id

    def test_loads_again(self, tmp_path):
        tokenizer().save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        text = prompt_text(loaded, "47+38=") + "47+38=85\n#85<|end|>"
        assert loaded(text)["input_ids"] == tokenizer()(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert loaded.padding_side == "left"


class TestPacking:
    def rows(self):
        rng = random.Random(3)
        problems = [sample_problem(rng, count, count) for count in (1, 3, 6)]
        rows = [row_of(problem, *corrupt(rng, problem)) for problem in problems]
        right = sample_problem(rng, 2, 2)
        # What a draft may write: an end in the middle of a line, and nothing at all.
        return [
            *rows,
            row_of(right, solution(right)),
            Row(right, solution(right)[:13], [True] * 13, False),
            row_of(right, ""),
        ]

    def test_equals_separate_sequences(self):
        packer, rows = Packer(tokenizer()), self.rows()
        model = build_model(Settings("target", "", shape=MINUTE), tokenizer()).eval()
        batch = packer(rows)
        with torch.no_grad():
            logits = model(batch.input_ids, attention_mask=batch.mask, position_ids=batch.position_ids).logits
            for index, row in enumerate(rows):
                prompt = packer.encode(prompt_text(tokenizer(), row.problem.question))
                alone = model(torch.tensor([prompt + packer.encode(row.text)])).logits[0]
                torch.testing.assert_close(logits[index, : len(alone)], alone, atol=1e-4, rtol=0)
                verdicts = logits[index][batch.labels[index] != IGNORE]
                assert len(verdicts) == len(boundaries(row.text))
                for cut, verdict in zip(boundaries(row.text), verdicts, strict=True):
                    ids = prompt + packer.encode(row.text[:cut]) + packer.suffix
                    torch.testing.assert_close(verdict, model(torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=0)

    def test_labels_and_targets(self):
        packer, rows = Packer(tokenizer()), self.rows()
        batch = packer(rows)
        for index, row in enumerate(rows):
            labels = batch.labels[index][batch.labels[index] != IGNORE].tolist()
            wanted = [prefix_is_right(row.problem, row.text[:cut]) for cut in boundaries(row.text)]
            assert labels == [packer.yes if right else packer.no for right in wanted]
            assert batch.whole[index].sum() == 1
            learned = [char for char, ok in zip(row.text, row.expected, strict=True) if ok] + [
                "<|end|>"
            ] * row.finished
            targets = batch.targets[index][batch.targets[index] != IGNORE].tolist()
            assert tokenizer().decode(targets) == "".join(learned)


class TestTraining:
    def settings(self, out, **changes):
        fast = {
            "steps": 3,
            "tokens": 300,
            "evaluate_every": 1,
            "validation": 4,
            "curriculum": 0,
            "judge_from": 1,
            "threads": 1,
            "pool": 8,
        }
        return Settings("target", str(out), **{**fast, "shape": MINUTE, **changes})

    def test_a_resumed_run_is_the_run_bit_for_bit(self, tmp_path):
        draft = tmp_path / "draft"
        Trainer(self.settings(draft, steps=1)).run()
        mixed = {"draft": str(draft), "mix_from": 1, "evaluate_every": 3}
        whole = Trainer(self.settings(tmp_path / "whole", **mixed))
        whole.run()
        # The clock that stops it is no part of what the rate depends on: the steps are the same three.
        first = Trainer(self.settings(tmp_path / "parts", **mixed))
        first.train_step()
        first.save_checkpoint()
        second = Trainer(self.settings(tmp_path / "parts", **mixed))
        assert second.step == 1
        second.run()
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(weight, second.model.state_dict()[name]), name
        fresh = Trainer(self.settings(tmp_path / "parts", resume=False, **mixed))
        assert fresh.step == 0

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_resumed_run_that_forgot_an_optimizer_would_differ(self, tmp_path, index):
        whole = Trainer(self.settings(tmp_path / "whole"))
        forgetful = Trainer(self.settings(tmp_path / "other"))
        for trainer in (whole, forgetful):
            trainer.train_step()
        forgetful.optimizers[index].state.clear()
        for trainer in (whole, forgetful):
            trainer.train_step()
        pairs = zip(whole.model.parameters(), forgetful.model.parameters(), strict=True)
        assert not all(torch.equal(one, other) for one, other in pairs)

    def test_every_weight_has_one_optimizer(self, tmp_path):
        for muon, count in ((True, 2), (False, 1)):
            trainer = Trainer(self.settings(tmp_path, muon=muon))
            held = [
                id(weight)
                for optimizer in trainer.optimizers
                for group in optimizer.param_groups
                for weight in group["params"]
            ]
            assert len(trainer.optimizers) == count
            assert sorted(held) == sorted(id(w) for part in (trainer.model, trainer.head) for w in part.parameters())

    def test_writing_is_learned_before_judging(self, tmp_path):
        rows = Rows(self.settings(tmp_path, tokens=3000, judge_from=2), tokenizer())
        assert not any(row.judged or not all(row.expected) for row in rows(1))
        assert all(row.judged for row in rows(2)) and not all(all(row.expected) for row in rows(2))

    def test_what_is_in_its_band_is_not_trained_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Trainer, "done", lambda self, result: True)
        ended = Trainer(self.settings(tmp_path)).run()
        again = Trainer(self.settings(tmp_path))
        assert again.run() == ended and again.step == 1

    def test_saves_what_loads(self, tmp_path):
        Trainer(self.settings(tmp_path, steps=1)).run()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == tokenizer().eos_token_id
        metrics = json.loads((tmp_path / "metrics.json").read_text())
        assert [entry["step"] for entry in metrics["history"]] == [1]
        assert (tmp_path / "training.png").stat().st_size > 0


def read_problems(name):
    lines = (LAB / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


class TestKept:
    @pytest.fixture(scope="class")
    @staticmethod
    def pair():
        load = AutoModelForCausalLM.from_pretrained
        return {role: load(LAB / role, dtype=torch.float32).eval() for role in ("target", "draft")}

    @pytest.fixture(scope="class")
    @staticmethod
    def packer():
        return Packer(AutoTokenizer.from_pretrained(LAB / "target"))

    def test_problems_are_disjoint_and_right(self):
        heldout, calibration = read_problems("heldout.jsonl"), read_problems("calibration.jsonl")
        assert len(heldout) >= 2000
        assert len(calibration) == 500
        prompts = [item["prompt"] for item in heldout + calibration]
        assert len(set(prompts)) == len(prompts)
        for name, items in (("heldout", heldout), ("calibration", calibration)):
            assert all(split_of(item["prompt"]) == name for item in items)
            assert all(parse_question(item["prompt"]).answer == item["answer"] for item in items)

    def test_is_small(self):
        assert sum(path.stat().st_size for role in ("target", "draft") for path in (LAB / role).iterdir()) < 30e6

    @pytest.mark.parametrize("role", ["target", "draft"])
    def test_tokenizer_is_the_one_the_code_builds(self, role):
        loaded = AutoTokenizer.from_pretrained(LAB / role)
        assert loaded.get_vocab() == tokenizer().get_vocab()
        assert loaded.chat_template == tokenizer().chat_template

    @pytest.mark.parametrize(("role", "least"), [("target", 0.8), ("draft", 0.4)])
    def test_accuracy(self, pair, packer, role, least):
        problems = [parse_question(item["prompt"]) for item in read_problems("heldout.jsonl")[:64]]
        assert right_answers(pair[role], packer, problems)["accuracy"] >= least

    def test_accuracy_is_that_of_generate(self, pair, packer):
        problems = [parse_question(item["prompt"]) for item in read_problems("heldout.jsonl")[:16]]
        texts = write_solutions(pair["draft"], packer.tokenizer, problems)
        generated = sum(text == solution(problem) for problem, (text, _) in zip(problems, texts, strict=True))
        assert right_answers(pair["draft"], packer, problems)["accuracy"] == generated / len(problems)
        assert all(finished for _, finished in texts)

    def test_judges_the_draft(self, pair, packer):
        problems = [parse_question(item["prompt"]) for item in read_problems("heldout.jsonl")[64:160]]
        rates = judge_rates(pair["target"], packer, drafted_rows(pair["draft"], packer.tokenizer, problems, 0.8, 0.5))
        for kind in ("whole", "unfinished"):
            assert rates[kind]["accuracy"] >= 0.8, kind
            assert 0 < rates[kind]["right"] < rates[kind]["count"], kind
