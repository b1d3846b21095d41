"""parse and semantic over a server decide as in process, whatever the server does on the way."""

import asyncio
import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import EASDConfig, PARSEConfig, SemanticConfig, SemSpecConfig
from hf_semspec.cli import command as cli
from hf_semspec.servers import OpenAIServer, ServerError, client, parse, semantic
from hf_semspec.servers.verdicts import bounds, judged
from tests.servers.small_server import SmallServer

LAB = Path(__file__).parents[2] / "examples" / "arithmetic_lab"
QUESTIONS = [json.loads(line)["prompt"] for line in (LAB / "heldout.jsonl").read_text().splitlines()[:4]]
PARSE = {"judge_prompt": "?", "full_judge_prompt": "?", "labels": ("Y", "N"), "segment_tokens": 6}
FAULTS = ["slow", 429, 500, "drop", "wrong", "other", "truncate"]


@pytest.fixture(scope="module")
def pair():
    models = {
        name: AutoModelForCausalLM.from_pretrained(LAB / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    }
    return models, AutoTokenizer.from_pretrained(LAB / "target")


@pytest.fixture
def small(pair):
    server = SmallServer(*pair)
    yield server
    server.close()


def servers(small, **options):
    options = {"backoff": 0.01, "timeout": 10, "tokenizer": small.tokenizer, **options}
    return {name: OpenAIServer(small.url, name, **options) for name in ("target", "draft")}


def in_process(pair, config, question, tokens=48):
    models, tokenizer = pair
    settings = SemSpecConfig(config, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True)
    turns = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = models["target"].generate(
        ids["input_ids"], generation_config=settings, assistant_model=models["draft"], tokenizer=tokenizer
    )
    return output, output.sequences[0, ids["input_ids"].shape[1] :].tolist()


def parsed(small, config, prompts=QUESTIONS, tokens=48, **options):
    return asyncio.run(parse(prompts, config=config, max_new_tokens=tokens, **servers(small, **options)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"single_pass": False},
        {"boundary": "longest", "max_redrafts": 2, "revise_with": None},
        {"accept_threshold": 1.1},
    ],
    ids=["default", "two_passes", "longest_redrafted", "none_accepted"],
)
def test_parse_is_what_it_is_in_process(pair, small, change):
    config = PARSEConfig(**PARSE, **change)
    kept = 0
    for served, question in zip(parsed(small, config), QUESTIONS, strict=True):
        assert served.error is None
        output, ids = in_process(pair, config, question)
        assert served.ids == ids
        assert served.boundaries == [n for n in output.boundaries[0].tolist() if n >= 0]
        expected = output.verdicts[0].tolist()[: len(served.verdicts)]
        assert served.verdicts == pytest.approx(expected, abs=1e-5, nan_ok=True)
        assert served.kept_tokens == output.kept_tokens[0] == served.stats.kept
        assert served.stats.written == output.stats.rows[0].written
        assert served.draft.requests >= 1 and served.target.requests >= 1
        assert served.target.cached_tokens == 2 * served.target.requests
        kept += served.kept_tokens
    assert kept


@pytest.mark.parametrize(
    "change",
    [
        {"scorer": "likelihood", "accept_ratio": 0.97},
        {"scorer": "none", "top_k_accept": 1},
        {"scorer": "likelihood", "top_k_accept": 2, "first_segment": "draft", "bonus": False, "salvage": False},
        {"scorer": "likelihood", "accept_floor": 0.9, "accept_ratio": 1.0, "max_segment_tokens": 5},
        {"scorer": "likelihood", "think_end": "#", "max_finish_tokens": 2},
    ],
    ids=["likelihood", "top_k", "both", "few_stand", "thought"],
)
def test_semantic_is_what_it_is_in_process(pair, small, change):
    config = SemanticConfig(segment_stop="\n", **change)
    results = asyncio.run(semantic(QUESTIONS, config=config, max_new_tokens=48, **servers(small)))
    for served, question in zip(results, QUESTIONS, strict=True):
        assert served.error is None
        output, ids = in_process(pair, config, question)
        assert served.ids == ids
        shown = [(s.start, s.end, s.source, s.rule) for s in served.segments]
        assert shown == [(s.start, s.end, s.source, s.rule) for s in output.segments[0]]
        for one, other in zip(served.segments, output.segments[0], strict=True):
            found, wanted = ((s.target_score, s.draft_score) for s in (one, other))
            assert found == pytest.approx(wanted, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_got_over(small, fault):
    config = PARSEConfig(**PARSE)
    right = parsed(small, config, QUESTIONS[:3])
    ends = servers(small, **({"timeout": 0.3} if fault == "slow" else {}))
    small.faults[:] = [fault] * 4
    found = asyncio.run(parse(QUESTIONS[:3], config=config, max_new_tokens=48, **ends))
    assert not small.faults
    assert [one.ids for one in found] == [one.ids for one in right]
    assert [one.error for one in found] == [None] * 3


def test_an_error_names_its_request_and_loses_no_other(small):
    config = PARSEConfig(**PARSE)
    long = [5] * 500
    found = parsed(small, config, [QUESTIONS[0], long, QUESTIONS[1]])
    assert [one.error is None for one in found] == [True, False, True]
    assert "the draft's answer to prompt 1" in found[1].error
    assert "status 400" in found[1].error and not found[1].transient
    ends = servers(small, retries=1)
    small.faults[:] = [500] * 2
    found = asyncio.run(parse(QUESTIONS[:1], config=config, **ends))
    assert "failed 2 times" in found[0].error and found[0].transient


def test_requests_under_way_are_limited_and_cancelled(small):
    config = PARSEConfig(**PARSE)
    parsed(small, config, concurrency=2)
    assert 1 < small.peak <= 4  # two of either model's
    ends = servers(small)
    small.faults[:] = ["slow"] * 4

    async def cancelled():
        task = asyncio.ensure_future(parse(QUESTIONS, config=config, **ends))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(small.asked)

    before = asyncio.run(cancelled())
    time.sleep(1)
    assert len(small.asked) <= before + len(QUESTIONS)


def test_a_server_that_comes_back_loses_nothing(pair):
    config = PARSEConfig(**PARSE)
    small = SmallServer(*pair)
    right = parsed(small, config)
    ends = servers(small, backoff=0.1)
    small.asked.clear()
    again = []

    def restart():
        while len(small.asked) < 2:
            time.sleep(0.001)
        small.close()
        time.sleep(0.3)
        again.append(SmallServer(*pair, port=small.port))

    thread = threading.Thread(target=restart)
    thread.start()
    found = asyncio.run(parse(QUESTIONS, config=config, max_new_tokens=48, **ends))
    thread.join()
    again[0].close()
    assert again[0].asked
    assert [one.ids for one in found] == [one.ids for one in right]


def test_a_file_over_servers_goes_on_after_they_died(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.0)
    small = SmallServer(*pair)
    source = tmp_path / "in"
    source.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS) + "broken\n")
    line = ["parse", "--target", small.url, "--draft", small.url, "--target-model", "target", "--draft-model", "draft"]
    line += ["--tokenizer", str(LAB / "target"), "--input", str(source), "--max-new-tokens", "48", "--batch-size", "2"]
    for name, value in PARSE.items():
        line += ["--set", f"{name}={json.dumps(value)}"]
    assert cli.main([*line, "--output", str(tmp_path / "whole")]) == 1
    small.asked.clear()
    small.faults[:] = [None] * 12 + [500] * 500
    assert cli.main([*line, "--output", str(tmp_path / "out")]) == 2
    assert "repeat the command" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    small.faults.clear()
    asked = len(small.asked)
    assert cli.main([*line, "--output", str(tmp_path / "out")]) == 1
    small.close()
    texts = [(tmp_path / name).read_text() for name in ("out", "whole")]
    assert texts[0] == texts[1]
    records = [json.loads(text) for text in texts[0].splitlines()]
    assert [record["line"] for record in records] == list(range(5))
    assert ["error" in record for record in records] == [False] * 4 + [True]
    assert asked


def test_what_a_server_lacks_is_said_at_construction(pair):
    small = SmallServer(*pair, prompts=False)
    with pytest.raises(ServerError, match="gives no log-probabilities of prompts"):
        servers(small)
    with pytest.raises(ServerError, match="status 404"):
        OpenAIServer(small.url, "other", tokenizer=small.tokenizer)
    small.close()
    with pytest.raises(ServerError, match="the probe of"):
        servers(small)


@pytest.mark.parametrize(
    ("config", "temperature", "message"),
    [
        (SemanticConfig(scorer="random"), 0, "scorer='random'"),
        (SemanticConfig(scorer="likelihood", revise_with=EASDConfig(target_entropy_threshold=1.0)), 0, "EASDConfig"),
        (SemanticConfig(scorer="likelihood"), 0.5, "temperature 0.5"),
    ],
)
def test_what_servers_cannot_follow_is_refused(small, config, temperature, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(semantic(QUESTIONS, config=config, temperature=temperature, **servers(small)))


class TestVerdicts:
    LAW = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log().tolist()

    def test_bounds_hold_the_truth(self):
        for labels in ([0], [3]), ([3], [0]), ([1], [2, 4]), ([4], [3]):
            truth = sum(math.exp(self.LAW[i]) for i in labels[0])
            truth /= truth + sum(math.exp(self.LAW[i]) for i in labels[1])
            for number in range(1, 6):
                low, high = bounds(dict(enumerate(self.LAW[:number])), labels)
                assert math.isnan(low) or low - 1e-6 <= truth <= high + 1e-6
        assert low == pytest.approx(high)

    @pytest.mark.parametrize(("threshold", "asked"), [(0.5, 0), (0.95, 1)])
    def test_an_open_verdict_is_asked_by_the_prompt(self, pair, threshold, asked):
        """With few log-probabilities the rare label is bounded, and asked for only if the verdict depends on it."""
        small = SmallServer(*pair, most=2)
        target = servers(small)["target"]
        law = dict(enumerate(self.LAW))
        small.complete = lambda body: (200, self.reply(body, law))

        async def ask():
            async with target.connect() as p:
                return await judged(p, "a verdict", usage(), [1, 2], ([0], [3]), threshold)

        found = asyncio.run(ask())
        small.close()
        assert (found >= threshold) == (threshold <= 0.5 / 0.56)
        assert sum("prompt_logprobs" in body for body in small.asked[2:]) == asked

    @staticmethod
    def reply(body, law):
        tops = [{f"token_id:{i}": law[i] for i in list(law)[:2]}]
        found = {"tokens": ["token_id:0"], "token_logprobs": [law[0]], "top_logprobs": tops}
        choice = {"logprobs": found, "finish_reason": "length", "text": ""}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": law.get(i, -9)}} for i in body["prompt"][1:])]
        return {"choices": [choice], "usage": {}}


def usage():
    from hf_semspec.servers import Usage

    return Usage()
