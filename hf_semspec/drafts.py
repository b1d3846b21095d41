"""Draft models: quantized or cast copies of a target, vocabulary checks, and what one forward has to read."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from .notices import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUANTIZATIONS = ("nf4", "int8")
MAX_VOCABULARY_PADDING = 1024


def load_draft(
    source: str | PreTrainedModel,
    *,
    quantization: str | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a draft model, or make one from a loaded target: a quantized or cast copy of it.

    A copy is made in memory through the model class's own `from_pretrained`; nothing is written to disk, the copy
    shares no storage with `source`, and `source` stays as it is, also when loading fails. While it is made, the
    weights that change their dtype exist twice.

    Args:
        source (`str` or `PreTrainedModel`):
            A Hub id, a folder, or a loaded model that is not itself quantized.
        quantization (`str`, *optional*):
            `"nf4"` (4-bit, QLoRA, arXiv 2305.14314) or `"int8"` (LLM.int8(), arXiv 2208.07339), both by bitsandbytes;
            none by default. Embeddings and the output head keep their dtype, as transformers leaves them.
        device (`str`, `int` or `torch.device`, *optional*):
            Where the draft lives. Default: the device of the model given, or transformers' own choice for a name.
        dtype (`torch.dtype`, *optional*):
            The dtype of what is not quantized, and the one quantized layers compute in. Default: that of the model
            given; for a name that of its checkpoint, with quantized layers computing in bfloat16.
        kwargs:
            Passed to `from_pretrained` (`revision`, `trust_remote_code`, `attn_implementation`, ...).

    Returns:
        `PreTrainedModel`: in eval mode. Never call `.to()` on a quantized one: pass `device` here.

    Raises:
        ValueError: an unknown quantization, or a model that cannot be copied that way; the message says what to pass.
        ImportError: `quantization` without bitsandbytes; the message names the extra.
    """
    if quantization is not None:
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization={quantization!r}: must be None or one of {', '.join(QUANTIZATIONS)}.")
        if "quantization_config" in kwargs:
            raise ValueError("Pass either `quantization` or `quantization_config`, not both.")
        if find_spec("bitsandbytes") is None:
            raise ImportError(f'quantization="{quantization}" needs bitsandbytes: pip install "hf-semspec[quant]"')
    if isinstance(source, PreTrainedModel):
        return _copy_model(source, quantization, device, dtype, kwargs)
    if quantization is not None:
        kwargs["quantization_config"] = _quantization_config(quantization, dtype or torch.bfloat16)
    if device is not None:
        kwargs["device_map"] = {"": device}
    draft = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if dtype is None else dtype, **kwargs)
    return draft.eval()


def _quantization_config(quantization: str, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)


def _copy_model(
    model: PreTrainedModel,
    quantization: str | None,
    device: str | int | torch.device | None,
    dtype: torch.dtype | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    """A quantized or cast copy of `model`: its config and state through `from_pretrained`, then unshared."""
    if quantization is None and dtype is None and "quantization_config" not in kwargs:
        raise ValueError(
            "A loaded model drafts for itself only in a cheaper form: pass `quantization` "
            '("nf4" or "int8") or `dtype` (for example torch.bfloat16), or the name of another model.'
        )
    config = copy.deepcopy(model.config)
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
        if str(getattr(method, "value", method)) != "gguf" or _is_packed(model):
            raise ValueError(
                "The model is quantized already and cannot be copied in another form: pass the name or folder of "
                "its unquantized checkpoint instead."
            )
        # transformers unpacks GGUF weights as it loads them; the entry would make the copy look for the file again.
        del config.quantization_config
    elif _is_packed(model):
        raise ValueError(
            "The model holds packed (integer) weights and cannot be copied in another form: pass the name or folder "
            "of its unquantized checkpoint instead."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("The model has adapters loaded: merge them first, or pass the name of the draft model.")
    if any(tensor.device.type == "meta" for tensor in model.state_dict().values()):
        raise ValueError("Part of the model is offloaded: pass its name or folder instead of the loaded model.")

    dtype = dtype or model.dtype
    if quantization is not None:
        kwargs["quantization_config"] = _quantization_config(quantization, dtype)
    kwargs.setdefault("attn_implementation", model.config._attn_implementation)
    device = model.device if device is None else device
    draft = type(model).from_pretrained(
        None,
        config=config,
        state_dict=model.state_dict(),
        dtype=dtype,
        device_map={"": device},
        **kwargs,
    )
    _unshare(draft, model)
    draft.config._name_or_path = model.config._name_or_path
    if model.generation_config is not None:
        draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def _is_packed(model: nn.Module) -> bool:
    return any(type(p.data) is not torch.Tensor or not p.is_floating_point() for p in model.parameters())


def _unshare(draft: nn.Module, model: nn.Module) -> None:
    """Give `draft` its own storage wherever loading took over a tensor of `model` unchanged."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for tensor in (*draft.parameters(), *draft.buffers()):
        if tensor.untyped_storage().data_ptr() in taken:
            tensor.data = tensor.data.clone()


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of ids `model` scores: `vocab_size` of its text config, padding rows included."""
    return int(model.config.get_text_config().vocab_size)


def check_vocabularies(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    allow_foreign: bool = False,
) -> bool:
    """Check whether an id means the same token to target and draft; runs no forward.

    With both tokenizers their vocabularies decide: they are one if they agree on every id that both have. Without
    them, sizes that differ by at most 1,024 count as one padded vocabulary (one warning a process and pair of sizes).

    Args:
        model (`PreTrainedModel`): the target.
        draft (`PreTrainedModel`): the draft.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): the draft's tokenizer.
        allow_foreign (`bool`): do not raise where they are foreign.

    Returns:
        `bool`: whether the vocabularies are known to be foreign, which only `allow_foreign` allows.

    Raises:
        ValueError: foreign vocabularies, or sizes too far apart to tell; the message says what to pass.
    """
    if assistant_tokenizer is not None and tokenizer is None:
        raise ValueError("`assistant_tokenizer` was passed without `tokenizer`: pass both, or neither.")
    if tokenizer is not None and assistant_tokenizer is not None:
        clash = first_clash(tokenizer, assistant_tokenizer)
        if clash is not None and not allow_foreign:
            raise ValueError(
                f"The draft's tokenizer is foreign to the target's: id {clash[0]} is {clash[1]!r} to the target and "
                f"{clash[2]!r} to the draft. Only lossless and easd draft with the tokens that both have, and parse "
                "takes text across; smc, which keeps every drafted token, could never reach the others: pass a draft "
                'of the target\'s family, or load_draft(model, quantization="nf4").'
            )
        return clash is not None
    size, draft_size = vocabulary_size(model), vocabulary_size(draft)
    if size == draft_size:
        return False
    if abs(size - draft_size) > MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"The target scores {size} ids and the draft {draft_size}: too far apart to be one padded vocabulary. "
            "Pass `tokenizer` and `assistant_tokenizer`, which decide what the two share, or a draft with the "
            "target's tokenizer."
        )
    warn_once(
        f"The target scores {size} ids and the draft {draft_size}: taken for one vocabulary padded to different "
        "sizes. Pass `tokenizer` and `assistant_tokenizer` to have it checked."
    )
    return False


def once_a_pair(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what `compare` says of two tokenizers while both live and hold as many tokens: to read two
    vocabularies of 100,000 tokens takes longer than a round of decoding."""
    known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()

    @functools.wraps(compare)
    def call(tokenizer: Any, other: Any, *sizes: int) -> Any:
        if tokenizer is None or other is None:
            return compare(tokenizer, other, *sizes)
        found = known.setdefault(tokenizer, WeakKeyDictionary()).setdefault(other, {})
        key = (len(tokenizer), len(other), *sizes)
        if key not in found:
            found[key] = compare(tokenizer, other, *sizes)
        return found[key]

    return call


@once_a_pair
def first_clash(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, str, str] | None:
    """The lowest id that both tokenizers have with different tokens: (id, target's token, draft's token); `None`
    where there is none, or not both tokenizers."""
    if tokenizer is assistant_tokenizer or tokenizer is None or assistant_tokenizer is None:
        return None
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    draft_tokens = {index: token for token, index in assistant_tokenizer.get_vocab().items()}
    clashes = [index for index in tokens.keys() & draft_tokens.keys() if tokens[index] != draft_tokens[index]]
    if not clashes:
        return None
    return min(clashes), tokens[min(clashes)], draft_tokens[min(clashes)]


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one forward of `model` reads: parameters and buffers as stored, quantized ones packed.

    Embedding tables that are only gathered from (the input embedding where it is not tied to the head, learned
    positions) are left out, and so is the encoder of an encoder-decoder, which runs once a call. All experts of a
    mixture count, though a forward of few tokens reads a part of them.
    """
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    gathered = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head_weight
    }
    weights = [*model.parameters(), *model.buffers()]
    if getattr(model.config, "is_encoder_decoder", False):
        encoder, decoder = model.get_encoder(), model.get_decoder()
        decoded = {id(weight) for weight in (*decoder.parameters(), *decoder.buffers(), head_weight)}
        gathered |= {id(weight) for weight in (*encoder.parameters(), *encoder.buffers())} - decoded
    return sum(_stored_bytes(weight) for weight in weights if id(weight) not in gathered)


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` with the scales a quantized one carries (bitsandbytes' attributes, tensor subclasses)."""
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if type(tensor) is not nn.Parameter and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield state.absmax
        state = getattr(state, "state2", None)
    scales = getattr(tensor, "SCB", None)
    if isinstance(scales, torch.Tensor):
        yield scales
