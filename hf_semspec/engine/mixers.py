"""Which modules of a model keep a recurrent state, and whether it can be put back: found out once for each model."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .cache import Cache, cache_argument, text_config
from .recurrent import RecurrentCache
from .sources import Source

# Types of layers with a state that does not grow with the text, and of those that keep nothing at all.
RECURRENT = {"linear_attention", "conv", "hybrid"}
STATELESS = {"mlp", "moe"}
# How far logits may be from those of single steps, in standard deviations of the logits: at the worst of all places;
# in half precision, where rounding may send a token to other experts, at the middle one.
TOLERANCE, HALF_TOLERANCE = 0.02, 0.3
# How far the output of a mixer may be from that of single steps: a share of what its state does, and for rounding at
# least one of its size.
OF_STATE, ROUNDING = 0.5, 1e-4

_CALLED = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
_found: "weakref.WeakKeyDictionary[nn.Module, dict[int, nn.Module]]" = weakref.WeakKeyDictionary()
_refused: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def has_recurrent_layers(model: Any) -> bool:
    """Whether `model` has layers with a state, and a cache is what they keep it in."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return not RECURRENT.isdisjoint(kinds) and hasattr(Cache, "get_conv_state")


def mixers_of(model: Any, reader: Callable[..., Any]) -> dict[int, nn.Module]:
    """The modules that keep the states of recurrent layers, by the layer's index; none in most models.

    The first time they are looked for in one forward over two tokens, and a text of eight is read in blocks, of which
    parts are taken back, and in single steps, to see whether both give the same.

    Args:
        reader: [`CachedModel`].

    Raises:
        ValueError: they do not.
    """
    if not has_recurrent_layers(model):
        return {}
    if model not in _found and model not in _refused:
        _found[model] = _listened(model)
        try:
            reason = _reason(model, reader)
        except Exception as error:  # whatever a layer trips over, that is what is told
            reason = f"its layers could not be read in blocks ({type(error).__name__}: {error})"
        if reason is not None:
            del _found[model]
            _refused[model] = reason
    if model in _refused:
        raise ValueError(
            f"{type(model).__name__} cannot be rolled back after a rejected draft: {_refused[model]}. As the target: "
            "decode plainly with generate(..., semspec=None) and without assistant_model; as the draft: pass another"
        )
    return _found[model]


def _listened(model: Any) -> dict[int, nn.Module]:
    """The modules that ask a cache for states."""
    cache = _Listener(1, {})
    cache.plan(0, 2)
    given = {"input_ids": torch.ones((1, 2), dtype=torch.long, device=model.device), cache_argument(model): cache}
    with torch.no_grad(), cache.listening(model):
        model(**given, use_cache=True)
    return cache.mixers


def _reason(model: Any, reader: Callable[..., Any]) -> str | None:
    """Why `model` cannot be rolled back; `None` if it can."""
    if not _found[model]:
        return "its layers do not keep their states in the cache"
    read, errors = chunk_errors(model, reader)
    half = torch.finfo(model.dtype).bits <= 16
    close = (errors.median() <= HALF_TOLERANCE) if half else (errors.max() <= TOLERANCE)
    with torch.no_grad():
        goes_on = all(_goes_on(read.cache, layer) for layer in _found[model])
    return None if bool(close) and goes_on else "its layers do not go on from a state over several tokens"


def _goes_on(cache: RecurrentCache, layer: int) -> bool:
    """Whether a mixer takes its state into account when it reads the last block of `cache` at once."""
    block, before = cache.readings[-1].read[layer], cache.readings[-1].before[layer]
    last = max(before)[0]  # "recurrent", or "conv" where that is all
    whole = cache.mix(layer, block, before)
    forgetful = cache.mix(layer, block, {k: v.new_zeros(v.shape) if k[0] == last else v for k, v in before.items()})
    steps, state = [], before
    for place in range(block.shape[1]):
        steps.append(cache.mix(layer, block[:, place : place + 1], state))
        state = steps[-1][1]
    expected = torch.cat([output for output, _ in steps], dim=1)
    off, effect = ((output - expected).abs().mean() for output, _ in (whole, forgetful))
    rounding = max(ROUNDING, torch.finfo(expected.dtype).eps)
    return bool(off <= OF_STATE * effect + rounding * expected.abs().mean())


def chunk_errors(model: Any, reader: Callable[..., Any]) -> tuple[Any, torch.Tensor]:
    """What has read blocks, partly taken back, and how far its logits are from those of single steps.

    Returns:
        The reader, and the mean absolute difference at each of ten places, in standard deviations of the logits.
    """
    size = int(text_config(model).vocab_size)
    text = (torch.arange(16).view(2, 8) * 5 + 3) % size
    single, read = (reader(model, 2, 8, Source(RecurrentCache(2, _found[model]))) for _ in range(2))
    steps = [single.feed(text[:, place : place + 1], [place + 1] * 2, 1) for place in range(8)]
    expected = torch.cat(steps, dim=1).float()  # (2, 8, vocabulary)
    padded = torch.stack([torch.cat([text[0, :2], text[0, :3]]), text[1, :5]])  # the first row has three tokens
    wrong = torch.stack([text[0, 3:6], (text[1, 5:8] + 1) % size])
    wrong[0, 2] = (wrong[0, 2] + 1) % size
    logits = [read.feed(padded, [3, 5], 1), read.feed(wrong, [6, 8], 3)[:, :2]]
    read.settle([5, 5])
    logits.append(read.feed(text[:, 5:8], [8, 8], 3))
    found = torch.cat(logits, dim=1).float()
    first, last = expected[0, [2, 3, 4, 5, 6, 7]], expected[1, [4, 5, 6, 7]]
    differences = torch.cat([found[0] - first, found[1, [0, 3, 4, 5]] - last])
    return read, differences.abs().mean(dim=-1) / expected.std()


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
