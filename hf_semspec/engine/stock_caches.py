"""Caches of transformers' own kinds: the caller's, what `generate` returns, and what a decoder has of its encoder."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, EncoderDecoderCache

from .cache import Cache, holds_keys, text_config


def length_of(cache: Cache) -> int:
    """Columns of the caller's cache.

    Raises:
        ValueError: it is filled, and has nothing that tells.
    """
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) or not cache.layers:
        return int(cache.get_seq_length())
    if cache.has_previous_state():
        raise ValueError(
            "the cache holds recurrent states alone, which do not tell how many tokens they have read: leave it out, "
            "and pass the whole text"
        )
    return 0


def holds_enough(cache: Cache, visible: torch.Tensor) -> bool:
    """Whether every sliding layer of the caller's `cache` still has all the tokens that its window shows.

    Such a layer keeps its last columns, padding included, while a window here counts tokens: a row with holes in
    `visible` (batch, columns) may lack some.
    """
    lengths = visible.sum(dim=1)
    kept = {layer.keys.shape[2] for layer in cache.layers if holds_keys(layer)} - {visible.shape[1]}
    return all(bool((visible[:, -width:].sum(dim=1) >= lengths.clamp(max=width)).all()) for width in kept)


def rows_of(cache: Cache, rows: Sequence[int] | None = None) -> Cache:
    """Those rows of a cache (all by default) as one of its own, which may grow without changing `cache`: its layers
    put a new tensor in the place of the old one."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        if holds_keys(layer) and rows is not None:
            layer.keys, layer.values = layer.keys[list(rows)], layer.values[list(rows)]
        for name, values in vars(layer).items():
            if isinstance(values, dict):  # of a recurrent layer, which writes to them in place
                setattr(layer, name, {key: _part(value, rows) for key, value in values.items()})
    return other


def _part(value: Any, rows: Sequence[int] | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if rows is None else value[list(rows)]


def recurrent_states(layer: Any) -> dict[tuple[str, int], torch.Tensor]:
    """What a recurrent layer of a cache of transformers' keeps, as [`RecurrentRow`] has it."""
    kinds = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
    return {(kind, index): state for kind, own in kinds.items() for index, state in own.items() if state is not None}


def put_recurrent_states(cache: Cache, index: int, states: dict[tuple[str, int], torch.Tensor]) -> None:
    """Let the layer `index` of a cache of transformers' keep `states`."""
    for (kind, number), state in states.items():
        if kind == "conv":
            cache.layers[index].has_previous_state[number] = False
            cache.update_conv_state(state, index, number, conv_kernel_size=state.shape[-1])
        else:
            cache.update_recurrent_state(state, index, number)


def new_dynamic_cache(model: Any) -> DynamicCache:
    """An empty cache of the kind plain `generate` makes for `model`."""
    return DynamicCache(config=text_config(model))


def made_up_cache(length: int, device: torch.device) -> DynamicCache:
    """A cache of one layer that holds `length` tokens of nothing, for whoever only asks how long it is."""
    return crossed_cache([(torch.zeros((1, 1, length, 1), device=device),) * 2] if length else [])


def given_cache(model_kwargs: dict[str, Any]) -> Cache | None:
    """The cache among `generate`'s keyword arguments: the caller's, or an empty one that `generate` made.

    Raises:
        ValueError: it is of a kind that cannot be taken over.
    """
    cache = next(
        (model_kwargs[name] for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None), None
    )
    if cache is None:
        return None
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        raise ValueError(
            f"a cache of type {type(cache).__name__} is not supported by semspec: pass a DynamicCache (as generate "
            "returns) or none"
        )
    return cache


def crossed_cache(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """What a decoder's layers have of the encoder: keys and values, one pair a layer, none before the first
    forward."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    return cache


def paired_caches(own: Cache, crossed: DynamicCache) -> EncoderDecoderCache:
    """`own` for a decoder's attention to its text, beside what it has of its encoder."""
    return EncoderDecoderCache(own, crossed)


def states_of(cache: Cache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of the layer `index`, (batch, heads, columns, head_dim) each."""
    layer = cache.layers[index]
    return layer.keys, layer.values


def cross_states(crossed: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of the encoder, one pair a layer."""
    return [(layer.keys, layer.values) for layer in crossed.layers if layer.is_initialized]
