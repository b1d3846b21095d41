"""Whisper as target and draft, and pairs of encoder-decoders that are refused by name."""

import copy
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import LogitsProcessorList, SuppressTokensAtBeginLogitsProcessor, WhisperForCausalLM

from hf_semspec import SemSpecConfig, record_stats
from tests.encoder_models import FRAMES, LOGS, RAGGED, encoder_decoder, model, sources, speaker, speech, whisper
from tests.helpers import CACHE, TESTING, VERSION, WEAK_DRAFTS, Forwards, assisted, exact, plain
from tests.models import DRAFTS, draft_of, prompts, tiny

pytestmark = [
    pytest.mark.seam,
    WEAK_DRAFTS,
    pytest.mark.filterwarnings("ignore:The target scores"),
]


# Whisper


@LOGS
@pytest.mark.parametrize("scheme", TESTING)
@pytest.mark.parametrize("draft", DRAFTS)
def test_ui56_whisper_transcribes_as_plain_decoding(draft: str, scheme: str) -> None:
    target, inputs = speaker(), speech(3)
    output = assisted(target, draft_of(target, draft), inputs, scheme, max_new_tokens=16)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=16))


@LOGS
def test_whisper_transcribes_long_audio_segment_by_segment() -> None:
    target = copy.deepcopy(speaker())
    target.generation_config.prev_sot_token_id = 5
    inputs = speech(2, frames=2 * FRAMES + 15)
    inputs["attention_mask"] = torch.ones(2, 2 * FRAMES + 15, dtype=torch.long)
    inputs["attention_mask"][1, 2 * FRAMES :] = 0
    for own in ({}, {"condition_on_prev_tokens": True}):
        call = {"return_timestamps": True, **own}
        reference = plain(target, inputs, call=call, max_new_tokens=12)
        with record_stats() as stats:
            output = assisted(target, draft_of(target, "near"), inputs, call=call, max_new_tokens=12)
        assert torch.equal(output, reference)
        assert len(stats) > 1


@LOGS
def test_what_whisper_drops_beside_a_draft_can_be_passed_as_a_processor() -> None:
    target, inputs = copy.deepcopy(speaker()), speech(1)
    draft = draft_of(target, "near")
    free = plain(target, inputs, max_new_tokens=12)
    first = int(free[0, 0])
    target.generation_config.begin_suppress_tokens = [first]
    reference = plain(target, inputs, max_new_tokens=12)
    assert int(reference[0, 0]) != first
    if Version("5.24.dev0") <= VERSION:
        assert torch.equal(assisted(target, draft, inputs, max_new_tokens=12), free)
    kept = LogitsProcessorList([SuppressTokensAtBeginLogitsProcessor([first], 1, device="cpu")])
    output = assisted(target, draft, inputs, call={"logits_processor": kept}, max_new_tokens=12)
    assert torch.equal(output, reference)


@LOGS
def test_a_distilled_decoder_drafts_on_the_targets_encoder() -> None:
    target, inputs = speaker(), speech(3)
    config = type(target.config)(**target.config.to_dict())
    draft = WhisperForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    weights = {name: w for name, w in target.state_dict().items() if not name.startswith("model.encoder")}
    draft.load_state_dict(weights)
    reference = plain(target, inputs, max_new_tokens=16)
    for one in (draft, draft_of(draft, "near")):
        with record_stats() as stats:
            assert torch.equal(assisted(target, one, inputs, max_new_tokens=16), reference)
        assert stats[0].acceptance_rate > 0.3
    narrow = whisper(cross=16).config
    narrow = WhisperForCausalLM._from_config(narrow, attn_implementation="eager").double().eval()
    early(target, narrow, "d_model.*is 32 and of the draft WhisperForCausalLM 16", inputs)
    early(tiny("llama", 0), draft, "WhisperForCausalLM reads what an encoder has read", prompts((4,)))


# Refusals


def early(target: Any, draft: Any, message: str, inputs: dict[str, torch.Tensor], scheme: Any = None) -> None:
    """The call must be refused before either model, or its encoder, runs."""
    config = scheme or SemSpecConfig("lossless", max_new_tokens=4)
    parts = [one.get_encoder() for one in (target, draft) if one.config.is_encoder_decoder]
    with Forwards(target, draft, *parts) as forwards, pytest.raises(ValueError, match=message):
        target.generate(**inputs, assistant_model=draft, generation_config=config)
    assert forwards.calls == 0


@LOGS
def test_ui56_pairs_that_do_not_fit_are_refused_before_any_forward() -> None:
    t5, llama = model("t5"), tiny("llama", 0)
    early(t5, llama, "LlamaForCausalLM has no encoder, and the target T5ForConditionalGeneration", sources((4,)))
    early(llama, t5, "T5ForConditionalGeneration reads what an encoder has read", prompts((4,)))
    early(t5, speaker(), "reads input_ids and the draft WhisperForConditionalGeneration input_features", sources((4,)))
    early(speaker(), whisper(mels=12), "num_mel_bins.*is 8 and of the draft .* 12", speech(1))


@pytest.mark.parametrize("scheme", ["smc", "parse"])
def test_other_schemes_refuse_encoder_decoders_by_name(scheme: str) -> None:
    config = exact(scheme, max_new_tokens=4)
    message = f"{scheme} does not support encoder-decoders, and the target model T5ForConditionalGeneration"
    early(model("t5"), draft_of(model("t5"), "near"), message, sources((4,)), config)


def test_families_not_known_to_work_are_refused_by_name() -> None:
    target = copy.deepcopy(model("t5"))
    target.config.model_type = "m2m_100"
    early(target, model("t5"), "encoder-decoder of type 'm2m_100'", sources((4,)))
    early(model("t5"), target, "draft model .* of type 'm2m_100'", sources((4,)))


def test_inputs_that_the_draft_cannot_read_are_refused() -> None:
    target = model("t5")
    draft = draft_of(target, "near")
    config = SemSpecConfig("lossless", max_new_tokens=4)
    inputs = sources((4,))
    with torch.no_grad():
        states = target.get_encoder()(**inputs)
        embeds = target.get_input_embeddings()(inputs["input_ids"])
    mask = {"attention_mask": inputs["attention_mask"]}
    for given, message in (
        ({"encoder_outputs": states, **mask}, "encoder_outputs was passed without input_ids"),
        ({"inputs_embeds": embeds, **mask}, "inputs_embeds"),
    ):
        with Forwards(target, draft) as forwards, pytest.raises(ValueError, match=message):
            target.generate(**given, assistant_model=draft, generation_config=config)
        assert forwards.calls == 0
    reference = plain(target, inputs, return_dict_in_generate=True, max_new_tokens=4)
    with pytest.raises(ValueError, match="cache of the caller's own"):
        target.generate(
            **inputs, **{CACHE: getattr(reference, CACHE)}, assistant_model=draft, generation_config=config
        )


def test_both_models_are_as_they_were_after_an_error() -> None:
    target = copy.deepcopy(model("t5"))
    draft = draft_of(target, "near")
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    before = [
        copy.deepcopy((one.state_dict(), one.config.to_dict(), vars(one.generation_config))) for one in (target, draft)
    ]
    with pytest.raises(ValueError, match=r"draft model .* gave logits without a law"):
        assisted(target, draft, sources(RAGGED), max_new_tokens=8)
    for one, (weights, config, generation) in zip((target, draft), before, strict=True):
        assert all(torch.equal(w, weights[n]) or bool(w.isnan().all()) for n, w in one.state_dict().items())
        assert one.config.to_dict() == config
        assert vars(one.generation_config) == generation
        assert not one._forward_hooks and not one.training
    assert torch.equal(
        plain(target, sources((6,)), max_new_tokens=8), plain(model("t5"), sources((6,)), max_new_tokens=8)
    )


def test_past_the_drafts_positions_the_target_goes_on_alone() -> None:
    target = model("bart")
    draft = draft_of(encoder_decoder("bart", positions=10), "same")
    reference = plain(target, sources((6,)), max_new_tokens=20)
    with pytest.warns(UserWarning, match="outgrown the draft's context of 10"):
        assert torch.equal(assisted(target, draft, sources((6,)), max_new_tokens=20), reference)
