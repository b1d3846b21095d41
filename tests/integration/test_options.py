"""What the schemes cannot do is refused by name, before any forward, and leaves plain decoding as it was."""

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, StaticCache, SynthIDTextWatermarkingConfig

from hf_semspec import SemSpecConfig
from tests.helpers import CACHE, MARKS_CACHES, WEAK_DRAFTS, assisted, exact, plain, refuses
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "num_beams and several sequences": {"num_beams": 4, "num_return_sequences": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "guidance_scale": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "speculation_type": {"speculation_type": "dflash"},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation static": {"cache_implementation": "static"},
    "cache_implementation offloaded": {"cache_implementation": "offloaded"},
    "cache_implementation quantized": {"cache_implementation": "quantized"},
    "watermarking_config": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3)},
}


@pytest.mark.parametrize("scheme", ["lossless", "easd", "parse", "smc"])
@pytest.mark.parametrize("case", REFUSED)
def test_ui04_refused_by_name_before_any_forward(case: str, scheme: str) -> None:
    option = case.split()[0]
    if option in ("use_mtp", "speculation_type", "assistant_ensemble_weight") and not hasattr(
        GenerationConfig(), option
    ):
        pytest.skip(f"this transformers has no {option}")
    target = tiny("llama", 0)
    fields = REFUSED[case] | ({"do_sample": True} if option == "watermarking_config" else {})
    config = SemSpecConfig(scheme, max_new_tokens=6, **fields)
    refuses(target, draft_of(target, "near"), prompts((4, 2)), option, generation_config=config)


@pytest.mark.deprecated
@pytest.mark.filterwarnings("ignore:.*generation_config.*")
def test_ui04_refused_also_when_given_as_a_keyword() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    refuses(target, draft, prompts((4,)), "num_beams", generation_config=SemSpecConfig("lossless"), num_beams=2)
    target.generation_config.semspec = {"scheme": "lossless"}
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**prompts((4,)), assistant_model=draft, num_beams=2, max_new_tokens=4)


def test_caches_of_another_kind_are_refused_by_name() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    config = SemSpecConfig("lossless", max_new_tokens=4)
    static = StaticCache(config=target.config, max_cache_len=32)
    refuses(target, draft, prompts((4,)), "StaticCache", generation_config=config, **{CACHE: static})


def test_a_cache_that_does_not_fit_the_text_is_refused() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    filled = plain(target, prompts((9,)), max_new_tokens=4, return_dict_in_generate=True)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    call = {CACHE: getattr(filled, CACHE), "generation_config": config}
    with pytest.raises(ValueError, match="cache"):
        target.generate(**prompts((4,)), assistant_model=draft, **call)


def test_an_attention_backend_without_4d_masks_is_refused_by_name() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    config = SemSpecConfig("lossless", max_new_tokens=4)
    draft.config._attn_implementation = "flash_attention_2"
    refuses(target, draft, prompts((4,)), r"flash_attention_2", generation_config=config)


def test_position_ids_of_the_callers_own_are_refused_by_name() -> None:
    target = tiny("llama", 0)
    inputs = prompts((4,))
    own = {**inputs, "position_ids": torch.tensor([[3, 4, 5, 6]])}
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, draft_of(target, "near"), own, "position_ids", generation_config=config)


def test_a_row_without_any_token_is_refused() -> None:
    target = tiny("llama", 0)
    inputs = prompts((4, 3))
    inputs["attention_mask"][1] = 0
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, draft_of(target, "near"), inputs, "attention_mask", generation_config=config)


def test_greedy_with_several_sequences_is_stocks_error() -> None:
    target = tiny("llama", 0)
    with pytest.raises(ValueError, match="num_return_sequences"):
        plain(target, prompts((4,)), max_new_tokens=4, num_return_sequences=2)
    with pytest.raises(ValueError, match="num_return_sequences"):
        assisted(target, draft_of(target, "near"), prompts((4,)), max_new_tokens=4, num_return_sequences=2)


def test_an_unknown_argument_is_still_stocks_error() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(
        target, draft_of(target, "near"), prompts((4,)), "not_an_argument", generation_config=config, not_an_argument=1
    )


def test_an_empty_cache_object_is_no_obstacle() -> None:
    target = tiny("llama", 0)
    inputs = prompts((4,))
    cache = DynamicCache()
    output = assisted(target, draft_of(target, "near"), inputs, call={CACHE: cache}, max_new_tokens=6)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=6))
    assert not MARKS_CACHES or cache.get_seq_length() == 9


def test_more_chains_than_ids_are_refused() -> None:
    target = tiny("llama", vocab=16)
    config = exact("lossless", num_chains=17, max_new_tokens=4)
    refuses(target, target, prompts((5,), vocab=16), "num_chains=17", generation_config=config)
    config = exact("lossless", num_chains=17, max_new_tokens=4, do_sample=True)
    output = target.generate(**prompts((5,), vocab=16), assistant_model=target, generation_config=config)
    assert output.shape == (1, 9), "chains that are drawn may be alike"


def test_ui54_a_generator_of_the_callers_own_is_refused_by_name() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4, do_sample=True)
    refuses(
        target,
        draft_of(target, "near"),
        prompts((4,)),
        "generator",
        generation_config=config,
        generator=torch.Generator().manual_seed(0),
    )


def test_ui57_synced_gpus_with_one_process_changes_nothing() -> None:
    target = tiny("llama", 0)
    inputs = prompts((4,))
    output = assisted(target, draft_of(target, "near"), inputs, call={"synced_gpus": True}, max_new_tokens=8)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=8))


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x", torch.tensor([1, 2]), object()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(
    "option",
    [
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "num_beams"),
        *("guidance_scale", "penalty_alpha", "prompt_lookup_num_tokens", "cache_implementation", "prefill_chunk_size"),
        *("output_attentions", "constraints", "dola_layers"),
    ],
)
def test_edge_options_of_odd_types_are_refused_by_name(option: str, value: Any) -> None:
    config = SemSpecConfig("lossless", max_new_tokens=4)
    config.__dict__[option] = value
    target = tiny("llama", 0)
    if option == "num_assistant_tokens_schedule" and isinstance(value, str):
        pytest.skip("of its type")
    of_stocks = ["num_beams", "output_attentions"]
    if transformers.__version__.startswith("4."):
        of_stocks += ["num_assistant_tokens", "assistant_confidence_threshold"]
    if option in of_stocks and isinstance(value, torch.Tensor):
        pytest.skip("transformers itself fails earlier")
    refuses(target, draft_of(target, "near"), prompts((4,)), option, generation_config=config)


@pytest.mark.parametrize(
    ("field", "way"),
    [
        ({"num_beams": 5}, "pass num_beams=1"),
        ({"cache_implementation": "static"}, "pass cache_implementation='dynamic'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "pass penalty_alpha=0"),
        ({"prompt_lookup_num_tokens": 3}, "pass prompt_lookup_num_tokens=None"),
    ],
    ids=["beams", "static", "contrastive", "lookup"],
)
@pytest.mark.deprecated
@pytest.mark.filterwarnings("ignore:.*generation_config.*")
@pytest.mark.filterwarnings("ignore:.*generation flags.*")
def test_b12_an_option_of_the_folder_is_named_with_the_argument_that_works(field: dict[str, Any], way: str) -> None:
    """What a folder sets cannot be left out, and `None` in the call's config does not beat it."""
    target, inputs = tiny("llama", 0), prompts((4,))
    draft = draft_of(target, "near")
    expected = plain(target, inputs, max_new_tokens=6)
    target.generation_config.update(**field)
    option = next(iter(field))
    config = SemSpecConfig("lossless", max_new_tokens=6)
    with pytest.raises(ValueError, match=f"{option}=.*the target's own generation config sets it: {way}, or decode"):
        target.generate(**inputs, assistant_model=draft, generation_config=config)
    off = {"num_beams": 1, "cache_implementation": "dynamic", "penalty_alpha": 0, "prompt_lookup_num_tokens": None}
    output = target.generate(**inputs, assistant_model=draft, generation_config=config, **{option: off[option]})
    assert torch.equal(output, expected)


def test_b12_an_option_that_a_pipeline_sets_is_named_with_the_argument_that_works() -> None:
    """Beams of the speech pipeline come in a copy of the call's config."""
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=6)
    config.update(num_beams=5)
    match = r"the call sets it, or the pipeline by itself: pass num_beams=1 \(in a pipeline's generate_kwargs, or in"
    refuses(target, draft_of(target, "near"), prompts((4,)), match, generation_config=config)
