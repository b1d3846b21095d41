"""Drafting that the schemes do not do themselves: what each is called, and the call that works for it."""

from typing import Any

from .heads import is_head

_STOCK = "transformers drafts with it itself: generate(..., {arguments}, semspec=None)"
_LOADED = "load_draft(folder, target=model) makes a draft of it that lossless and easd take"
_NONE = (
    'transformers has no decoding for it: pass a small causal LM or load_draft(model, quantization="nf4"), or look '
    'drafts up with SemSpecConfig("lossless", draft="ngram")'
)

# What a draft's class, architecture or config says -> what it is, why it is no draft by itself, and the way out.
_KINDS: dict[str, tuple[str, str]] = {
    "gemma": (
        "a Gemma assistant, which reads the target's keys and values",
        _STOCK.format(arguments="assistant_model=draft"),
    ),
    "dflash": (
        "a DFlash draft, which denoises a block from the target's hidden states",
        _STOCK.format(arguments='assistant_model=draft, speculation_type="dflash"'),
    ),
    "mtp": (
        "a multi-token prediction (MTP) head, which reads the target's hidden states",
        "transformers drafts with the heads in the target's own checkpoint: generate(..., use_mtp=True, "
        "semspec=None) without assistant_model",
    ),
    "eagle": ("an EAGLE draft, which reads the target's hidden states", _LOADED),
    "heads": ("a set of draft heads (Medusa, MLP speculator), which read the target's hidden states", _NONE),
}

# option of `generate` -> what to call instead of combining it with a scheme
STOCK_CALLS = {
    "use_mtp": "generate(..., use_mtp=True, semspec=None) without assistant_model runs it by itself",
    "speculation_type": 'generate(..., assistant_model=draft, speculation_type="dflash", semspec=None) runs it by '
    "itself",
    "prompt_lookup_num_tokens": 'SemSpecConfig("lossless", draft="ngram") looks drafts up, and generate(..., '
    "prompt_lookup_num_tokens=..., semspec=None) without assistant_model is stock's way",
    "assistant_early_exit": "generate(..., assistant_early_exit=..., semspec=None) without assistant_model runs it by "
    "itself",
    "assistant_ensemble_weight": "generate(..., assistant_model=draft, assistant_ensemble_weight=..., semspec=None) "
    "runs it by itself",
}


def other_kind(draft: Any) -> str | None:
    """What `draft` is and the call that works, if it drafts by other means than a causal LM's own law."""
    kind = None if is_head(draft) else _kind(draft)
    if kind is None:
        return None
    what, way_out = _KINDS[kind]
    return f"is {what}: {way_out}"


def check_head(draft: Any, model: Any, scheme: Any) -> None:
    """Refuse an EAGLE-3 head where it cannot draft.

    Raises:
        ValueError: names the option and the way out.
    """
    if not is_head(draft):
        return
    if scheme.name not in ("lossless", "easd"):
        raise ValueError(
            f"the scheme {scheme.name!r} lets its draft write by itself, and an EAGLE-3 head only follows the "
            "target's hidden states: pass a small causal LM, or take lossless or easd"
        )
    if getattr(scheme, "draft", "model") != "model" or getattr(scheme, "compile_draft", False):
        raise ValueError('an EAGLE-3 head drafts alone and uncompiled: leave out draft="ngram..." and compile_draft')
    shared = draft.get_input_embeddings()
    if not draft.config.own_embeddings and not any(shared is module for module in model.modules()):
        raise ValueError("the EAGLE-3 head was loaded for another model: load it with target=model")
    if draft.config.vocab_size != model.config.get_text_config().vocab_size:
        raise ValueError("the EAGLE-3 head was made for another vocabulary: load it with target=model")


def _kind(draft: Any) -> str | None:
    config = getattr(draft, "config", None)
    names = [
        type(draft).__name__,
        getattr(config, "model_type", None),
        getattr(config, "speculators_model_type", None),
    ]
    names += getattr(config, "architectures", None) or []
    text = " ".join(str(name) for name in names).lower()
    if "gemma" in text and "assistant" in text:
        return "gemma"
    if "dflash" in text or hasattr(config, "dflash_config") or hasattr(config, "target_layer_ids"):
        return "dflash"
    if "mtp" in text or "nextn" in text:
        return "mtp"
    if "eagle" in text or getattr(config, "draft_vocab_size", None) is not None:
        return "eagle"
    if "medusa" in text or "speculator" in text or getattr(config, "speculators_model_type", None) is not None:
        return "heads"
    return None
