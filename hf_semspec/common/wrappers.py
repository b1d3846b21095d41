"""Models that PEFT wraps: looked into where a signature or a kind of adapter counts, but always called as they are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel


def unwrapped(model: Any) -> Any:
    """The model inside PEFT's wrapper, its adapters in its layers; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of `model.forward`; PEFT's passes on all that the model inside takes."""
    return inspect.signature(unwrapped(model).forward).parameters


def prompt_adapter(model: Any) -> str | None:
    """The kind of an active adapter that puts tokens in front of the prompt instead of changing layers; `None` where
    there is none.

    `generate` sees the model inside such a wrapper, which is known by the method that the wrapper lends it.
    """
    lender = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    for one in (model, lender):
        config = getattr(one, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            return type(config).__name__
    return None


def inner_model(source: Any) -> PreTrainedModel:
    """The model of transformers that `source` is or wraps.

    Raises:
        ValueError: neither, or adapters that are not in the layers; the message says what to pass.
    """
    kind = prompt_adapter(source)
    if kind is not None:
        raise ValueError(
            f"The adapter ({kind}) puts tokens in front of the prompt and changes no layer, so no draft can be made "
            "of it: pass the name of a draft model."
        )
    model = unwrapped(source)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(source).__name__} is neither the name of a model nor a model of transformers: unwrap it if it is "
            "wrapped."
        )
    return model
