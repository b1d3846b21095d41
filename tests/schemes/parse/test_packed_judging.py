"""One packed pass of the target judges many prefixes: every copy of the question equals a prompt of its own."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_semspec import SemSpecConfig, load_draft
from hf_semspec.engine.masks import packed_slots
from hf_semspec.engine.model import CachedModel
from hf_semspec.schemes.parse import judge as judging
from hf_semspec.schemes.parse.judge import confidence, label_ids, suffix_ids
from hf_semspec.tools.models import load_smollm2
from tests.helpers import JUDGE, VERSION, WEAK_DRAFTS, Forwards, Inputs, assisted, plain_rows
from tests.models import PAD, VOCAB, draft_of, prompts, row_of, tiny, tokenizer
from tests.questions import questions

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


class Pass:
    """Keeps the logits that every verdict came from: (rows, copies, vocabulary)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logits: list[torch.Tensor] = []
        patch.setattr(judging, "confidence", self)

    def __call__(self, logits: torch.Tensor, *labels: Sequence[int]) -> torch.Tensor:
        self.logits.append(logits)
        return confidence(logits, *labels)


def apart(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The logits behind a prompt of its own, fed plainly."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def check_verdicts(
    target: PreTrainedModel,
    words: PreTrainedTokenizerBase,
    inputs: Inputs,
    answers: Sequence[list[int]],
    output: Any,
    seen: Sequence[torch.Tensor],
    tolerance: float,
    config: SemSpecConfig,
) -> None:
    """`seen` is (rows, 1 + copies, vocabulary), the whole answer's copy first; every entry equals its own prompt's."""
    asked = (config.judge_prompt, config.full_judge_prompt)
    asked = (text.replace("{correct}", config.labels[0]).replace("{incorrect}", config.labels[1]) for text in asked)
    part, full = (suffix_ids(words, text) for text in asked)
    labels = label_ids(words, config.labels)
    for row, answer in enumerate(answers):
        prompt = row_of(inputs, row)["input_ids"][0].tolist()
        lengths = [length for length in output.boundaries[row].tolist() if length >= 0]
        assert lengths[-1] == len(answer)
        assert output.boundaries[row, len(lengths) :].eq(-1).all()
        assert output.verdicts[row, len(lengths) :].isnan().all()
        for i, length in enumerate(lengths):
            last = length == len(answer)
            wanted = apart(target, [*prompt, *answer[:length], *(full if last else part)])
            got = seen[row][0 if last else 1 + i]
            assert torch.allclose(got, wanted, atol=tolerance, rtol=tolerance), (row, length)
            assert output.verdicts[row, i] == pytest.approx(float(confidence(wanted, *labels)), abs=tolerance)


@pytest.mark.parametrize("lengths", [(5,), (3, 12, 7)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ui40_a_packed_verdict_equals_a_prompt_of_its_own(
    dtype: torch.dtype, shape: str, attention: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of eight are crossed before the copies and inside them; rows end apart, so they have unequal numbers of
    prefixes; the padding is the EOS."""
    target = tiny(shape, 2, attention=attention, dtype=dtype, eos=PAD)
    draft = draft_of(target, "near")
    inputs = prompts(lengths, seed=3)
    rows = plain_rows(draft, inputs, max_new_tokens=18)
    ends = [int(row[4 + 6 * i]) for i, row in enumerate(rows)] if len(lengths) > 1 else []
    answers = []
    for row in rows.tolist():
        end = next((t for t, token in enumerate(row) if token in ends), None)
        answers.append(row[:end])  # a closing EOS is not judged
    seen = Pass(monkeypatch)
    fields = {"eos_token_id": ends or None, "max_new_tokens": 18, "return_dict_in_generate": True}
    with Forwards(target) as spy:
        output = assisted(target, draft, inputs, "parse", revise_with=None, **fields)
    assert len(seen.logits) == 1
    assert spy.widths[0] > max(lengths) + max(map(len, answers)), "text and copies in one forward"
    assert spy.shapes[1] == (len(lengths), 1)
    assert len(lengths) == 1 or len(set(map(len, answers))) > 1
    tolerance = 1e-5 if dtype == torch.float64 else 1e-3 if shape == "gemma3" else 1e-4
    config = SemSpecConfig("parse", **JUDGE)
    check_verdicts(target, tokenizer(), inputs, answers, output, seen.logits[0], tolerance, config)


@pytest.mark.parametrize("tokens", [1, 7, 16, 40])
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_many_small_forwards_give_the_verdicts_of_a_large_one(shape: str, tokens: int) -> None:
    target = tiny(shape, 2, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((3, 12, 7), seed=3)
    fields = {"max_new_tokens": 18, "return_dict_in_generate": True, "output_logits": True, "accept_threshold": 0.0}
    fields["use_cache"] = False  # the padding of a cache to return would be fed at the end
    whole = assisted(target, draft, inputs, "parse", **fields)
    parts = assisted(target, draft, inputs, "parse", max_packed_tokens=tokens, **fields)
    assert torch.allclose(parts.verdicts, whole.verdicts, atol=1e-5, equal_nan=True)
    assert torch.equal(parts.boundaries, whole.boundaries)
    assert torch.equal(parts.sequences, whole.sequences)
    assert torch.allclose(torch.stack(parts.logits), torch.stack(whole.logits), atol=1e-4)
    assert whole.stats.target_forwards == 1
    step = max(tokens // 3, 1)
    assert parts.stats.target_forwards == -(-parts.stats.target_tokens // (3 * step))


@functools.cache
def judge_model(shape: str) -> PreTrainedModel:
    return tiny(shape, 7, attention="eager" if shape == "llama" else "sdpa")


def packed(model: PreTrainedModel, ids: list[list[int]], copies: list[list[int]], suffix: list[int]) -> torch.Tensor:
    """Logits (rows, copies, vocabulary) behind each copy; `ids` are equally long texts, `suffix` all copies' ids."""
    number = len(copies[0])
    size = len(suffix) // number
    length = len(ids[0])
    decoder = CachedModel(model, len(ids), 10_000)
    slots = packed_slots([0] * len(ids), [length] * len(ids), copies, [size] * number)
    places = [length + size * (i + 1) - 1 for i in range(number)]
    return decoder.feed_packed(torch.tensor([row + suffix for row in ids]), slots, places)


@st.composite
def perturbations(draw: st.DrawFn) -> dict[str, Any]:
    length, number, size = draw(st.integers(4, 20)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    token = st.integers(2, VOCAB - 1)
    return {
        "shape": draw(st.sampled_from(["llama", "mistral", "gemma3", "gpt2"])),
        "text": draw(st.lists(token, min_size=length, max_size=length)),
        "suffix": draw(st.lists(token, min_size=number * size, max_size=number * size)),
        "prefixes": draw(st.lists(st.integers(1, length), min_size=number, max_size=number)),
        "copy": draw(st.integers(0, number - 1)),
        "at": draw(st.integers(0, length - 1)),
        "other": draw(st.integers(0, number * size - 1)),
        "by": draw(st.integers(1, VOCAB - 3)),
    }


def changed(ids: list[int], at: int, by: int) -> list[int]:
    return [*ids[:at], 2 + (ids[at] - 2 + by) % (VOCAB - 2), *ids[at + 1 :]]


@settings(max_examples=40)
@given(perturbations())
def test_a_copy_feels_its_own_prefix_and_question_only(case: dict[str, Any]) -> None:
    model, copy, copies = judge_model(case["shape"]), case["copy"], [case["prefixes"]]
    before = packed(model, [case["text"]], copies, case["suffix"])[0, copy]
    at, other, size = case["at"], case["other"], len(case["suffix"]) // len(case["prefixes"])
    text = packed(model, [changed(case["text"], at, case["by"])], copies, case["suffix"])[0, copy]
    suffix = packed(model, [case["text"]], copies, changed(case["suffix"], other, case["by"]))[0, copy]
    behind = at >= case["prefixes"][copy]
    assert not behind or torch.allclose(text, before, atol=1e-9)
    assert torch.allclose(suffix, before, atol=1e-9) == (other // size != copy)
    near = case["prefixes"][copy] + size - 1 - at < 8  # inside every window
    assert behind or not near or not torch.allclose(text, before, atol=1e-9), "and its own it does feel"


@settings(max_examples=15)
@given(perturbations())
def test_a_copy_equals_its_own_prompt_whatever_stands_beside_it(case: dict[str, Any]) -> None:
    model, copy = judge_model(case["shape"]), case["copy"]
    size = len(case["suffix"]) // len(case["prefixes"])
    got = packed(model, [case["text"]], [case["prefixes"]], case["suffix"])[0, copy]
    own = case["suffix"][copy * size : (copy + 1) * size]
    wanted = apart(model, [*case["text"][: case["prefixes"][copy]], *own])
    assert torch.allclose(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(Version("5") > VERSION, reason="cannot read a tokenizer's folder that transformers 5 has written")
def test_smollm2_judges_real_answers_packed_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, words = load_smollm2()
    draft = load_draft(target, dtype=torch.bfloat16)
    inputs = words(questions(words)[:2], return_tensors="pt", padding=True, padding_side="left")
    config = SemSpecConfig("parse", segment_tokens=6, accept_threshold=0.0, max_new_tokens=20, do_sample=False)
    config.return_dict_in_generate = True
    config.use_cache = False
    seen = Pass(monkeypatch)
    output = target.generate(**inputs, assistant_model=draft, generation_config=config, tokenizer=words)
    width = inputs["input_ids"].shape[1]
    answers = [[token for token in row if token != words.pad_token_id] for row in output.sequences[:, width:].tolist()]
    assert output.stats.target_forwards == 1
    assert output.stats.full_accepts == 2
    check_verdicts(target, words, dict(inputs), answers, output, seen.logits[0], 1e-3, config)
