"""Hooks on models: which count, and the one that takes out the last hidden states of a forward."""

import threading
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
