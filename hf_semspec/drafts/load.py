"""Draft models: quantized or cast copies of a target, vocabulary checks, and what one forward has to read."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..common.wrappers import inner_model
from .copies import first_layers, merged_state
from .quantizations import MAKERS, check_quantization, default_dtype, missing_reader, quantization_config, quantize
from .weights import _storages

if TYPE_CHECKING:
    pass


def load_draft(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    target: PreTrainedModel | None = None,
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
        target (`PreTrainedModel`, *optional*):
            For an EAGLE-3 head, which drafts with it alone: the loaded model that the head was trained for. It is
            shared, not copied.
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
        from .heads.load import head_entries, load_head  # imports a model of transformers

        entries = None if "gguf_file" in kwargs else head_entries(source, kwargs)
        if entries is not None:
            if target is None:
                raise ValueError(
                    f"{source} is an EAGLE-3 head, which reads its target's hidden states: pass the loaded model, "
                    "load_draft(..., target=model)."
                )
            if quantization is not None or layers is not None:
                raise ValueError("A head is one small layer: leave out `quantization` and `layers`.")
            return load_head(source, entries, target, device, dtype, kwargs)
    if target is not None:
        raise ValueError(f"`target` is for EAGLE-3 heads, and {source!s:.80} is none: leave it out.")
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
