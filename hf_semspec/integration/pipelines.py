"""Drafts for `pipeline(assistant_model=...)` in the two everyday cases where stock transformers cannot build the
pipeline."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..drafts.vocabulary import vocabulary_size


def load_assistant(
    original: Callable[..., Any], model: Any, assistant_model: Any, assistant_tokenizer: Any
) -> tuple[Any, Any]:
    """What `pipelines.base.load_assistant_model` does, and a way on where it raises though the pair fits.

    * A quantized draft given by name: stock casts it, which quantized models refuse; here it is loaded as it was
    saved. * Same vocabulary size but other special tokens (an EOS list in the target, one EOS in the draft): stock
      asks for a tokenizer that `generate` then refuses; here the pair counts as sharing one tokenizer.
    """
    if assistant_model is None or not model.can_generate():
        return original(model, assistant_model, assistant_tokenizer)  # type: ignore[no-any-return]
    if isinstance(assistant_model, str):
        config = AutoConfig.from_pretrained(assistant_model)
        if getattr(config, "quantization_config", None) is not None:
            assistant_tokenizer = AutoTokenizer.from_pretrained(assistant_model)
            saved_as = next(iter(config.architectures or ()), "")
            loader = getattr(transformers, saved_as, AutoModelForCausalLM)
            assistant_model = loader.from_pretrained(assistant_model, config=config, device_map=model.device)
    if not isinstance(assistant_model, str) and vocabulary_size(model) == vocabulary_size(assistant_model):
        special = ("eos_token_id", "pad_token_id", "bos_token_id")
        mine, theirs = model.config.get_text_config(), assistant_model.config.get_text_config()
        if any(getattr(mine, name, None) != getattr(theirs, name, None) for name in special):
            return assistant_model, None
    return original(model, assistant_model, assistant_tokenizer)  # type: ignore[no-any-return]
