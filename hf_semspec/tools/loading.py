"""What users name, as it is loaded: dtypes and devices, drafts by name or made from the target, prompts as ids."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafts.load import load_draft
from ..drafts.quantizations import MAKERS
from .wheels import MODELS, located

# Drafts made from the target itself.
OWN_DRAFTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    **{name: {"quantization": name} for name in MAKERS},
}
FIRST_LAYERS = "layers:"
MADE = f"{', '.join(OWN_DRAFTS)} for a copy of the target, {FIRST_LAYERS}N for its first N layers"
MODEL_NAMES = f"a Hub id, a folder, or a model in wheels ({', '.join(MODELS)})"
DRAFT_HELP = f"the draft: {MODEL_NAMES}, or {MADE}"
TARGET_HELP = f"the target: {MODEL_NAMES}"


def load_named_draft(
    name: str, model: PreTrainedModel, *, device: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The draft that `name` stands for: a key of `OWN_DRAFTS`, `layers:N`, else a Hub id,
    a folder, or a model in wheels ([`wheels.MODELS`]).

    Args:
        name (`str`): what the user wrote.
        model (`PreTrainedModel`): the target, which own drafts are copies of.
        device (`str`, *optional*): where a draft loaded by name lives; a copy lives where the target does.
        dtype (`torch.dtype`, *optional*): of a draft loaded by name; as stored by default.
    """
    if is_own_draft(name):
        return load_draft(model, **own_draft(name))
    return load_draft(located(name), device=device, dtype=dtype)


def is_own_draft(name: str) -> bool:
    """Whether `name` is that of a draft made from the target itself."""
    return name in OWN_DRAFTS or name.startswith(FIRST_LAYERS)


def own_draft(name: str) -> dict[str, Any]:
    """What `load_draft` is told to make the draft `name` from the target.

    Raises:
        ValueError: no such draft.
    """
    number = name.removeprefix(FIRST_LAYERS)
    if name.startswith(FIRST_LAYERS) and number.isdecimal():
        return {"layers": int(number)}
    if name not in OWN_DRAFTS:
        raise ValueError(
            f"{name!r} is no draft made from the target: take {', '.join(OWN_DRAFTS)} or {FIRST_LAYERS}N."
        )
    return OWN_DRAFTS[name]


def device_by_name(name: str | None) -> str:
    """`name` once torch has been seen to know it; without one, cuda where there is one, else cpu.

    Raises:
        ValueError: torch does not know the device, or this machine lacks it.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def dtype_by_name(name: str) -> torch.dtype | str:
    """The dtype of torch called `name`, or `"auto"`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if name != "auto" and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {name}: must be auto or a dtype of torch, such as bfloat16.")
    return dtype if isinstance(dtype, torch.dtype) else name


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool = True) -> torch.Tensor:
    """The ids `(1, length)` of `prompt`, as a user turn where the tokenizer has a chat template and `chat` is set."""
    if chat and tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids  # type: ignore[no-any-return]
    return tokenizer(prompt, return_tensors="pt").input_ids  # type: ignore[no-any-return]
