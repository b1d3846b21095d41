"""Models with a `prepare_inputs_for_generation` of their own (report b10)."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.encoder_models import encoder_decoder, sources
from tests.helpers import WEAK_DRAFTS, assisted, plain, refuses
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def with_preparation(model: PreTrainedModel, prepare: Any) -> PreTrainedModel:
    """`model` as one of a class whose preparation is `prepare(super's inputs)`."""

    class Own(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = prepare(super().prepare_inputs_for_generation(*args, **kwargs))
            return inputs

    model.__class__ = Own
    return model


CHANGES = {
    "bias": lambda inputs: {**inputs, "bias": 1.0},
    "input_ids": lambda inputs: {**inputs, "input_ids": inputs["input_ids"] + 1},
    "position_ids": lambda inputs: {**inputs, "position_ids": inputs["position_ids"] + 2},
    "attention_mask": lambda inputs: {**inputs, "attention_mask": inputs["attention_mask"] * 0},
}


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("name", CHANGES)
def test_b10_a_preparation_that_makes_other_inputs_is_refused_by_name(name: str, side: str) -> None:
    odd, usual = tiny("llama", 0, attention="sdpa"), tiny("llama", 0)
    odd = with_preparation(odd, lambda inputs: inputs)
    models = (odd, usual) if side == "target" else (usual, odd)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    models[0].generate(**prompts((4,)), assistant_model=models[1], generation_config=config)
    odd = with_preparation(odd, CHANGES[name])
    if side == "draft":
        refuses(*models, prompts((4,)), f"the draft model Own prepares {name}", generation_config=config)
        return
    with pytest.raises(ValueError, match=f"the target model Own prepares {name}"):
        models[0].generate(**prompts((4,)), assistant_model=models[1], generation_config=config)


def test_b10_only_from_the_second_forward_on() -> None:
    def later(inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "bias": 1.0} if inputs["input_ids"].shape[1] == 1 else inputs

    config = SemSpecConfig("lossless", max_new_tokens=4)
    odd = with_preparation(tiny("llama", 0), later)
    refuses(tiny("llama", 0), odd, prompts((4,)), "the draft model Own prepares bias", generation_config=config)


def test_b10_a_preparation_of_one_instance_counts_too() -> None:
    draft = tiny("llama", 0)
    usual = draft.prepare_inputs_for_generation
    draft.prepare_inputs_for_generation = lambda *args, **kwargs: {**usual(*args, **kwargs), "bias": 1.0}
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(tiny("llama", 0), draft, prompts((4,)), "prepares bias", generation_config=config)


def test_b10_one_that_changes_nothing_for_text_is_left_alone() -> None:
    target = with_preparation(tiny("llama", 0), lambda inputs: {**inputs, "pixel_values": None, "logits_to_keep": 1})
    inputs = prompts((5,))
    expected = plain(tiny("llama", 0), inputs, max_new_tokens=8)
    assert torch.equal(assisted(target, draft_of(tiny("llama", 0), "near"), inputs, max_new_tokens=8), expected)


def test_b10_an_encoder_decoder_is_compared_with_its_own_class() -> None:
    target, inputs = encoder_decoder("t5"), sources((4,))
    config = SemSpecConfig("lossless", max_new_tokens=4)
    expected = plain(target, inputs, max_new_tokens=4)
    odd = with_preparation(encoder_decoder("t5"), lambda inputs: inputs)
    assert torch.equal(odd.generate(**inputs, assistant_model=target, generation_config=config), expected)
    odd = with_preparation(encoder_decoder("t5"), lambda inputs: {**inputs, "bias": 1.0})
    refuses(target, odd, inputs, "the draft model Own prepares bias", generation_config=config)


def later(condition: Any) -> Any:
    """A preparation that adds a bias where `condition` holds of its inputs."""
    return lambda inputs: {**inputs, "bias": 1.0} if condition(inputs) else inputs


WHERE = {
    "in batches": lambda inputs: len(inputs["input_ids"]) > 1,
    "where rows are padded": lambda inputs: not bool(inputs["attention_mask"].all()),
    "of some ids": lambda inputs: bool((inputs["input_ids"] > 40).any()),
    "of long texts": lambda inputs: inputs["attention_mask"].shape[1] >= 10,
}


@pytest.mark.parametrize("where", WHERE)
def test_b10_what_depends_on_the_call_is_found_there(where: str) -> None:
    target, inputs = with_preparation(tiny("llama", 0, attention="sdpa"), later(WHERE[where])), prompts((3, 6))
    config = SemSpecConfig("lossless", max_new_tokens=6)
    with pytest.raises(ValueError, match="the target model Own prepares bias"):
        target.generate(**inputs, assistant_model=tiny("llama", 0), generation_config=config)


def test_b10_one_that_fails_is_refused_by_name() -> None:
    def fails(inputs: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("needs an image")

    draft = with_preparation(tiny("llama", 0), fails)
    config = SemSpecConfig("lossless", max_new_tokens=6)
    refuses(tiny("llama", 0), draft, prompts((4,)), "RuntimeError: needs an image", generation_config=config)
