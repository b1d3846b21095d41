"""Models whose own `prepare_inputs_for_generation` makes other inputs than transformers does: those are refused, since
the engine makes the inputs of each forward itself."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.generation import GenerationMixin

from ..engine.cache import CACHE_FIELD
from ..engine.encoders import decodes_encoded
from ..engine.hooks import compute_device
from ..engine.stock_caches import made_up_cache

NAME = "prepare_inputs_for_generation"


def check_preparation(role: str, model: Any) -> None:
    """Compare what the model's own preparation makes of a made-up text with what transformers' makes, for the first
    forward and one after it.

    Raises:
        ValueError: it makes something else; the message names what.
    """
    for theirs, ours in _prepared(model):
        changed = sorted(name for name, value in theirs.items() if not _same(name, value, ours.get(name)))
        if changed:
            raise ValueError(
                f"the {role} model {type(model).__name__} prepares {', '.join(changed)} in a {NAME} of its own, which "
                "semspec does not call: put it into the model's forward, or decode plainly with "
                "generate(..., semspec=None) and without assistant_model"
            )


def _prepared(model: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What the model's own preparation makes, and transformers', of two forwards; nothing where they are one."""
    own = getattr(model, NAME, None)
    usual = _usual(model)
    if own is None or getattr(own, "__func__", own) is usual:
        return
    for given in _texts(model):
        yield own(**given), usual(model, **given)


def _usual(model: Any) -> Callable[..., dict[str, Any]]:
    """The preparation that the engine stands in for: of a decoder that of all models, else that of the stock class."""
    stock = [
        kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.") and NAME in vars(kind)
    ]
    kind = stock[0] if stock and decodes_encoded(model) else GenerationMixin
    usual: Callable[..., dict[str, Any]] = vars(kind)[NAME] if NAME in vars(kind) else getattr(kind, NAME)
    return usual


def _texts(model: Any) -> Iterator[dict[str, Any]]:
    """The arguments for a prompt of three tokens, and for the token behind it."""
    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    device = compute_device(model)
    encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    for first, length in ((0, 3), (3, 4)):
        places = torch.arange(first, length, device=device)
        given = {
            "input_ids": torch.ones((1, length), dtype=torch.long, device=device),
            "attention_mask": torch.ones((1, length), dtype=torch.long, device=device),
            "next_sequence_length": length - first,
            "cache_position": places,
            "is_first_iteration": not first,
            CACHE_FIELD: made_up_cache(first, device),
        }
        given = {name: value for name, value in given.items() if name in known}
        given |= {} if encoder else {"position_ids": places.unsqueeze(0)}
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
