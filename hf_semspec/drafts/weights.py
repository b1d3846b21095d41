"""Bytes of weights: what one forward of a model reads, and what a draft takes beside its target."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel


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
