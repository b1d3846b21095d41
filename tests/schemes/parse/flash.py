"""A stand-in for flash attention, which needs a GPU: the same interface, a 2-D mask or none, on the CPU."""

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flash_attention_2"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention aligned to the end of the keys, without the keys that the 2-D mask hides."""
    assert attention_mask is None or attention_mask.dim() == 2, "flash attention takes no 4-D mask"
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    width, columns = query.shape[2], key.shape[2]
    distance = torch.arange(columns - width, columns).unsqueeze(1) - torch.arange(columns)
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    visible = visible.expand(len(query), 1, width, columns)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :columns].bool()
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


def use(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`model`, told that it runs flash attention."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, attend)
    model.config._attn_implementation = NAME
    return model
