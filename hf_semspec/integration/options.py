"""Which options of `generate` the schemes honour; everything else is refused by name before any forward."""

from typing import Any

import torch
from transformers import GenerationConfig

from ..common.fields import bad_value, shown
from ..common.warn_once import warn_once
from ..common.wrappers import forward_parameters, prompt_adapter
from ..drafts.choose import asks_for_model
from ..drafts.kinds import STOCK_CALLS, check_head, other_kind
from ..drafts.other_tokenizer import shared_tokens
from ..drafts.static import check_static
from ..drafts.vocabulary import check_vocabularies, vocabulary_size
from ..engine.cache import ROLLBACK_LAYER_TYPES, text_config
from ..engine.encoders import PLAINLY, check_encoders, decodes_encoded
from ..engine.mixers import RECURRENT, STATELESS, has_recurrent_layers
from ..engine.model import takes_masks
from ..engine.ranks import world_size
from ..engine.timing import check_pair
from .preparation import check_preparation

# option -> the values that mean it is off; the last one, passed by the caller, beats what anybody else set
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "assistant_ensemble_weight": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic"),
    "return_legacy_cache": (None, False),
}
_IGNORED: dict[str, tuple[type, ...]] = {
    "num_assistant_tokens": (int,),
    "num_assistant_tokens_schedule": (str,),
    "assistant_confidence_threshold": (int, float),
}


def check_options(model: Any, scheme: Any, config: Any, mode_kwargs: dict[str, Any]) -> None:
    """Refuse what scheme `scheme` cannot do for `model` under the resolved generation config.

    Args:
        mode_kwargs: `generate`'s `assistant_model`, `tokenizer`, `assistant_tokenizer`, `streamer`, `synced_gpus`.

    Raises:
        ValueError: names the option and the way out.
    """
    draft = mode_kwargs.get("assistant_model")
    for option in ("tokenizer", "assistant_tokenizer"):
        value = mode_kwargs.get(option)
        if value is not None and not callable(value):
            raise ValueError(f"{option} must be a loaded tokenizer, as AutoTokenizer makes it, but is {shown(value)}")
    _check_presence(scheme, draft, mode_kwargs)
    check_head(draft, model, scheme)
    check_encoders(model, draft, scheme)
    for option, off in _REFUSED.items():
        value = getattr(config, option, None)
        if not _is_one_of(value, off):
            more = f"; {STOCK_CALLS[option]}" if option in STOCK_CALLS else ""
            raise ValueError(
                f"{option}={value!r} is not supported by semspec; {_way_out(model, option, value, off[-1])}, or "
                f"{PLAINLY}{more}"
            )
    if getattr(config, "trace", False) and not config.return_dict_in_generate:
        raise ValueError(
            "trace=True puts the record on the output object, but return_dict_in_generate is off: turn it on, or "
            "leave out trace"
        )
    watermark = getattr(config, "watermarking_config", None)
    if type(watermark).__name__ == "SynthIDTextWatermarkingConfig":
        raise ValueError(f"watermarking_config of SynthID keeps a state between tokens: leave it out, or {PLAINLY}")
    if mode_kwargs.get("synced_gpus") and world_size() > 1:
        _check_synced(model, scheme)
    scheme.check_call(model, config, mode_kwargs.get("tokenizer"))
    for role, one in (("target", model), ("draft", draft)):
        if one is not None:
            _check_model(role, one, needs_masks=scheme.needs_masks)
    if getattr(scheme, "compile_draft", False):
        check_static(draft)
    chains = getattr(getattr(scheme, "revise_with", None) or scheme, "num_chains", 1)
    if chains > text_config(model).vocab_size and not config.do_sample:
        raise ValueError(
            f"num_chains={chains} exceeds the vocabulary of {text_config(model).vocab_size} ids, and greedy chains "
            "begin with different ones: lower it"
        )
    if draft is not None:
        _check_tokenizers(model, draft, scheme, mode_kwargs)
        profile = getattr(getattr(scheme, "revise_with", None) or scheme, "cost_profile", None)
        if profile is not None:
            check_pair(profile, model, draft)
    for role, one in (("target", model), ("draft", draft)):
        if one is not None:  # on a made-up text, before any encoder runs
            check_preparation(role, one, torch.ones((1, 3), dtype=torch.long), None, 5)
    _warn_of_ignored(config)


def _way_out(model: Any, option: str, value: Any, off: Any) -> str:
    """Who set `option` to `value`, and the argument that sets it off."""
    argument = f"pass {option}={off!r}"
    if type(value) is type(stored := getattr(model.generation_config, option, None)) and str(value) == str(stored):
        return f"the target's own generation config sets it: {argument}"
    place = "" if off is None else ", or in the generation config that it gets"
    return f"the call sets it, or the pipeline by itself: {argument} (in a pipeline's generate_kwargs{place})"


def _check_presence(scheme: Any, draft: Any, mode_kwargs: dict[str, Any]) -> None:
    """Refuse a call that lacks the draft its scheme needs, or has one that the scheme would not use."""
    if not asks_for_model(scheme):
        for option in ("assistant_model", "assistant_tokenizer"):
            if mode_kwargs.get(option) is not None:
                raise ValueError(
                    f'draft="ngram" looks its drafts up in the text and has no use for {option}: leave it out, or set '
                    'draft="ngram+model" to have the model draft where nothing is found'
                )
    elif draft is None:
        raise ValueError(
            f"the generation config asks for the scheme {scheme.name!r}, which needs a draft: pass "
            "assistant_model=... (not beside a custom_generate callable, which drops it), or decode plainly with "
            'generate(..., semspec=None); the scheme lossless drafts without a model where draft="ngram"'
        )


def _check_synced(model: Any, scheme: Any) -> None:
    """Refuse, on all ranks alike, forwards in which a rank that has none of its own cannot go along."""
    reason = None
    if decodes_encoded(model):
        reason = "an encoder-decoder"
    elif getattr(model.config, "vision_config", None) is not None:
        reason = "a model with images"
    elif getattr(scheme, "compile_draft", False):
        reason = "compile_draft=True"
    if reason is not None:
        raise ValueError(
            f"synced_gpus=True with more than one process is not supported for {reason}, since ranks go along with "
            "one another's forwards by text alone: pass synced_gpus=False if no weights are sharded, or shard them "
            'by tp_plan="auto"'
        )


def _check_tokenizers(model: Any, draft: Any, scheme: Any, mode_kwargs: dict[str, Any]) -> None:
    """Refuse a draft of another vocabulary under a scheme that cannot use it, or one that shares nothing."""
    tokenizers = mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer")
    foreign = check_vocabularies(model, draft, *tokenizers, allow_foreign=scheme.other_tokenizers)
    by_token = getattr(scheme, "revise_with", scheme) is not None
    if foreign and getattr(scheme, "compile_draft", False):
        raise ValueError("compile_draft=True needs a draft with the target's tokenizer: leave it out")
    if foreign and by_token:
        shared_tokens(*tokenizers, vocabulary_size(model), vocabulary_size(draft))


def _check_model(role: str, model: Any, needs_masks: bool) -> None:
    """Refuse models that cannot be drafted with or for."""
    name = f"the {role} model {type(model).__name__}"
    if not callable(model) or not hasattr(model, "config"):
        raise ValueError(
            f"{name} is no model of transformers: load it, as load_draft does, and unwrap it if it is wrapped"
        )
    other = other_kind(model) if role == "draft" else None
    if other is not None:
        raise ValueError(f"{name} {other}")
    way_out = PLAINLY if role == "target" else "pass another draft"
    reason = _reason_against(model)
    if reason is not None:
        raise ValueError(f"{name} {reason}: {way_out}")
    attention = getattr(model.config, "_attn_implementation", None)
    if needs_masks and not takes_masks(model):
        raise ValueError(
            f"{name} was loaded with attn_implementation={attention!r}, which takes no 4-D mask: load it with "
            'attn_implementation="sdpa" or "eager"'
        )


def _reason_against(model: Any) -> str | None:
    """Why `model` cannot be rolled back, or told from its batch; `None` if nothing speaks against it."""
    if hasattr(model, "can_generate") and not model.can_generate():
        return "has no language modeling head (AutoModelForCausalLM loads one)"
    if prompt_adapter(model) is not None:
        return f"has an adapter in its prompt ({prompt_adapter(model)}), which only transformers' own loops prepare"
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = has_recurrent_layers(model)
    if getattr(model, "_is_stateful", False) and not recurrent:
        return "keeps a recurrent state, which cannot be rolled back after a rejected draft"
    unknown = sorted(kinds - {*ROLLBACK_LAYER_TYPES, *(RECURRENT | STATELESS if recurrent else ())})
    if unknown:
        return f"has layers of type {', '.join(unknown)}, whose cache cannot be rolled back after a rejected draft"
    if hasattr(config, "recurrent_kv_cache_mode"):
        return "runs its layers in loops with caches of their own (recurrent_kv_cache_mode)"
    if decodes_encoded(model):
        return None
    # Models that derive positions, windows or biases from where a token stands in the batch or in a 2-D mask.
    parameters = forward_parameters(model)
    wrapper = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wrapper = wrapper and len(parameters) <= 2
    if not wrapper and not {"cache", "past_key_values"} & set(parameters):
        return "takes no key/value cache, which every scheme needs"
    if (
        not wrapper
        and "position_ids" not in parameters
        and (not recurrent or kinds & {*ROLLBACK_LAYER_TYPES, "hybrid"})
    ):
        return "takes no position_ids, so rows of unequal length cannot be told apart"
    if getattr(config, "alibi", False):
        return "builds its position biases from a 2-D mask (alibi)"
    if "local" in getattr(config, "attention_layers", ()):
        return "has attention_layers='local', whose window no mask can move"
    return None


def _is_one_of(value: Any, plain: tuple[Any, ...]) -> bool:
    """Whether `value`, of any type, is one of some plain values."""
    return any(value is one or (isinstance(value, (bool, int, float, str)) and value == one) for one in plain)


def _warn_of_ignored(config: Any) -> None:
    defaults = GenerationConfig()
    standard = defaults._get_default_generation_params() if hasattr(defaults, "_get_default_generation_params") else {}
    for option, kinds in _IGNORED.items():
        value = getattr(config, option, None)
        if value is not None and not isinstance(value, kinds):
            raise bad_value(option, value, "left out under semspec")
        if not _is_one_of(value, (None, getattr(defaults, option, None), standard.get(option))):
            warn_once(
                f"{option} has no effect under semspec: num_draft_tokens is the one knob for the length of drafts"
            )
