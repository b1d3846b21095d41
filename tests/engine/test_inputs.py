"""Ids, masks and embeddings as a caller may pass them."""

from typing import Any

import pytest
import torch

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, WEAK_DRAFTS, assisted, exact, plain, refuses
from tests.models import draft_of, prompts, tiny

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


@pytest.mark.parametrize("shape", [(1, 2), (2, 3)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(shape, dtype=torch.long),
    }
    inputs["attention_mask"][-1, 0] = 0  # newer transformers drop a mask of ones before we see it
    config = exact("lossless", max_new_tokens=4)
    refuses(tiny("llama"), tiny("llama", 1), inputs, "attention_mask has shape", generation_config=config)


def test_ids_of_32_bits_give_ids_of_64() -> None:
    target = tiny("llama")
    output = assisted(target, target, {"input_ids": torch.tensor([[5, 6, 7]], dtype=torch.int32)}, max_new_tokens=4)
    assert output.dtype == torch.int64


@pytest.mark.parametrize("kind", EXACT)
def test_one_token_prompt_and_no_input_at_all(kind: str) -> None:
    target = tiny("llama", 2)
    target.generation_config.bos_token_id = 3
    draft = draft_of(target, "near")
    assert torch.equal(
        assisted(target, draft, prompts((1,)), kind, max_new_tokens=9), plain(target, prompts((1,)), max_new_tokens=9)
    )
    assert torch.equal(assisted(target, draft, {}, kind, max_new_tokens=9), plain(target, {}, max_new_tokens=9))


@pytest.mark.parametrize("kind", EXACT)
def test_a_mask_with_holes_is_honoured(kind: str) -> None:
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((9, 7), seed=4)
    inputs["attention_mask"][0, 3:5] = 0
    inputs["attention_mask"][1, 6] = 0
    output = assisted(target, draft_of(target, "near"), inputs, kind, max_new_tokens=14)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=14))


def test_ids_may_be_positional_and_are_not_changed() -> None:
    target = tiny("llama", 4)
    draft = draft_of(target, "near")
    ids = prompts((6,), seed=4)["input_ids"]
    before = ids.clone()
    output = target.generate(ids, assistant_model=draft, generation_config=exact("lossless", max_new_tokens=9))
    assert torch.equal(output, plain(target, {"input_ids": ids}, max_new_tokens=9))
    assert torch.equal(ids, before)
    output[:] = 0
    assert torch.equal(ids, before)


def test_ui56_inputs_embeds_are_refused_by_name() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    with torch.no_grad():
        embeds = target.get_input_embeddings()(prompts((4,))["input_ids"])
    mask = torch.ones(1, 4, dtype=torch.long)
    for inputs in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "attention_mask": mask}):
        refuses(target, draft_of(target, "near"), inputs, "inputs_embeds", generation_config=config)
