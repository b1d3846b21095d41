"""Drafts made of a loaded target: its first layers, which share its weights, and what a copy of it is made from."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

ELSE = 'pass another draft, or take a quantized copy: load_draft(model, quantization="nf4")'


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the first `layers` layers of `model` with its embeddings, last norm and head.

    It is a new object of the same class that holds the modules of `model` itself: the same weights, quantized or not,
    the same adapters and hooks. Its config, and with it what it keeps in a cache, is its own.

    Args:
        model (`PreTrainedModel`): a decoder whose layers stand in one list.
        layers (`int`): at least 1, and fewer than `model` has.

    Raises:
        ValueError: a number out of range, or a model that cannot be cut; the message says what to pass.
    """
    total = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if total is None or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is no decoder whose layers could be cut: {ELSE}.")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < total:
        raise ValueError(f"layers={layers!r}: must be a number from 1 to {total - 1}, since the model has {total}.")
    config = copy.deepcopy(model.config)
    _cut(config.get_text_config(decoder=True), layers, total)
    with torch.device("meta"):
        draft = type(model)(config)
    _adopt(draft, model, _list_of_layers(draft, model, layers, total).split("."), layers)
    draft.generation_config = copy.deepcopy(model.generation_config)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            setattr(draft, name, getattr(model, name))
    return draft


def _cut(config: Any, layers: int, total: int) -> None:
    """Leave `layers` layers in `config`, also in what it lists for each of them (`layer_types` and the like)."""
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == total:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def _list_of_layers(draft: nn.Module, model: nn.Module, layers: int, total: int) -> str:
    """The name of the one list that has `layers` modules in `draft` and `total` in `model`."""
    lists = {name: len(part) for name, part in draft.named_modules() if isinstance(part, nn.ModuleList)}
    full = {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    other: list[str] = [name for name, length in lists.items() if full.get(name, length) != length]
    if len(other) != 1 or (lists[other[0]], full[other[0]]) != (layers, total):
        raise ValueError(f"{type(model).__name__} has no plain list of layers that could be cut: {ELSE}.")
    return other[0]


def _adopt(draft: nn.Module, model: nn.Module, path: list[str], layers: int) -> None:
    """Put the modules of `model` in the place of `draft`'s, but for those on the `path` to the list of layers."""
    draft.training = model.training
    for name, parameter in model.named_parameters(recurse=False):
        draft.register_parameter(name, parameter)
    for name, buffer in model.named_buffers(recurse=False):
        draft.register_buffer(name, buffer)
    if not path:
        for index in range(layers):
            draft[index] = model[index]  # type: ignore[index, operator]
        return
    for name, own in list(draft.named_children()):
        if name != path[0]:
            theirs = getattr(model, name)
            _check_shapes(own, theirs)
            setattr(draft, name, theirs if _holds_weights(theirs) else copy.deepcopy(theirs))
    _adopt(getattr(draft, path[0]), getattr(model, path[0]), path[1:], layers)


def _holds_weights(module: nn.Module) -> bool:
    """Whether `module` must be shared. One without weights may keep a state that changes with the text (rotary
    embeddings that adapt to its length), which the draft must not change for the target."""
    return next(module.parameters(), None) is not None or hasattr(module, "_hf_hook")


def _check_shapes(own: nn.Module, theirs: nn.Module) -> None:
    shapes = {name: weight.shape for name, weight in own.named_parameters()}
    for name, weight in theirs.named_parameters():
        if weight.is_floating_point() and shapes.get(name, weight.shape) != weight.shape:
            raise ValueError(f"{type(theirs).__name__} has weights for every layer ({name}), so none can go: {ELSE}.")


def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state of `model` with its active adapters merged into it; `model` stays as it is.

    Layers with adapters are copied one by one, everything else is what `model.state_dict()` holds.

    Raises:
        ValueError: adapters that cannot be merged; the message says what to pass.
    """
    plain: dict[str, torch.Tensor] = model.state_dict()
    if find_spec("peft") is None:
        return plain
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    adapted: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        outermost = not any(name.startswith(f"{other}.") for other in adapted)
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and outermost:
            adapted[name] = module
    state = {key: tensor for key, tensor in plain.items() if not any(key.startswith(f"{name}.") for name in adapted)}
    for name, module in adapted.items():
        state.update({f"{name}.{key}": tensor for key, tensor in _merged(name, module).state_dict().items()})
    return state


def _merged(name: str, module: Any) -> nn.Module:
    """A plain module that computes what `module`, with its adapters, does."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return module.original_module  # type: ignore[no-any-return]
        return module.modules_to_save[module.active_adapters[0]]  # type: ignore[no-any-return]
    try:
        if not isinstance(module, BaseTunerLayer):
            raise NotImplementedError
        layer = copy.deepcopy(module)
        if not layer.disable_adapters:
            layer.merge()
        base: nn.Module = layer.get_base_layer()
        return base
    except NotImplementedError:
        raise ValueError(
            f"The adapters at {name} ({type(module).__name__}) cannot be merged into a copy: pass a model merged by "
            "PEFT's merge_and_unload(), or draft with layers= of it, which shares them."
        ) from None
