"""Models whose own `prepare_inputs_for_generation` makes other inputs than transformers does: those are refused, since
the engine makes the inputs of each forward itself."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers.generation import GenerationMixin

from ..engine.cache import CACHE_FIELD
from ..engine.encoders import decodes_encoded
from ..engine.hooks import compute_device
from ..engine.stock_caches import made_up_cache

NAME = "prepare_inputs_for_generation"


def check_preparation(role: str, model: Any, ids: torch.Tensor, mask: torch.Tensor | None, longest: int) -> None:
    """Compare what the model's own preparation makes of the call's inputs with what transformers' makes: for the first
    forward, the one after it, and the last.

    Args:
        ids, mask: (rows, width), the caller's.
        longest (`int`): the width that the text may grow to.

    Raises:
        ValueError: it makes something else, or fails; the message names what.
    """
    own, usual = getattr(model, NAME, None), _usual(model)
    if own is None or getattr(own, "__func__", own) is usual:
        return
    if str(getattr(own, "__module__", "")).startswith("transformers."):
        longest = 0  # what a stock one does to long texts is known: see where rotary frequencies change
    for given in _forwards(model, ids, mask, longest):
        ours = usual(model, **given)
        try:
            theirs = own(**given)
        except Exception as error:
            raise _refusal(role, model, f"({type(error).__name__}: {error}) fails") from error
        changed = sorted(name for name, value in theirs.items() if not _same(name, value, ours.get(name)))
        if changed:
            raise _refusal(role, model, f"prepares {', '.join(changed)}")


def _refusal(role: str, model: Any, what: str) -> ValueError:
    return ValueError(
        f"the {role} model {type(model).__name__} {what} in a {NAME} of its own, which semspec does not call: put it "
        "into the model's forward, or decode plainly with generate(..., semspec=None) and without assistant_model"
    )


def _usual(model: Any) -> Callable[..., dict[str, Any]]:
    """The preparation that the engine stands in for: of a decoder that of all models, else that of the stock class."""
    stock = [
        kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.") and NAME in vars(kind)
    ]
    kind = stock[0] if stock and decodes_encoded(model) else GenerationMixin
    usual: Callable[..., dict[str, Any]] = vars(kind)[NAME] if NAME in vars(kind) else getattr(kind, NAME)
    return usual


def _forwards(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, longest: int) -> Iterator[dict[str, Any]]:
    """The arguments for the prompts, for the column behind them, and for the last one."""
    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    device, width = compute_device(model), ids.shape[1]
    encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    for first, length in ((0, width), (width, width + 1), (max(longest - 1, width), max(longest, width + 1))):
        text = functional.pad(ids.to(device), (0, length - width), value=1)
        own = torch.ones_like(ids) if mask is None else mask[:, -width:].to(ids.device)
        seen = functional.pad(own.to(device).long(), (0, length - width), value=1)
        given = {
            "input_ids": text,
            "attention_mask": seen,
            "next_sequence_length": length - first,
            "cache_position": torch.arange(first, length, device=device),
            "is_first_iteration": not first,
            CACHE_FIELD: made_up_cache(first, device),
        }
        given = {name: value for name, value in given.items() if name in known}
        given |= {} if encoder else {"position_ids": (seen.cumsum(dim=1) - 1).clamp(min=0)[:, first:]}
        yield given | {"use_cache": True} | ({"encoder_outputs": None} if encoder else {})


def _same(name: str, value: Any, usual: Any) -> bool:
    """Whether an input is the usual one, or says nothing about a text."""
    if value is None or value is usual:
        return True
    if not isinstance(value, torch.Tensor):
        return bool(value == usual) or name in ("use_cache", "logits_to_keep", CACHE_FIELD)
    if usual is None:
        return "token_type_ids" in name and not bool(value.any())
    # In three dimensions a token of text has the same position in each of the first.
    return bool(usual.shape == value.shape[-usual.dim() :] and (value == usual).all())
