"""`parse` against a slow transcription of its algorithm, its two limits, and its variants that must not differ."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import EASDConfig, LosslessConfig, PARSEConfig
from hf_semspec.schemes.parse.judge import confidence, label_ids, suffix_ids
from hf_semspec.schemes.parse.prefixes import boundaries, kept_prefix, segment_ended
from tests.helpers import JUDGE, WEAK_DRAFTS, Forwards, assisted, check_identities, new_tokens, plain_rows
from tests.models import PAD, VOCAB, draft_of, prompts, row_of, tiny, tokenizer
from tests.schemes.parse.shared import SCRIPTED, Script

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]

REVISERS = {
    "alone": None,
    "lossless": LosslessConfig(num_draft_tokens=3),
    "chains": LosslessConfig(num_draft_tokens=3, num_chains=3),
    "easd": EASDConfig(
        num_draft_tokens=2, target_entropy_threshold=float("inf"), draft_entropy_threshold=float("inf")
    ),
}


def greedy(model: PreTrainedModel, ids: list[int], room: int, eos: Sequence[int] = ()) -> list[int]:
    """Greedy text behind `ids` by whole forwards, up to an EOS or `room` tokens."""
    new: list[int] = []
    with torch.no_grad():
        while len(new) < room and not (new and new[-1] in eos):
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


def slow_parse(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], room: int, config: PARSEConfig, eos: list[int]
) -> tuple[list[int], list[float], list[int]]:
    """The algorithm for one row, with whole forwards only: new tokens, verdicts and boundaries."""
    words = tokenizer()
    labels = label_ids(words, config.labels)
    part, full = (suffix_ids(words, text) for text in (config.judge_prompt, config.full_judge_prompt))
    pieces = functools.partial(map, lambda token: words.decode([token]))
    new: list[int] = []
    verdicts: list[float] = []
    places: list[int] = []
    for attempt in range(config.max_redrafts + 1):
        answer = greedy(draft, prompt + new, room - len(new), eos)
        text = answer[:-1] if answer[-1] in eos else answer
        lengths = boundaries(list(pieces(text)), config.segment_tokens) or [0]
        values = []
        for length in lengths:
            suffix = full if length == lengths[-1] else part
            with torch.no_grad():
                logits = target(torch.tensor([[*prompt, *new, *text[:length], *suffix]])).logits[0, -1]
            values.append(float(confidence(logits, *labels)))
        verdicts, places = verdicts + values, places + [len(new) + length for length in lengths]
        if values[-1] >= config.accept_threshold:
            return new + answer, verdicts, places
        index = kept_prefix(values, config.boundary, config.prefix_threshold, 0.0)
        kept = text[: lengths[index - 1]] if index else []
        new += kept
        if kept == answer:
            return new, verdicts, places
        revised: list[int] = []
        while attempt == config.max_redrafts or not segment_ended(list(pieces(revised)), config.segment_tokens):
            revised += greedy(target, prompt + new + revised, 1)
            if revised[-1] in eos or len(new) + len(revised) == room:
                return new + revised, verdicts, places
        new += revised
    raise AssertionError("the last attempt goes to the end")


@pytest.mark.parametrize("rule", ["first_fail", "longest"])
@pytest.mark.parametrize("redrafts", [0, 1, 3])
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_every_row_follows_the_algorithm(shape: str, redrafts: int, rule: str) -> None:
    kept = []
    for seed in range(2):
        target = tiny(shape, seed, attention="sdpa")
        draft, inputs = draft_of(target, "near", noise=0.2), prompts((4, 9, 6), seed=seed)
        eos = [int(plain_rows(draft, inputs, max_new_tokens=22)[0, 17])]
        fields = {
            "segment_tokens": 3,
            "accept_threshold": 0.9,
            "prefix_threshold": 0.4,
            "boundary": rule,
            "max_redrafts": redrafts,
            "revise_with": None,
        }
        call = {"max_new_tokens": 22, "eos_token_id": eos, "return_dict_in_generate": True}
        output = assisted(target, draft, inputs, "parse", **fields, **call)
        config = PARSEConfig(**{**JUDGE, **fields})
        lengths = []
        for row in range(3):
            prompt = row_of(inputs, row)["input_ids"][0].tolist()
            text, verdicts, places = slow_parse(target, draft, prompt, 22, config, eos)
            new = new_tokens(output, inputs)[row]
            assert new[: len(text)].tolist() == text
            assert new[len(text) :].eq(PAD).all()
            number = len(places)
            assert output.boundaries[row].tolist() == places + [-1] * (output.boundaries.shape[1] - number)
            assert output.verdicts[row, :number].tolist() == pytest.approx(verdicts, abs=1e-5)
            assert output.verdicts[row, number:].isnan().all()
            lengths.append(len(text))
        check_identities(output.stats, lengths)
        assert output.kept_tokens.tolist() == [row.kept for row in output.stats.rows]
        kept += [(row.kept, row.written) for row in output.stats.rows]
    assert any(0 < some < written for some, written in kept), "some answers are cut"
    assert len({some for some, _ in kept}) > 2


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("reviser", REVISERS)
@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "gpt2"])
def test_after_the_cut_the_target_goes_on_as_from_a_fresh_prefill(
    shape: str, reviser: str, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny(shape, 1, attention="sdpa")
    draft, inputs = draft_of(target, "near", noise=0.3), prompts((4, 9, 6), seed=1)
    answers = plain_rows(draft, inputs, max_new_tokens=20)
    Script(monkeypatch, [1, 0, 3], [False] * 3, single)
    output = assisted(
        target,
        draft,
        inputs,
        "parse",
        revise_with=REVISERS[reviser],
        single_pass=single,
        max_new_tokens=20,
        return_dict_in_generate=True,
        **SCRIPTED,
    )
    for row, index in enumerate([1, 0, 3]):
        kept = int(output.boundaries[row, index - 1]) if index else 0
        assert kept == output.kept_tokens[row]
        alone = row_of(inputs, row)["input_ids"]
        text = {"input_ids": torch.cat([alone, answers[row : row + 1, :kept]], dim=1)}
        text["attention_mask"] = torch.ones_like(text["input_ids"])
        expected = torch.cat([answers[row, :kept], plain_rows(target, text, max_new_tokens=20 - kept)[0]])
        assert torch.equal(new_tokens(output, inputs)[row], expected), row
        assert not torch.equal(expected, answers[row])
    check_identities(output.stats, [20] * 3)
    assert output.stats.answers == 3
    assert output.stats.full_accepts == 0


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2"])
def test_a_threshold_of_zero_returns_the_drafts_own_answers(shape: str, single: bool) -> None:
    target = tiny(shape, 2, attention="sdpa")
    draft, inputs = draft_of(target, "far"), prompts((4, 9, 6), seed=2)
    rows = plain_rows(draft, inputs, max_new_tokens=20)
    for eos in (None, [int(rows[0, 5]), int(rows[1, 0])]):
        fields = {"max_new_tokens": 20, "eos_token_id": eos}
        expected = plain_rows(draft, inputs, **fields)
        with Forwards(target) as spy:
            output = assisted(
                target,
                draft,
                inputs,
                "parse",
                accept_threshold=0.0,
                single_pass=single,
                max_redrafts=3,
                return_dict_in_generate=True,
                use_cache=False,  # the padding of a cache to return would be fed at the end
                **fields,
            )
        assert torch.equal(new_tokens(output, inputs), expected)
        assert spy.calls == output.stats.target_forwards == 1
        assert output.stats.full_accepts == output.stats.answers == 3
        assert output.stats.full_accept_rate == output.stats.kept_fraction == 1
        assert output.stats.tokens_by_target == 0
        assert output.stats.monotonicity_violations == 0 or single
        ends = expected.tolist()
        lengths = [next((t + 1 for t, x in enumerate(row) if x in (eos or [])), 20) for row in ends]
        check_identities(output.stats, lengths)
        assert output.kept_tokens.tolist() == lengths
        assert [row.emitted for row in output.stats.drafting.rows] == lengths


@pytest.mark.parametrize("redrafts", [1, 2, 3])
@pytest.mark.parametrize("reviser", REVISERS)
def test_out_of_reach_thresholds_are_plain_decoding_whatever_is_drafted_again(reviser: str, redrafts: int) -> None:
    target = tiny("gemma3", 3, attention="sdpa")
    inputs = prompts((4, 9, 6), seed=3)
    rows = plain_rows(target, inputs, max_new_tokens=24)
    for eos in (None, [int(rows[0, 9]), int(rows[2, 2])]):
        fields = {"max_new_tokens": 24, "eos_token_id": eos}
        for name in ("near", "far"):
            output = assisted(
                target,
                draft_of(target, name),
                inputs,
                "parse",
                revise_with=REVISERS[reviser],
                max_redrafts=redrafts,
                return_dict_in_generate=True,
                **fields,
            )
            assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, **fields)), (name, eos)
            assert output.stats.kept == 0
            assert output.stats.answers > 3
            check_identities(output.stats)


def test_one_pass_and_two_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes judge the prefixes of what failed only, in a second forward that reads no text again."""
    target = tiny("llama", 4, attention="sdpa")
    draft, inputs = draft_of(target, "near", noise=0.2), prompts((4, 9, 6), seed=4)
    fields = {"max_new_tokens": 20, "return_dict_in_generate": True, "revise_with": None, "prefix_threshold": 0.4}
    one = assisted(target, draft, inputs, "parse", **fields)
    fields["accept_threshold"] = float(one.verdicts[:, -1].sort().values[1]) + 1e-4  # one of three passes
    one = assisted(target, draft, inputs, "parse", **fields)
    with Forwards(target) as spy:
        two = assisted(target, draft, inputs, "parse", single_pass=False, **fields)
    assert torch.equal(one.sequences, two.sequences)
    assert torch.equal(one.boundaries, two.boundaries)
    judged = ~two.verdicts.isnan()
    assert torch.allclose(one.verdicts[judged], two.verdicts[judged], atol=1e-5)
    assert two.verdicts[:, -1].isfinite().all()
    assert judged.all(dim=1).sum() == 2
    assert one.stats.full_accepts == two.stats.full_accepts == 1
    assert two.stats.target_forwards == one.stats.target_forwards + 1
    part = len(suffix_ids(tokenizer(), JUDGE["judge_prompt"]))
    assert spy.widths[1] == part * (two.boundaries.shape[1] - 1)


def test_the_controls() -> None:
    target = tiny("llama", 5, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((4, 9), seed=5)
    call = {"max_new_tokens": 20, "return_dict_in_generate": True, "accept_threshold": 2.0, "prefix_threshold": 0.0}
    output = assisted(target, draft, inputs, "parse", boundary="cascade", **call)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))
    assert output.kept_tokens.tolist() == [0, 0]
    assert output.verdicts[:, :-1].isnan().all()
    assert output.verdicts[:, -1].isfinite().all()
    call["prefix_threshold"] = float(output.verdicts[:, -1].min())
    outputs = []
    for seed in [*range(12), 0]:
        torch.manual_seed(seed)
        outputs.append(assisted(target, draft, inputs, "parse", boundary="random", segment_tokens=2, **call))
    kept = [tuple(output.kept_tokens.tolist()) for output in outputs]
    assert torch.equal(outputs[0].sequences, outputs[-1].sequences)
    for output in outputs:
        for row in range(2):
            assert int(output.kept_tokens[row]) in {0, *output.boundaries[row].tolist()}
    first = assisted(target, draft, inputs, "parse", segment_tokens=2, **call)
    inner = [0 < int(length) < 20 for length in first.kept_tokens]
    assert not any(inner) or len(set(kept)) > 2


def test_ngrams_speed_the_draft_up_and_change_nothing() -> None:
    target = tiny("llama", 6)
    draft, inputs = draft_of(target, "near"), prompts((4, 9), seed=6)

    def cycle(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        ids = kwargs["input_ids"][:, -output.logits.shape[1] :]
        output.logits.scatter_(-1, (2 + (ids * 5 + 1) % 11).unsqueeze(-1), 60.0)
        return output

    draft.register_forward_hook(cycle, with_kwargs=True)
    for fields in ({}, {"do_sample": True}):
        call = {"max_new_tokens": 40, "accept_threshold": 0.0, "return_dict_in_generate": True, **fields}
        slow = assisted(target, draft, inputs, "parse", **call)
        fast = assisted(target, draft, inputs, "parse", draft_ngram=True, **call)
        assert torch.equal(slow.sequences, fast.sequences)
        assert slow.stats.draft_forwards == 40
        assert fast.stats.draft_forwards < 25
        assert fast.stats.drafting.accepted > 20
        assert slow.stats.drafting.drafted == 0
        check_identities(fast.stats, [40, 40])
    plain = assisted(target, draft, inputs, "parse", draft_ngram=True, max_new_tokens=40)
    assert torch.equal(new_tokens(plain, inputs), plain_rows(target, inputs, max_new_tokens=40))


def test_ngrams_leave_a_draft_that_repeats_nothing_alone() -> None:
    target = tiny("llama", 7)
    draft, inputs = draft_of(target, "far"), prompts((4, 9, 2), seed=7)
    call = {"max_new_tokens": 30, "accept_threshold": 0.0, "draft_ngram": True}
    output = assisted(target, draft, inputs, "parse", **call)
    assert torch.equal(new_tokens(output, inputs), plain_rows(draft, inputs, max_new_tokens=30))
    assert int(output.max()) < VOCAB
