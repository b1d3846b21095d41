"""The run: what every contender does to a batch, the order of turns, the record, resuming, several processes."""

import json
from collections import Counter

import pytest
import torch

from hf_semspec.evaluation import Contender, Example, Report, Task, decoding, evaluate, run, sweep
from hf_semspec.evaluation.decoding import Pair, decode, log_likelihoods, prepare, vote
from hf_semspec.evaluation.journal import Journal
from hf_semspec.evaluation.tasks import by_pattern
from tests.evaluation.shared import evaluate_module_of
from tests.models import draft_of, tiny, tokenizer

EVERY = (
    "target,draft,lossless,n4=lossless:num_chains=4,easd:penalty=1,trigger=random,trigger_rate=0.3,"
    "smc:num_particles=4,best=smc:select=best,vote=smc:vote=majority,weighted=smc:vote=weighted,"
    "parse:segment_tokens=4,revise_with={easd:penalty=1},assisted,majority:n=3,best_of:n=3"
)
ENSEMBLE = "assisted:assistant_ensemble_weight=0.7"


@pytest.fixture(scope="module")
def pair():
    # Stock's padded rows are nan under eager attention in float64.
    model = tiny(eos=1, positions=512, attention="sdpa")
    return Pair(model=model, tokenizer=tokenizer(chat=True), draft=draft_of(model, "near"))


@pytest.fixture
def task():
    """Prompts of unequal lengths; the answer is the last capital letter, and some text is sure to have one."""
    examples = tuple(Example(f"say {'x' * (3 * i)} {i}", "J") for i in range(7))
    return Task(name="letters", examples=examples, extract=by_pattern("[A-Z]"), check=str.__eq__, rule="capital")


def call(pair, task, contenders, **arguments):
    arguments = {"max_new_tokens": 12, "tokenizer": pair.tokenizer, **arguments}
    return evaluate(pair.model, pair.draft, task, contenders, **arguments)


def texts(report, name):
    return {
        (r["seed"], p): t
        for r in report.records
        if r["contender"] == name
        for p, t in zip(r["prompts"], r["texts"], strict=True)
    }


class TestDecoding:
    @pytest.mark.deprecated
    @pytest.mark.parametrize("temperature", [None, 0.7])
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_every_contender_runs(self, pair, task, batch_size, temperature):
        task = task.first(4)
        report = call(pair, task, EVERY, batch_size=batch_size, temperature=temperature)
        assert len(report.rows) == 13
        for row in report.rows:
            assert row["samples"] == 4, row["name"]
            assert row["new_tokens"] <= 4 * 12
            assert row["speed_ratio"] > 0
        for record in report.records:
            assert len(record["texts"]) == len(record["prompts"]) <= batch_size
            assert record["correct"] == [answer == "J" for answer in record["answers"]]

    @pytest.mark.deprecated
    def test_greedy_exact_contenders_write_the_targets_text(self, pair, task):
        for batch_size in (1, 3):
            exact = "draft,lossless,n4=lossless:num_chains=4,ngram=lossless:draft=ngram,assisted"
            report = call(pair, task, exact, batch_size=batch_size)
            target = texts(report, "target")
            assert texts(report, "lossless") == texts(report, "n4") == texts(report, "assisted") == target
            assert texts(report, "ngram") == target
            assert texts(report, "draft") != target
            for name in ("lossless", "assisted"):
                assert report.row(name)["difference"]["value"] == 0
                assert (
                    report.row(name)["target_forwards_per_token"] < report.row("target")["target_forwards_per_token"]
                )

    def test_the_target_writes_what_generate_writes(self, pair, task):
        report = call(pair, task, "target", batch_size=3)
        for i in range(7):
            ids = pair.tokenizer(f"user: {task.question(i)}\n", return_tensors="pt").input_ids
            new = pair.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            assert texts(report, "target")[0, i] == pair.tokenizer.decode(new, skip_special_tokens=True)

    def test_without_the_chat_template(self, pair, task):
        assert texts(call(pair, task, "target"), "target") != texts(call(pair, task, "target", chat=False), "target")
        batch = prepare(pair.model, pair.tokenizer, ["ab"], chat=False)
        assert pair.tokenizer.decode(batch.ids[0]) == "ab"

    def test_new_tokens_and_forwards_are_counted_as_they_are(self, pair, task):
        calls = []
        handle = pair.model.register_forward_hook(lambda *a: calls.append(1))
        decoded = decode(Contender("t", "target"), pair, [task.question(0)], max_new_tokens=9, temperature=None)
        handle.remove()
        assert decoded.figures["target_forwards"] == len(calls) == len(decoded.candidates[0][0])
        drafted = decode(Contender("d", "draft"), pair, [task.question(0)], max_new_tokens=9, temperature=None)
        assert drafted.figures["target_forwards"] == 0

    def test_a_text_ends_with_its_eos(self):
        batch = decoding.Batch(torch.zeros(2, 2), torch.ones(2, 2), eos=[1, 5], pad=0)
        assert batch.answers(torch.tensor([[0, 0, 7, 5, 0, 0], [0, 0, 7, 0, 8, 9]])) == [[7, 5], [7, 0, 8, 9]]

    @torch.no_grad()
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_best_of_picks_what_the_target_finds_likeliest(self, pair, task, batch_size):
        prompts = [task.question(i) for i in range(batch_size)]
        torch.manual_seed(1)
        decoded = decode(Contender("b", "best_of", {"n": 4}), pair, prompts, max_new_tokens=8, temperature=None)
        for prompt, group, chosen in zip(prompts, decoded.candidates, decoded.chosen, strict=True):
            start = prepare(pair.model, pair.tokenizer, [prompt], chat=True).ids[0].tolist()
            # Literally: one text at a time, one token after the other.
            sums = []
            for answer in group:
                total = 0.0
                for i, token in enumerate(answer):
                    logits = pair.model(input_ids=torch.tensor([start + answer[:i]])).logits[0, -1]
                    total += float(logits.log_softmax(-1)[token])
                sums.append(total)
            assert len(set(sums)) > 1
            assert chosen == sums.index(max(sums))
            row = decoded.rows[prompts.index(prompt)]
            assert row["log_likelihoods"] == pytest.approx(sums, abs=1e-4)
        assert decoded.figures["target_forwards"] == 1

    def test_likelihoods_stop_at_the_end_of_a_text(self, pair):
        batch = prepare(pair.model, pair.tokenizer, ["ab", "abcd"], chat=False)
        new = torch.tensor([[40, 1, 0, 0], [40, 41, 42, 43]])
        one = log_likelihoods(pair.model, batch, torch.cat([batch.ids, new], 1))
        new[0, 2:] = 17
        assert torch.equal(log_likelihoods(pair.model, batch, torch.cat([batch.ids, new], 1)), one)
        new[0, 0] = 41
        assert log_likelihoods(pair.model, batch, torch.cat([batch.ids, new], 1))[0] != one[0]

    def test_the_vote_over_particles_is_over_all_of_them(self, pair, task):
        report = call(pair, task, "vote=smc:vote=majority,num_particles=5", temperature=1.0)
        for record in report.records:
            for votes, answer in zip(record.get("votes", []), record["answers"], strict=False):
                assert len(votes) == 5
                assert answer == votes[vote(votes)]
        assert any(record.get("votes") for record in report.records)

    @pytest.mark.deprecated
    def test_the_drafts_settings_are_put_back(self, pair, task):
        before = pair.draft.generation_config.to_dict()
        call(pair, task.first(1), "assisted:num_draft_tokens=3")
        assert pair.draft.generation_config.to_dict() == before

    @pytest.mark.deprecated
    @pytest.mark.skipif(
        not hasattr(__import__("transformers").GenerationConfig(), "assistant_ensemble_weight"),
        reason="this transformers has no lossy rule of its own",
    )
    def test_stocks_own_lossy_rule(self, pair, task):
        report = call(pair, task, ["lossy=assisted:assistant_ensemble_weight=0.01", ENSEMBLE], batch_size=3)
        # With hardly any weight on the target the draft decides all but the bonus tokens.
        assert texts(report, "lossy") != texts(report, "target")
        forwards = [report.row(name)["target_forwards_per_token"] for name in ("lossy", ENSEMBLE)]
        assert forwards[0] <= forwards[1]

    @pytest.mark.deprecated
    def test_a_models_own_scheme_does_not_get_in_the_way(self, task):
        model = tiny(eos=1, attention="sdpa")
        model.generation_config.semspec = {"scheme": "lossless"}
        own = Pair(model=model, tokenizer=tokenizer(), draft=draft_of(model, "near"))
        assert call(own, task.first(2), "majority:n=2,lossless").row("majority:n=2")["samples"] == 2

    def test_a_foreign_draft_writes_by_its_own_tokenizer(self, pair, task):
        other = tokenizer(permute=5, chat=True)
        report = call(pair, task, "draft", draft_tokenizer=other)
        ids = other(f"user: {task.question(2)}\n", return_tensors="pt").input_ids
        new = pair.draft.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=1)
        assert texts(report, "draft")[0, 2] == other.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        exact = call(pair, task, "lossless", draft_tokenizer=other)
        assert texts(exact, "lossless") == texts(exact, "target")
        for kind in ("smc", "best_of"):
            with pytest.raises(ValueError, match=f"contender '{kind}'.*tokenizer"):
                call(pair, task, kind, draft_tokenizer=other)


class TestVote:
    @pytest.mark.parametrize(
        ("answers", "weights", "chosen"),
        [
            (["1", "2", "2"], None, 1),
            (["1", "2", "2", "1"], None, 0),
            (["3", "2", "1", "1", "2"], None, 1),
            ([None, None, "5"], None, 2),
            ([None, None], None, 0),
            (["1", "1", "2"], [0.2, 0.2, 0.6], 2),
            (["1", "2", "1"], [0.25, 0.5, 0.25], 0),
        ],
    )
    def test_most_votes_and_of_equals_the_first_to_come(self, answers, weights, chosen):
        assert vote(answers, weights) == chosen


class Spy:
    """Stands for `decode` and notes who was called, with which prompts and how many tokens."""

    def __init__(self, stop_after=None):
        self.calls = []
        self.stop_after = stop_after

    def __call__(self, contender, pair, prompts, *, max_new_tokens, temperature):
        if self.stop_after is not None and len(self.measured) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((contender.name, tuple(prompts), max_new_tokens))
        ids = [[[40 + len(prompt), 1]] for prompt in prompts]
        return decoding.Decoded(ids, [0] * len(prompts), seconds=0.5)

    @property
    def measured(self):
        return [call for call in self.calls if call[2] == 12]


class TestOrder:
    def test_turns_after_one_warm_up_each(self, pair, task, monkeypatch):
        spy = Spy()
        monkeypatch.setattr(run, "decode", spy)
        call(pair, task, "draft,lossless", batch_size=3)
        names = [name for name, _, _ in spy.calls]
        assert names == ["target", "draft", "lossless"] * 4  # warm-up, then three batches
        assert [tokens for _, _, tokens in spy.calls] == [8] * 3 + [12] * 9
        sizes = [len(prompts) for _, prompts, _ in spy.measured]
        assert sizes == [3] * 6 + [1] * 3
        assert spy.measured[0][1] == spy.measured[1][1] == tuple(task.question(i) for i in range(3))

    def test_only_what_draws_runs_for_every_seed(self, pair, task, monkeypatch):
        spy = Spy()
        monkeypatch.setattr(run, "decode", spy)
        report = call(pair, task, "lossless,smc", batch_size=7, seeds=[3, 4, 5])
        assert Counter(name for name, _, _ in spy.measured) == {"target": 1, "lossless": 1, "smc": 3}
        assert report.row("smc")["samples"] == 21
        assert report.row("smc")["difference"]["pairs"] == 21
        assert report.row("lossless")["difference"]["pairs"] == 7
        assert report.row("smc")["turns"] == 1

    def test_draws_depend_on_seed_and_batch_alone(self, pair, task):
        def sampled(contenders, **arguments):
            return texts(call(pair, task, contenders, temperature=1.0, batch_size=3, **arguments), "target")

        alone = sampled("target")
        assert sampled("lossless,smc") == alone
        assert sampled("target", seeds=[1, 0]).items() >= alone.items()
        assert sampled("target", seeds=[1]).values() != alone.values()


def test_a_sweep_gives_the_cells_of_its_grid(pair, task):
    arguments = {"tokenizer": pair.tokenizer, "max_new_tokens": 8, "limit": 2}
    table = sweep(pair.model, pair.draft, task, "easd:penalty=0|1,num_draft_tokens=2|3", **arguments)
    assert [cell["values"] for cell in table["cells"]] == [["0", "2"], ["0", "3"], ["1", "2"], ["1", "3"]]
    assert all(cell["speed_ratio"] > 0 and cell["difference"]["pairs"] == 2 for cell in table["cells"])
    assert table["target"] is not None
    with pytest.raises(ValueError, match="two grids are called 'easd'"):
        call(pair, task, "target", grids=["easd:penalty=0|1", "easd:top_n=5|10"])


class TestResuming:
    @pytest.fixture(autouse=True)
    def _no_pictures(self, monkeypatch):
        monkeypatch.setattr(Report, "plot", lambda self, path: None)

    def test_nothing_finished_is_decoded_again(self, pair, task, tmp_path, monkeypatch):
        first = Spy(stop_after=5)
        monkeypatch.setattr(run, "decode", first)
        with pytest.raises(KeyboardInterrupt):
            call(pair, task, "draft,lossless", batch_size=2, out=tmp_path / "out")
        assert len(Journal(tmp_path / "out").records()) == 5
        second = Spy()
        monkeypatch.setattr(run, "decode", second)
        report = call(pair, task, "draft,lossless", batch_size=2, out=tmp_path / "out")
        together = [call[:2] for call in first.measured + second.measured]
        assert len(together) == len(set(together)) == 12
        assert len(second.measured) == 7
        assert {row["samples"] for row in report.rows} == {7}
        # The second batch was cut in two: its speeds stand in no common turn.
        assert [row["turns"] for row in report.rows] == [4, 4, 3]
        assert len(report.meta["sessions"]) == 2

    def test_a_finished_run_is_reported_without_loading_anything(self, pair, task, tmp_path, monkeypatch):
        one = call(pair, task, "lossless", batch_size=3, out=tmp_path)
        monkeypatch.setattr(evaluate_module_of(), "load_pair", lambda *a: pytest.fail("loaded"))
        two = call(pair, task, "lossless", batch_size=3, out=tmp_path)
        assert two.rows == one.rows

    def test_half_a_line_is_dropped_and_done_again(self, pair, task, tmp_path, monkeypatch):
        call(pair, task, "lossless", batch_size=3, out=tmp_path)
        part = tmp_path / "parts" / "0.jsonl"
        content = part.read_bytes()
        part.write_bytes(content[:-40])
        assert len(Journal(tmp_path).records()) == 5
        spy = Spy()
        monkeypatch.setattr(run, "decode", spy)
        call(pair, task, "lossless", batch_size=3, out=tmp_path)
        assert [name for name, _, _ in spy.measured] == ["lossless"]
        assert all(json.loads(line) for line in part.read_text().splitlines())
        assert len(Journal(tmp_path).records()) == 6

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"max_new_tokens": 13}, "max_new_tokens was 12, is 13"),
            ({"temperature": 0.5}, "temperature was null, is 0.5"),
            ({"contenders": "easd"}, "contenders.lossless was"),
            ({"limit": 3}, "task.examples was 7, is 3"),
            ({"batch_size": 2}, "batch_size was 3, is 2"),
        ],
    )
    def test_another_command_in_the_same_folder_is_an_error(self, pair, task, tmp_path, change, message):
        arguments = {"contenders": "lossless", "batch_size": 3, "limit": None}
        call(pair, task, out=tmp_path, **arguments)
        before = (tmp_path / "parts" / "0.jsonl").read_text()
        with pytest.raises(ValueError, match=f"holds another run .*{message}"):
            call(pair, task, out=tmp_path, **{**arguments, **change})
        assert (tmp_path / "parts" / "0.jsonl").read_text() == before

    def test_a_command_that_asks_for_more_decodes_only_that(self, pair, task, tmp_path, monkeypatch):
        call(pair, task, "target,draft", batch_size=3, limit=6, out=tmp_path)
        spy = Spy()
        monkeypatch.setattr(run, "decode", spy)
        report = call(pair, task, "target,draft,lossless", batch_size=3, out=tmp_path)
        decoded = {(name, prompts[0][-1]) for name, prompts, _ in spy.measured}
        assert decoded == {
            ("lossless", "0"),
            ("lossless", "3"),
            *((name, "6") for name in ("target", "draft", "lossless")),
        }
        assert len(spy.measured) == 5
        assert {row["name"]: (row["samples"], row["turns"]) for row in report.rows} == {
            "target": (7, 3),
            "draft": (7, 3),
            "lossless": (7, 1),  # two of its batches came in another session than the target's
        }
        with pytest.raises(ValueError, match=r"another run .*contenders\.lossless was"):
            call(pair, task, "target,draft", batch_size=3, out=tmp_path)

    def test_other_problems_of_the_same_number_are_another_run(self, pair, task, tmp_path):
        from dataclasses import replace

        call(pair, task, "target", out=tmp_path)
        changed = replace(task, examples=(Example("other", "J"), *task.examples[1:]))
        with pytest.raises(ValueError, match=r"task\.sha256"):
            call(pair, changed, "target", out=tmp_path)

    def test_a_refusal_comes_before_anything_is_measured(self, task, tmp_path):
        model = tiny(eos=1)
        far = Pair(model=model, tokenizer=tokenizer(), draft=tiny(vocab=2000))
        with pytest.raises(ValueError, match="contender 'lossless': The target scores 97 ids"):
            call(far, task, "draft,lossless", out=tmp_path)
        assert not Journal(tmp_path).records()


def test_processes_that_do_not_see_each_other_are_an_error(pair, task, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, but accelerate sees 1"):
        call(pair, task, "target")
