"""Prompts with images for a Llava under lossless and easd: plain decoding's text, images read once by each model, one
early error where the draft cannot read them."""

import copy
import functools
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.encoder_models import IMAGE, llava, one_of, pictures
from tests.helpers import CACHE, TESTING, VERSION, WEAK_DRAFTS, Forwards, assisted, exact, plain, states
from tests.models import DRAFTS, PAD, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

model = functools.cache(llava)
ONE = ((2, 3),)
RAGGED = ((2, 3), (1, 1), (4, 2))
# Since then transformers encodes images before any decoding method runs.
ENCODES_EARLY = Version("5.24.dev0") <= VERSION


def plain_rows(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    """New tokens of each row alone, without padding: (B, longest)."""
    rows = []
    for row in range(len(inputs["input_ids"])):
        alone = one_of(inputs, row)
        rows.append(plain(target, alone, **fields)[0, alone["input_ids"].shape[1] :])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def new(output: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return output[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("scheme", TESTING)
@pytest.mark.parametrize("draft", DRAFTS)
def test_ui56_a_prompt_with_an_image_is_continued_as_plain_decoding_does(draft: str, scheme: str) -> None:
    target = model()
    for texts in (ONE, RAGGED):
        inputs = pictures(texts)
        output = assisted(target, draft_of(target, draft), inputs, scheme, max_new_tokens=16)
        assert torch.equal(new(output, inputs), plain_rows(target, inputs, max_new_tokens=16))


def test_the_image_decides_the_text_and_the_draft_sees_it() -> None:
    target, inputs = model(), pictures(ONE)
    other = {**inputs, "pixel_values": pictures(ONE, seed=9)["pixel_values"]}
    first, second = (plain(target, one, max_new_tokens=16) for one in (inputs, other))
    assert not torch.equal(first, second)
    output = assisted(target, draft_of(target, "same"), other, max_new_tokens=16, return_dict_in_generate=True)
    assert torch.equal(output.sequences, second)
    assert output.stats.acceptance_rate == 1.0


def test_each_model_encodes_the_images_once() -> None:
    target = model()
    draft = draft_of(target, "near")
    inputs = pictures(RAGGED)
    calls: dict[str, list[torch.Tensor]] = {"target": [], "draft": []}
    towers = [(name, module) for name, one in (("target", target), ("draft", draft)) for module in _towers(one)]

    def note(name: str, module: Any, args: Any, kwargs: Any) -> None:
        calls[name].append(args[0] if args else kwargs["pixel_values"])

    handles = [
        module.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True) for name, module in towers
    ]
    try:
        assisted(target, draft, inputs, "chains", max_new_tokens=12)
    finally:
        for handle in handles:
            handle.remove()
    for seen in calls.values():
        assert len(seen) == 1
        assert torch.equal(seen[0], inputs["pixel_values"])


def _towers(one: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for name, module in one.named_modules() if name.endswith("vision_tower")]


def test_two_images_in_one_row() -> None:
    target = model()
    ids = torch.tensor([[PAD, 5, *[IMAGE] * 4, 7], [6, *[IMAGE] * 4, 8, 9]])
    ids = torch.cat([ids, torch.tensor([[*[IMAGE] * 4, 11], [12, 13, 14, 15, 16]])], dim=1)
    pixels = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "pixel_values": pixels}
    rows = []
    for row, images in enumerate((pixels[:2], pixels[2:])):
        alone = {**one_of({name: inputs[name] for name in ("input_ids", "attention_mask")}, row)}
        text = plain(target, {**alone, "pixel_values": images}, max_new_tokens=12)
        rows.append(text[:, alone["input_ids"].shape[1] :])
    for scheme in ("lossless", "chains"):
        output = assisted(target, draft_of(target, "near"), inputs, scheme, max_new_tokens=12)
        assert torch.equal(new(output, inputs), torch.cat(rows))


def test_several_sequences_of_one_prompt_see_its_image() -> None:
    """Sampled with a law that is all on one token, so that every sequence is the greedy one."""
    target, inputs = model(), pictures(RAGGED)
    fields = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12}
    output = assisted(target, draft_of(target, "near"), inputs, **fields)
    reference = plain_rows(target, inputs, max_new_tokens=12).repeat_interleave(2, dim=0)
    assert torch.equal(new(output, inputs), reference)


def test_scores_and_cache_are_plain_decodings() -> None:
    target, inputs = model(), pictures(ONE)
    fields = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 10}
    reference = plain(target, inputs, **fields)
    output = assisted(target, draft_of(target, "near"), inputs, **fields)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(reference.scores).float(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(states(getattr(output, CACHE)), states(getattr(reference, CACHE)), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_a_further_turn_goes_on_from_the_returned_cache() -> None:
    target, inputs = model(), pictures(ONE)
    draft = draft_of(target, "near")
    first = assisted(target, draft, inputs, return_dict_in_generate=True, max_new_tokens=6)
    ids = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    reference = plain(target, whole, max_new_tokens=8)
    text = {name: whole[name] for name in ("input_ids", "attention_mask")}
    cache = getattr(first, CACHE)
    with pytest.raises(ValueError, match="images beside a filled cache"):
        assisted(target, draft, {**whole, CACHE: cache}, max_new_tokens=8)
    assert torch.equal(assisted(target, draft, {**text, CACHE: cache}, max_new_tokens=8), reference)


def test_a_row_that_ends_at_once_takes_its_image_along() -> None:
    inputs = pictures(RAGGED)
    eos = int(plain_rows(model(), inputs, max_new_tokens=1)[1, 0])
    fields = {"max_new_tokens": 10, "eos_token_id": eos, "pad_token_id": PAD}
    for scheme in TESTING:
        output = assisted(model(), draft_of(model(), "near"), inputs, scheme, **fields)
        assert torch.equal(new(output, inputs), plain_rows(model(), inputs, **fields))


@pytest.mark.parametrize("scheme", ["lossless", "easd"])
def test_ui56_a_draft_that_cannot_read_the_images_is_refused(scheme: str) -> None:
    refuses_images(
        tiny("llama", 0), "which the draft model LlamaForCausalLM cannot read", exact(scheme, max_new_tokens=4)
    )
    other = llava(image_size=12)
    refuses_images(
        other, "image_size of the target's images is 8 and of the draft's 12", exact(scheme, max_new_tokens=4)
    )


@pytest.mark.parametrize("scheme", ["smc", "parse"])
def test_other_schemes_refuse_images_by_name(scheme: str) -> None:
    config = exact(scheme, do_sample=scheme == "smc", max_new_tokens=4)
    refuses_images(draft_of(model(), "near"), r"does not support the model input pixel_values", config)


def refuses_images(draft: PreTrainedModel, message: str, config: SemSpecConfig) -> None:
    """Refused before either language model runs; 5.24 runs the target's vision tower before."""
    target = model()
    parts = [] if ENCODES_EARLY else _towers(target)
    with Forwards(target, draft, *parts) as forwards, pytest.raises(ValueError, match=message):
        target.generate(**pictures(ONE), assistant_model=draft, generation_config=config)
    assert forwards.calls == 0


def test_images_for_other_models_are_refused_by_name() -> None:
    target = copy.deepcopy(model())
    target.config.model_type = "qwen2_vl"
    with pytest.raises(ValueError, match="does not support the model input pixel_values"):
        assisted(target, draft_of(target, "near"), pictures(ONE), max_new_tokens=4)


def test_features_without_their_images_are_refused() -> None:
    if not ENCODES_EARLY:
        pytest.skip("no mm_encoder_outputs before 5.24")
    target, inputs = model(), pictures(ONE)
    with torch.no_grad():
        features = target.get_image_features(inputs.pop("pixel_values"), return_dict=True)
    inputs["mm_encoder_outputs"] = {"image": features}
    with pytest.raises(ValueError, match="mm_encoder_outputs was passed without the images"):
        assisted(target, draft_of(target, "near"), inputs, max_new_tokens=4)


def test_text_alone_needs_no_draft_with_eyes() -> None:
    target, inputs = model(), prompts((4,), vocab=IMAGE)
    output = assisted(target, tiny("llama", 0), inputs, max_new_tokens=8)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=8))
