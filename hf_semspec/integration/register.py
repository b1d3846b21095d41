"""The seam in transformers: one generation mode, one method, five narrow wrappers that hand on every call that is
not ours."""

import contextlib
import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.pipelines import base as pipelines_base

from ..configuration import scheme_from_dict
from ..engine.cache import text_config
from ..engine.encoders import RAW_IMAGES, raw_images
from ..engine.outputs import open_records, publish
from ..engine.ranks import in_step
from ..engine.request import Request
from ..engine.stateful import check_processors
from ..engine.stopping import OneEnd
from ..schemes.table import SCHEMES
from .adapters import check_adapters
from .options import check_options
from .pipelines import load_assistant
from .preparation import check_preparation

MODE = "semspec"
METHOD = "_semspec_decoding"
# Since 5.24 it encodes images as well, and drops them, which the draft still needs.
ENCODE = "_maybe_prepare_encoder_kwargs_for_generation"
# Whether `generate` is at its token healing, where it calls itself for one plain token, under the model's own config.
_healing = ContextVar("healing", default=False)
_lock = threading.Lock()
_originals: dict[tuple[Any, str], Any] = {}


def register() -> None:
    """Teach `generate` and pipelines the schemes. Runs at import; calling it again changes nothing; `unregister`
    undoes it.

    Calls without a `semspec` entry in their generation config, and pipelines that stock can build, run stock code
    only.
    """
    with _lock:
        if _originals:
            return
        generation_utils.GENERATION_MODES_MAPPING[MODE] = METHOD
        setattr(generation_utils.GenerationMixin, METHOD, _semspec_decoding)
        _wrap(GenerationConfig, "get_generation_mode", _get_generation_mode)
        _wrap(generation_utils.GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
        _wrap(generation_utils.GenerationMixin, "heal_tokens", _heal_tokens)
        if hasattr(generation_utils.GenerationMixin, ENCODE):
            _wrap(generation_utils.GenerationMixin, ENCODE, _encode)
        _wrap(pipelines_base, "load_assistant_model", load_assistant)


def unregister() -> None:
    """Put transformers back as it was before `register`."""
    with _lock:
        if not _originals:
            return
        for (owner, name), original in _originals.items():
            setattr(owner, name, original)
        _originals.clear()
        del generation_utils.GENERATION_MODES_MAPPING[MODE]
        delattr(generation_utils.GenerationMixin, METHOD)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


def _get_generation_mode(original: Callable[..., Any], config: Any, assistant_model: Any = None) -> Any:
    if getattr(config, "semspec", None) is not None and not config.is_assistant and not _healing.get():
        return MODE
    return original(config, assistant_model)


def _heal_tokens(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _healing.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _healing.reset(token)


def _validate_generation_mode(
    original: Callable[..., Any], model: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any
) -> None:
    if generation_mode != MODE:
        original(model, generation_mode, generation_config, generation_mode_kwargs)
        return
    scheme = scheme_from_dict(generation_config.semspec)
    check_options(model, scheme, generation_config, generation_mode_kwargs)


def _encode(
    original: Callable[..., Any],
    model: Any,
    inputs_tensor: Any,
    model_kwargs: Any,
    model_input_name: Any,
    generation_config: Any,
) -> Any:
    images = {}
    if getattr(generation_config, "semspec", None) is not None and not generation_config.is_assistant:
        images = raw_images(scheme_from_dict(generation_config.semspec), model_kwargs)
    prepared = original(model, inputs_tensor, model_kwargs, model_input_name, generation_config)
    return {**prepared, RAW_IMAGES: images} if images else prepared


def _semspec_decoding(
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    inputs_tensor: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode with the scheme that `generation_config.semspec` names; `generate` calls this as it calls its own
    loops, and looks at its signature for what to pass."""
    records = open_records()
    scheme = scheme_from_dict(generation_config.semspec)
    ending = None if streamer is None else OneEnd(streamer)
    eos = generation_config._eos_token_tensor
    ends = [] if eos is None else eos.flatten().tolist()
    try:
        with in_step(model, assistant_model, synced_gpus):
            check_adapters(model, scheme, len(input_ids))
            for role, one in (("target", model), ("draft", assistant_model)):
                if one is not None:
                    mask = None if model.config.is_encoder_decoder else model_kwargs.get("attention_mask")
                    check_preparation(role, one, input_ids, mask, generation_config.max_length)
            request = Request(
                model=model,
                draft=assistant_model,
                scheme=scheme,
                generation_config=generation_config,
                input_ids=input_ids,
                processors=check_processors(logits_processor, input_ids, text_config(model).vocab_size, ends),
                criteria=stopping_criteria,
                streamer=ending,
                model_kwargs=model_kwargs,
                tokenizer=tokenizer,
                assistant_tokenizer=assistant_tokenizer,
                inputs_tensor=inputs_tensor,
                trace=bool(getattr(generation_config, "trace", False)),
            )
            output, stats = SCHEMES[scheme.name].decode(request)
    except BaseException:
        if ending is not None:
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                ending.end()
        raise
    if request.trace:
        output.trace.stats, output.trace.tokenizer = stats.to_dict(), tokenizer
        output.trace.model_name = getattr(model.config, "_name_or_path", "") or ""
    publish(stats, records)
    return output
