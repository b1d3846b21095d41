"""Ids, masks and embeddings as a caller may pass them."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, VERSION, WEAK_DRAFTS, assisted, exact, new_tokens, plain, plain_rows, refuses
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


@pytest.mark.parametrize("kind", EXACT)
def test_b07_what_plain_decoding_drops_is_dropped(kind: str) -> None:
    """`Seq2SeqTrainer` passes its whole batch."""
    target, inputs = tiny("llama", 4), prompts((6,), seed=4)
    batch = {**inputs, "labels": inputs["input_ids"]}
    draft = draft_of(target, "near")
    expected = plain(target, batch, max_new_tokens=9)
    assert torch.equal(assisted(target, draft, batch, kind, max_new_tokens=9), expected)
    if "output_router_logits" in getattr(TransformersKwargs, "__optional_keys__", ()):
        batch["output_router_logits"] = False
        assert torch.equal(assisted(target, draft, batch, kind, max_new_tokens=9), expected)


def qwen_vl(version: str, layers: int = 2) -> PreTrainedModel:
    """A tiny Qwen2-VL, 2.5-VL or 3-VL; its text positions have three dimensions."""
    name = f"Qwen{version}VL" if version != "2.5" else "Qwen2_5_VL"
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text["rope_parameters" if Version("5") <= VERSION else "rope_scaling"] = rope
    text |= {"head_dim": 8} if version == "3" else {}
    sight = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    sight |= {"deepstack_visual_indexes": [0]} if version == "3" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=sight,
        vision_start_token_id=91,
        image_token_id=92,
        video_token_id=93,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).double().eval()


@pytest.mark.parametrize("version", ["2", "2.5", "3"])
@pytest.mark.parametrize("kind", EXACT)
def test_b11_text_for_a_model_with_positions_in_three_dimensions(kind: str, version: str) -> None:
    """`generate` makes such positions by itself; a processor may add token types, which are 0 for text."""
    target, inputs = qwen_vl(version), prompts((7, 4), vocab=90)
    draft = draft_of(target, "near")
    output = assisted(target, draft, inputs, kind, max_new_tokens=9)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=9))
    if "mm_token_type_ids" in inspect.signature(target.forward).parameters:
        typed = {**inputs, "mm_token_type_ids": torch.zeros_like(inputs["input_ids"])}
        assert torch.equal(assisted(target, draft, typed, kind, max_new_tokens=9), output)


def test_b11_positions_of_another_text_are_refused() -> None:
    target, inputs = qwen_vl("3"), prompts((7,), vocab=90)
    positions = torch.arange(3, 10).expand(4, 1, -1)
    config = exact("lossless", max_new_tokens=4)
    refuses(target, tiny("llama"), inputs, "position_ids", generation_config=config, position_ids=positions)
