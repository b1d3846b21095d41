"""Draft models: quantized or cast copies of a target, vocabulary checks, and what one forward has to read."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .notices import warn_once
from .quantizations import (
    MAKERS,
    check_quantization,
    default_dtype,
    missing_reader,
    quantization_config,
    quantize,
)
from .self_drafts import first_layers, merged_state
from .wrappers import inner_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_VOCABULARY_PADDING = 1024


def load_draft(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    quantization: str | None = None,
    layers: int | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a draft model, or make one from a loaded target: a quantized or cast copy of it, or its first layers.

    A copy is made in memory through the model class's own `from_pretrained`; nothing is written to disk, the copy
    shares no storage with `source`, and `source` stays as it is, also when loading fails. While it is made, the
    weights that change their dtype exist twice. Adapters (PEFT) on `source` are merged into the copy's weights.

    Args:
        source (`str`, `os.PathLike` or `PreTrainedModel`):
            A Hub id, a folder, or a loaded model, also one wrapped by PEFT. One that is quantized itself has only
            its first layers to give.
        quantization (`str`, *optional*):
            `"nf4"` (4-bit, QLoRA, arXiv 2305.14314), `"fp4"` or `"int8"` (LLM.int8(), arXiv 2208.07339), all by
            bitsandbytes; `"torchao-int8"` or `"torchao-int4"` (weights only, by torchao); `"hqq"` (4-bit, by HQQ);
            none by default. Embeddings and the output head keep their dtype, as transformers leaves them.
        layers (`int`, *optional*):
            Draft with the first so many layers of the loaded model `source`, its last norm and its head. Alone, the
            draft is a second model on the same modules: no weight is copied, adapters and hooks are shared, and what
            moves or trains the draft moves or trains the target. With any other argument a copy of these layers.
        device (`str`, `int` or `torch.device`, *optional*):
            Where the draft lives. Default: the device of the model given, or transformers' own choice for a name.
        dtype (`torch.dtype`, *optional*):
            The dtype of what is not quantized, and the one quantized layers compute in. Default: that of the model
            given; for a name that of its checkpoint, with bitsandbytes' 4-bit layers computing in bfloat16.
        kwargs:
            Passed to `from_pretrained` (`gguf_file`, `revision`, `trust_remote_code`, `attn_implementation`, ...).

    Returns:
        `PreTrainedModel`: in eval mode; with `layers` alone in the mode of `source`. Never call `.to()` on a
        quantized one: pass `device` here.

    Raises:
        ValueError: an unknown quantization, or a model that cannot be copied or cut that way; the message says what
            to pass.
        ImportError: a package is missing that `quantization` or the checkpoint needs; the message names the line for
            pip.
    """
    if quantization is not None:
        check_quantization(quantization, kwargs)
    if isinstance(source, (str, os.PathLike)):
        if layers is not None:
            raise ValueError(
                f"layers={layers!r} cuts a loaded model: load the target and pass it instead of its name."
            )
        return _load(source, quantization, device, dtype, kwargs)
    model = inner_model(source)
    if layers is not None:
        model = first_layers(model, layers)
        if quantization is None and device is None and dtype is None and not kwargs:
            return model
    elif quantization is None and dtype is None and "quantization_config" not in kwargs:
        raise ValueError(
            "A loaded model drafts for itself only in a cheaper form: pass `quantization` "
            f"({', '.join(MAKERS)}), `dtype` (for example torch.bfloat16) or `layers`, or the name of another model."
        )
    return _copy_model(model, quantization, device, dtype, kwargs)


def _load(
    source: str | os.PathLike[str],
    quantization: str | None,
    device: str | int | torch.device | None,
    dtype: torch.dtype | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    """The model of a Hub id or a folder, quantized while it is loaded or right after."""
    options = dict(kwargs)
    if quantization is not None:
        made = quantization_config(quantization, dtype or default_dtype(quantization), device)
        options |= {} if made is None else {"quantization_config": made}
    if device is not None:
        options["device_map"] = {"": device}
    try:
        draft = AutoModelForCausalLM.from_pretrained(source, dtype="auto" if dtype is None else dtype, **options)
    except (ImportError, RuntimeError, ValueError) as error:
        missing = missing_reader(source, kwargs)
        if missing is None:
            raise
        raise ImportError(missing) from error
    if quantization == "hqq":
        quantize(draft, draft.dtype)
    return draft.eval()


def _copy_model(
    model: PreTrainedModel,
    quantization: str | None,
    device: str | int | torch.device | None,
    dtype: torch.dtype | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    """A quantized or cast copy of `model`: its config and state through `from_pretrained`, then unshared."""
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
    if any(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "Part of the model is offloaded: pass its name or folder instead of the loaded model, or `layers` alone."
        )

    dtype = dtype or model.dtype
    device = model.device if device is None else device
    options = {"attn_implementation": model.config._attn_implementation, **kwargs}
    if quantization is not None:
        made = quantization_config(quantization, dtype, device)
        options |= {} if made is None else {"quantization_config": made}
    draft = type(model).from_pretrained(
        None,
        config=config,
        state_dict=merged_state(model),
        dtype=dtype,
        device_map={"": device},
        **options,
    )
    if quantization == "hqq":
        quantize(draft, dtype)
    _unshare(draft, model)
    draft.config._name_or_path = model.config._name_or_path
    if model.generation_config is not None:
        draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def _is_packed(model: nn.Module) -> bool:
    return any(type(p.data) is not torch.Tensor or not p.is_floating_point() for p in model.parameters())


def _unshare(draft: nn.Module, model: nn.Module) -> None:
    """Give `draft` its own storage wherever loading took over a tensor of `model` unchanged."""
    taken = _storages(model)
    for tensor in (*draft.parameters(), *draft.buffers()):
        # A quantized tensor (a subclass of torch's) was made anew.
        if type(tensor.data) is torch.Tensor and tensor.untyped_storage().data_ptr() in taken:
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
                "takes text across; smc and semantic keep drafted tokens as they are: pass a draft "
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
    if getattr(model.config, "is_encoder_decoder", False):
        encoder, decoder = model.get_encoder(), model.get_decoder()
        decoded = {id(weight) for weight in (*decoder.parameters(), *decoder.buffers(), head_weight)}
        gathered |= {id(weight) for weight in (*encoder.parameters(), *encoder.buffers())} - decoded
    weights = (part for part in _stored(model) if id(part[0]) not in gathered)
    return sum(part.numel() * part.element_size() for weight, parts in weights for part in parts)


def own_bytes(draft: nn.Module, model: nn.Module) -> int:
    """Bytes that `draft` takes beside `model`: all its storages but those that `model` has too."""
    storages = _storages(draft)
    return sum(storages[place] for place in storages.keys() - _storages(model).keys())


def _storages(model: nn.Module) -> dict[int, int]:
    """Bytes of every storage that holds a weight of `model`, by its address."""
    parts = [part for _, parts in _stored(model) for part in parts if part.device.type != "meta"]
    return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}


def _stored(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Every parameter and buffer of `model`, with the tensors that it is stored as."""
    for weight in (*model.parameters(), *model.buffers()):
        yield weight, list(_parts(weight))
    for module in model.modules():
        scales = getattr(module, "meta", None)
        for scale in scales.values() if isinstance(scales, dict) else ():  # HQQ's, beside its weight
            if isinstance(scale, torch.Tensor):
                yield scale, [scale]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`tensor` with the scales a quantized one carries (bitsandbytes' attributes, tensor subclasses)."""
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
