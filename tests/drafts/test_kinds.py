"""Drafts that are no causal LM by themselves are refused by name, with the call that works, before any forward."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, GenerationConfig, PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.helpers import WEAK_DRAFTS, assisted, exact, plain, refuses
from tests.models import draft_of, prompts, row_of, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

# What says so in a checkpoint, and what the message names.
NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3 architecture": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE.*load_draft.*target=model"),
    "eagle3 vocabulary": ({"draft_vocab_size": 32}, "EAGLE"),
    "eagle3 of speculators": ({"speculators_model_type": "eagle3"}, "EAGLE"),
    "dflash architecture": (
        {"architectures": ["DFlashDraftModel"]},
        'DFlash.*speculation_type="dflash", semspec=None',
    ),
    "dflash config": ({"dflash_config": {"mask_token_id": 3}}, "DFlash"),
    "gemma": (
        {"architectures": ["Gemma4AssistantForCausalLM"]},
        "Gemma assistant.*assistant_model=draft, semspec=None",
    ),
    "mtp": ({"architectures": ["Qwen3NextMTP"]}, "MTP.*use_mtp=True, semspec=None"),
    "nextn": ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "MTP"),
    "medusa": ({"architectures": ["MedusaModel"]}, "Medusa.*no decoding for it"),
    "mlp speculator": ({"speculators_model_type": "mlp"}, "MLP speculator"),
}


ASKED = [(case, "lossless") for case in NAMED] + [("gemma", scheme) for scheme in ("easd", "parse", "smc")]


@pytest.mark.parametrize(("case", "scheme"), ASKED)
def test_by_what_its_config_says(case: str, scheme: str) -> None:
    marks, match = NAMED[case]
    target = tiny()
    draft = draft_of(target, "near")
    for name, value in marks.items():
        setattr(draft.config, name, value)
    refuses(target, draft, prompts((4,)), match, generation_config=SemSpecConfig(scheme, max_new_tokens=4))


def gemma_assistant() -> PreTrainedModel:
    text = transformers.Gemma4TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    return transformers.Gemma4AssistantForCausalLM(config)


def dflash() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MuseGlimmerAssistantConfig(**sizes, num_hidden_layers=1, head_dim=8, target_layer_ids=[0])
    return transformers.MuseGlimmerAssistantModel(config)


@pytest.mark.parametrize(("make", "match"), [(gemma_assistant, "Gemma assistant"), (dflash, "DFlash")])
def test_the_classes_of_transformers(make: Any, match: str) -> None:
    needed = "Gemma4AssistantForCausalLM" if make is gemma_assistant else "MuseGlimmerAssistantModel"
    if not hasattr(transformers, needed):
        pytest.skip(f"this transformers has no {needed}")
    refuses(tiny(), make(), prompts((4,)), match, generation_config=SemSpecConfig("lossless", max_new_tokens=4))


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("use_mtp", True, "use_mtp=True, semspec=None"),
        ("speculation_type", "dflash", 'speculation_type="dflash", semspec=None'),
        ("prompt_lookup_num_tokens", 3, 'draft="ngram"'),
        ("assistant_early_exit", 1, "assistant_early_exit=..., semspec=None"),
        ("assistant_ensemble_weight", 0.5, "assistant_ensemble_weight=..., semspec=None"),
    ],
)
def test_options_of_transformers_own_drafting(option: str, value: Any, match: str) -> None:
    if not hasattr(GenerationConfig(), option):
        pytest.skip(f"this transformers has no {option}")
    target = tiny()
    config = SemSpecConfig("lossless", max_new_tokens=4, **{option: value})
    refuses(target, draft_of(target, "near"), prompts((4,)), match, generation_config=config)


@pytest.mark.deprecated
def test_the_calls_that_are_named_run() -> None:
    """Those that need no model of their own."""
    target = tiny(eos=1)  # 4.57 looks up nothing without one
    inputs = prompts((6,))
    expected = plain(target, inputs, max_new_tokens=8)
    config = SemSpecConfig("lossless", max_new_tokens=8)
    for call in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft_of(target, "near")}):
        output = target.generate(**inputs, **call, generation_config=config, semspec=None)
        assert torch.equal(output, expected)
    looked_up = SemSpecConfig("lossless", draft="ngram", max_new_tokens=8)
    assert torch.equal(target.generate(**inputs, generation_config=looked_up), expected)


def test_a_draft_without_a_head_is_refused() -> None:
    target = tiny("llama")
    body = AutoModel.from_config(target.config)
    config = exact("lossless", max_new_tokens=4)
    refuses(target, body, row_of(prompts((5,)), 0), "no language modeling head", generation_config=config)


@pytest.mark.parametrize("draft", ["a name", ["a list"], object()], ids=["name", "list", "object"])
def test_what_is_no_model_is_named(draft: Any) -> None:
    with pytest.raises(ValueError, match=f"the draft model {type(draft).__name__} is no model"):
        assisted(tiny("llama"), draft, prompts((5,)), max_new_tokens=4)
