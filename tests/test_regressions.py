"""Faults that a review by use turned up, each with its neighbours."""

from typing import Any

import pytest
import torch
from transformers import AutoModel, LogitsProcessor, LogitsProcessorList

from tests.helpers import CACHE, EXACT, WEAK_DRAFTS, assisted, cache_of, exact, new_tokens, plain_rows, refuses
from tests.models import PAD, draft_of, prompts, row_of, tiny

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "qwen3"])
@pytest.mark.parametrize("kind", EXACT)
def test_rows_that_ended_apart_go_on_from_a_cache_past_the_window(shape: str, kind: str) -> None:
    """A sliding layer keeps its last columns, padding included: what is missing there is read anew."""
    target = tiny(shape, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((5, 3, 7))
    rows = plain_rows(target, inputs, max_new_tokens=16)
    fields = {"eos_token_id": [int(rows[0, 2]), int(rows[2, 9])], "pad_token_id": PAD}
    first = assisted(target, draft, inputs, kind, max_new_tokens=16, return_dict_in_generate=True, **fields)
    new = new_tokens(first, inputs)
    assert len({int((row != PAD).sum()) for row in new}) > 1
    ids = torch.cat([first.sequences, torch.full((3, 2), 30)], dim=1)
    mask = torch.cat([inputs["attention_mask"], (new != PAD).long(), torch.ones(3, 2, dtype=torch.long)], dim=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    output = assisted(target, draft, turn, kind, call={CACHE: cache_of(first)}, max_new_tokens=8)
    assert torch.equal(new_tokens(output, turn), plain_rows(target, turn, max_new_tokens=8))


def test_new_ids_alone_beside_a_sliding_cache_that_lacks_tokens_are_refused() -> None:
    target = tiny("mistral", attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((5, 3, 7))
    fields = {"eos_token_id": [20, 21, 22, 23], "pad_token_id": PAD}
    first = assisted(target, draft, inputs, max_new_tokens=16, return_dict_in_generate=True, **fields)
    held = cache_of(first).get_seq_length()
    mask = torch.cat([inputs["attention_mask"], (new_tokens(first, inputs) != PAD).long()], dim=1)
    mask = torch.cat([mask[:, :held], torch.ones(3, 2, dtype=torch.long)], dim=1)
    turn = {"input_ids": torch.full((3, 2), 30), "attention_mask": mask}
    with pytest.raises(ValueError, match="sliding layers lack tokens"):
        assisted(target, draft, turn, call={CACHE: cache_of(first)}, max_new_tokens=8)


@pytest.mark.parametrize("shape", [(1, 2), (2, 3)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(shape, dtype=torch.long),
    }
    inputs["attention_mask"][-1, 0] = 0  # newer transformers drop a mask of ones before we see it
    config = exact("lossless", max_new_tokens=4)
    refuses(tiny("llama"), tiny("llama", 1), inputs, "attention_mask has shape", generation_config=config)


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


def test_a_draft_without_a_head_is_refused() -> None:
    target = tiny("llama")
    body = AutoModel.from_config(target.config)
    config = exact("lossless", max_new_tokens=4)
    refuses(target, body, row_of(prompts((5,)), 0), "no language modeling head", generation_config=config)


@pytest.mark.parametrize("draft", ["a name", ["a list"], object()], ids=["name", "list", "object"])
def test_what_is_no_model_is_named(draft: Any) -> None:
    with pytest.raises(ValueError, match=f"the draft model {type(draft).__name__} is no model"):
        assisted(tiny("llama"), draft, prompts((5,)), max_new_tokens=4)


def test_more_chains_than_ids_are_refused() -> None:
    target = tiny("llama", vocab=16)
    config = exact("lossless", num_chains=17, max_new_tokens=4)
    refuses(target, target, prompts((5,), vocab=16), "num_chains=17", generation_config=config)


def test_ids_of_32_bits_give_ids_of_64() -> None:
    target = tiny("llama")
    output = assisted(target, target, {"input_ids": torch.tensor([[5, 6, 7]], dtype=torch.int32)}, max_new_tokens=4)
    assert output.dtype == torch.int64
