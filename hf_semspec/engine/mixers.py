"""Which modules of a model keep a recurrent state, and whether they can be put back."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .cache import Cache, cache_argument, text_config
from .recurrent import RecurrentCache

# Types of layers with a state that does not grow with the text, and of those that keep nothing at all.
RECURRENT = {"linear_attention", "conv", "hybrid"}
STATELESS = {"mlp", "moe"}
_CALLED = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")

_mixers: "weakref.WeakKeyDictionary[nn.Module, dict[int, nn.Module]]" = weakref.WeakKeyDictionary()


def has_recurrent_layers(model: Any) -> bool:
    """Whether `model` has layers with a state, and a cache is what they keep it in."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return not RECURRENT.isdisjoint(kinds) and hasattr(Cache, "update_conv_state")


def mixers_of(model: Any) -> dict[int, nn.Module]:
    """The modules that keep the states of recurrent layers, by the layer's index; none in most models.

    They are known by what they ask of the cache in one short forward, the first time.
    """
    if not has_recurrent_layers(model):
        return {}
    if model not in _mixers:
        _mixers[model] = _find(model)
    return _mixers[model]


def _find(model: Any) -> dict[int, nn.Module]:
    cache = _Listener(1, {})
    cache.plan(0, 2)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    with torch.no_grad(), cache.listening(model):
        model(**{"input_ids": ids, cache_argument(model): cache, "use_cache": True})
    return cache.mixers


class _Listener(RecurrentCache):
    """A cache that notes which module asks for states."""

    def __init__(self, batch: int, mixers: dict[int, nn.Module]) -> None:
        super().__init__(batch, mixers)
        self.running: list[nn.Module] = []

    def __getattribute__(self, name: str) -> Any:
        if name in _CALLED and (running := super().__getattribute__("running")):
            layer = running[-1].layer_idx
            self.mixers[layer] = running[-1]
            self.now.setdefault(layer, {})
        return super().__getattribute__(name)

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Follow which module runs that knows the index of its layer."""

        def enter(module: nn.Module, args: Any) -> None:
            self.running.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        hooks = []
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
