"""Hooks on models: which count, and those that take hidden states out of a forward."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

CAPTURING = "transformers.utils.output_capturing"


def is_hooked(model: Any) -> bool:
    """Whether any module runs hooks, accelerate's (offloading, several devices) included.

    Those by which hidden states are taken out of a model do not count: transformers' own stay once it was asked for
    them, and do nothing while nobody asks; ours is there while a forward of another thread is.
    """
    return any(
        hasattr(module, "_hf_hook")
        or module._forward_pre_hooks
        or any(getattr(hook, "__module__", "") not in (CAPTURING, __name__) for hook in module._forward_hooks.values())
        for module in model.modules()
    )


def compute_device(model: Any) -> torch.device:
    """Where `model` takes its inputs; for one whose weights are offloaded, the device its hooks bring them to."""
    device: torch.device = model.device
    if device.type == "meta":
        hooked = (getattr(module, "_hf_hook", None) for module in model.modules())
        places = (getattr(hook, "execution_device", None) for hook in hooked)
        device = torch.device(next((place for place in places if place is not None), "cpu"))
    return device


def call_for_hidden(model: Any, arguments: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """A forward's output, and its last hidden states (batch, width, size).

    The module inside that gives these is asked for them. To ask transformers would leave hooks on the model, with
    which it can no longer be pickled: that is done only where the module is not known.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter's wrapper
    decoder = getattr(inner, "base_model", None)
    if not isinstance(decoder, nn.Module) or decoder is inner:
        output = model(**arguments, output_hidden_states=True)
        return output, output.hidden_states[-1]
    seen: list[torch.Tensor] = []
    thread = threading.get_ident()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            seen.append(output[0])

    handle = decoder.register_forward_hook(note)
    try:
        return model(**arguments), seen[-1]
    finally:
        handle.remove()


def decoder_layers(model: Any) -> tuple[nn.Module, Any] | None:
    """The embedding of `model` and its decoder layers; `None` where these are not found."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    embeddings = inner.get_input_embeddings()
    lists = [
        module
        for module in inner.modules()
        if isinstance(module, nn.ModuleList) and len(module) == inner.config.get_text_config().num_hidden_layers
    ]
    return (embeddings, lists[0]) if lists and isinstance(embeddings, nn.Module) else None


def call_for_states(model: Any, arguments: dict[str, Any], ids: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """A forward's output, and its hidden states `ids` side by side, (batch, width, states * size).

    0 is the embedding, k the output of the k-th layer, no final norm in it. The modules that give these are asked for
    them: what `output_hidden_states=[k]` means depends on the version of transformers, and nothing else is kept so.
    """
    found = decoder_layers(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} shows no list of decoder layers, from which a head could read")
    embeddings, layers = found
    seen: dict[int, torch.Tensor] = {}
    thread = threading.get_ident()

    def noting(index: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                seen[index] = output[0] if isinstance(output, tuple) else output

        return note

    handles = []
    try:
        for index in set(ids):
            module = embeddings if index == 0 else layers[index - 1]
            handles.append(module.register_forward_hook(noting(index)))
        output = model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    device = seen[ids[-1]].device
    return output, torch.cat([seen[index].to(device) for index in ids], dim=-1)
