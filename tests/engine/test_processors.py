"""Penalties, constraints, and processors that are shown, write into or return what they like."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from hf_semspec import SemSpecConfig
from hf_semspec.engine.acceptance import entropy
from tests.callbacks import ForceAt, parity
from tests.helpers import EXACT, SINGLE, WEAK_DRAFTS, assisted, check_identities, new_tokens, plain, plain_rows
from tests.models import VOCAB, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

FIELDS = {
    "penalty and n-grams": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "n-grams": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(2, 60))},
    "min_length": {"min_length": 14, "eos_token_id": list(range(2, 60))},
    "bad words": {"bad_words_ids": [[57], [91, 42], [36, 71]]},
    "sequence bias": {"sequence_bias": {(9,): 9.0, (9, 10): 9.0, (10, 11): -9.0}},
    "suppressed": {"suppress_tokens": list(range(2, 50)), "begin_suppress_tokens": list(range(50, 80))},
    "forced eos": {"forced_eos_token_id": 6, "eos_token_id": 6},
    "length decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 6},
    "invalid values": {"remove_invalid_values": True, "renormalize_logits": True},
    "encoder penalties": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("case", FIELDS)
def test_ui19_every_processor_sees_the_right_history(case: str, kind: str) -> None:
    """Batches too: the rows of a ragged batch have unequal histories."""
    if (kind, case) == ("smc", "watermark"):
        pytest.skip("a watermark comes after top-k and moves only what that has left")
    target = tiny("llama", 3, attention="sdpa")
    inputs = prompts((3, 8, 5), seed=3)
    fields = {"max_new_tokens": 16, **FIELDS[case]}
    expected = plain(target, inputs, **fields)
    assert not torch.equal(expected, plain(target, inputs, max_new_tokens=16)) or case == "invalid values"
    for name in ("same", "near", "far"):
        output = assisted(target, draft_of(target, name), inputs, kind, num_draft_tokens=4, **fields)
        assert torch.equal(output, expected), name


def test_ui19_penalties_in_sampling_leave_no_repeated_token() -> None:
    target = tiny("llama", 3)
    inputs = prompts((3, 8), seed=3)
    torch.manual_seed(0)
    for kind in EXACT:
        output = assisted(
            target, draft_of(target, "near"), inputs, kind, max_new_tokens=20, do_sample=True, no_repeat_ngram_size=1
        )
        for row in new_tokens(output, inputs).tolist():
            assert len(set(row)) == 20, kind


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_ui21_constraints_hold_in_every_row(kind: str, do_sample: bool) -> None:
    target = tiny("llama", 5, attention="sdpa")
    inputs = prompts((4, 9, 6), seed=5)
    call = {"prefix_allowed_tokens_fn": parity}
    fields = {"max_new_tokens": 15, "do_sample": do_sample}
    torch.manual_seed(0)
    for name in ("near", "far"):
        output = assisted(target, draft_of(target, name), inputs, kind, num_draft_tokens=4, call=call, **fields)
        new = new_tokens(output, inputs)
        assert new[0].remainder(2).eq(0).all()
        assert new[1].remainder(2).eq(1).all()
        before = output[2, 8:-1]
        assert (new[2] - 2).remainder(7).eq(before.remainder(7)).all()
        if not do_sample:
            assert torch.equal(output, plain(target, inputs, call=call, **fields))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_ui21_a_forced_token_is_forced(kind: str, do_sample: bool) -> None:
    target = tiny("llama", 5, attention="sdpa")
    inputs = prompts((4, 9, 6), seed=5)
    for position in (0, 1, 6, 14):
        call = {"logits_processor": LogitsProcessorList([ForceAt(9 + position, 7)])}
        fields = {"max_new_tokens": 15, "do_sample": do_sample}
        torch.manual_seed(0)
        output = assisted(target, draft_of(target, "near"), inputs, kind, num_draft_tokens=4, call=call, **fields)
        assert new_tokens(output, inputs)[:, position].eq(7).all()
        if not do_sample:
            assert torch.equal(output, plain(target, inputs, call=call, **fields))


class Observer(LogitsProcessor):
    """Checks the layout it is shown, and keeps the histories of its own instance (drafts call deep copies)."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self.prompts = prompts
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, width = self.prompts.shape
        assert input_ids.shape[0] == rows
        assert scores.shape == (rows, VOCAB)
        assert torch.equal(input_ids[:, :width], self.prompts)
        self.seen.append(input_ids.tolist())
        return scores


@pytest.mark.parametrize("kind", EXACT)
def test_processors_see_rows_in_the_callers_order_and_number(kind: str) -> None:
    target = tiny("llama", 5)
    inputs = prompts((4, 9, 6), seed=5)
    observer = Observer(inputs["input_ids"])
    call = {"logits_processor": LogitsProcessorList([observer])}
    output = assisted(target, draft_of(target, "near"), inputs, kind, call=call, max_new_tokens=15)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=15))
    assert {len(ids[0]) for ids in observer.seen} >= set(range(9, 9 + 15))


def test_a_processor_is_shown_every_history_that_plain_decoding_shows() -> None:
    target = tiny("llama", 6)
    inputs = prompts((4,), seed=6)
    seen = []
    for run in (plain, assisted):
        observer = Observer(inputs["input_ids"])
        models = (target,) if run is plain else (target, draft_of(target, "near"))
        run(*models, inputs, call={"logits_processor": LogitsProcessorList([observer])}, max_new_tokens=12)
        seen.append(observer.seen)
    assert [ids for ids in seen[0] if ids not in seen[1]] == []


def test_ui22_entropy_of_a_law_with_one_token_left_is_zero() -> None:
    law = torch.full((2, VOCAB), -torch.inf, dtype=torch.float64)
    law[:, 5] = 0.0
    assert entropy(law).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 1e-9}, {"suppress_tokens": [i for i in range(VOCAB) if i != 5]}]
)
def test_ui22_easd_with_one_token_left_is_finite(fields: dict[str, Any]) -> None:
    target = tiny("llama", 0)
    inputs = prompts((4, 6))
    config = SemSpecConfig(
        "easd",
        num_draft_tokens=3,
        target_entropy_threshold=0.0,
        draft_entropy_threshold=0.0,
        overlap_threshold=0.0,
        max_new_tokens=12,
        do_sample=True,
        return_dict_in_generate=True,
        **fields,
    )
    output = target.generate(**inputs, assistant_model=draft_of(target, "near"), generation_config=config)
    check_identities(output.stats, [12, 12])
    assert output.stats.triggered == 0, "a law with one token is certain, and there is nothing else to commit"
    assert output.stats.mean_target_entropy == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize("do_sample", [False, True])
def test_ui22_nan_from_the_draft_is_reported_by_name(kind: str, do_sample: bool) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((4, 6))

    def spoil(module: Any, args: Any, output: Any) -> Any:
        output.logits[-1] = torch.nan
        return output

    handle = draft.register_forward_hook(spoil)
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)draft.*nan|nan.*draft"):
        assisted(target, draft, inputs, kind, max_new_tokens=12, do_sample=do_sample)
    handle.remove()
    assert torch.equal(
        new_tokens(assisted(target, draft, inputs, kind, max_new_tokens=12), inputs),
        plain_rows(target, inputs, max_new_tokens=12),
    )


class _Cast(LogitsProcessor):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(self.dtype)


@pytest.mark.parametrize("kind", EXACT)
def test_processors_may_return_another_dtype(kind: str) -> None:
    target = tiny("llama")
    draft, inputs = draft_of(target, "near"), prompts((5, 3, 7))
    call = {"logits_processor": LogitsProcessorList([_Cast(torch.float64)])}
    output = assisted(target, draft, inputs, kind, call=call, max_new_tokens=16)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=16))


class Careless(LogitsProcessor):
    """Writes into the scores it is given and reshapes both arguments in place, as plain decoding lets it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.view(-1).shape[0] == input_ids.numel()
        scores.view(-1)[::7] -= 1.0
        scores[:, 5] = -torch.inf
        return scores


class KeepsLast(StoppingCriteria):
    """Ends a row when two tokens in a row are congruent modulo 5, from a tensor it kept of the call before."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids.view(-1)
        kept, self.before = self.before, input_ids
        if kept is None or kept.shape[1] != input_ids.shape[1] - 1:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return (kept[:, -1] % 5 == input_ids[:, -1] % 5) & (input_ids[:, -1] != kept[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", EXACT)
def test_callables_may_write_into_scores_and_keep_what_they_saw(kind: str, dtype: torch.dtype) -> None:
    target = tiny("llama", 4, attention="sdpa", dtype=dtype)
    draft = draft_of(target, "near")
    for lengths in ((6,), (3, 7)):
        inputs = prompts(lengths, seed=4)
        call = {"logits_processor": LogitsProcessorList([Careless()])}
        expected = plain(target, inputs, call=call, max_new_tokens=18)
        assert torch.equal(assisted(target, draft, inputs, kind, call=call, max_new_tokens=18), expected)
    inputs = prompts((6,), seed=4)
    outputs = []
    for run in (plain, assisted):
        models = (target,) if run is plain else (target, draft)
        call = {"stopping_criteria": StoppingCriteriaList([KeepsLast()])}
        outputs.append(run(*models, inputs, call=call, max_new_tokens=40))
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] < 46
