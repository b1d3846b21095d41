"""PEFT's adapters that are bound to the rows of a batch, or to places in a prompt, by hooks that one call sets."""

from functools import partial
from typing import Any

BOUND = {
    "adapter_names": "assigns an adapter to each row of the batch",
    "alora_offsets": "switches an adapter on at a place in each row's prompt (alora_invocation_tokens)",
}


def check_adapters(model: Any, scheme: Any, rows: int) -> None:
    """Refuse such adapters where rows leave, multiply or are read in blocks.

    Args:
        model: the target, as `generate` sees it inside PEFT's wrapper.
        scheme: the scheme's config.
        rows (`int`): of the batch.

    Raises:
        ValueError: names the option, and the way out.
    """
    found = {
        name for module in model.modules() for hook in module._forward_pre_hooks.values() for name in _bound(hook)
    }
    if rows == 1 and scheme.name in ("lossless", "easd") and scheme.num_chains == 1:
        found.discard("adapter_names")
    if not found:
        return
    for module in model.modules():  # which PEFT leaves behind after an error
        for key in [key for key, hook in module._forward_pre_hooks.items() if _bound(hook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    name = min(found)
    raise ValueError(
        f"{name} {BOUND[name]}, and under the scheme {scheme.name!r} rows leave, multiply, or are read several tokens "
        "at a time: choose one adapter for the whole call by set_adapter (one call for each adapter), or decode "
        "plainly with generate(..., semspec=None) and without assistant_model"
    )


def _bound(hook: Any) -> list[str]:
    """What a hook binds."""
    return [name for name in BOUND if hook.keywords.get(name)] if isinstance(hook, partial) else []
