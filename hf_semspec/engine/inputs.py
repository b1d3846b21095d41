"""The caller's ids, mask and cache, checked before any forward."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.warn_once import warn_once
from .cache import Cache, text_config
from .hooks import compute_device
from .model import ADAPTING, rope_parameters
from .stock_caches import given_cache, holds_enough, length_of

_KNOWN = (
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_position",
    "use_cache",
    "logits_to_keep",
)
# What trainers pass and plain decoding drops: it serves a loss.
_DROPPED = ("labels", "output_router_logits", "num_items_in_batch")
# Which tokens are images; all 0 for text.
_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_ENCODED = "pixel_values (or other inputs that an image or audio encoder turned into mm_encoder_outputs)"


@dataclass(frozen=True)
class Inputs:
    """What `generate` was given, on the target's device.

    Args:
        ids: (batch, width) int64.
        mask: (batch, width) bool, which of `ids` are tokens; `None` if the caller masked nothing.
        visible: (batch, columns) bool, the same over cached and passed ids.
        cache: the cache that came along, the caller's or an empty one that `generate` made, or `None`.
        fills_cache: whether that cache is known to be the caller's, who expects it extended.
        cached: for each row, how many tokens that cache holds; 0 if they cannot be used and are read anew.
        only_suffix: whether `ids` lacks the cached tokens.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    visible: torch.Tensor
    cache: Cache | None
    fills_cache: bool
    cached: list[int]
    only_suffix: bool

    @property
    def held(self) -> int:
        """Columns of that cache."""
        return 0 if self.cache is None else length_of(self.cache)

    @property
    def texts(self) -> list[list[int]]:
        """The ids of each row, without padding."""
        if self.mask is None:
            return [row.tolist() for row in self.ids]
        return [row[seen].tolist() for row, seen in zip(self.ids, self.mask, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """For each row, the tokens that precede its first id."""
        return self.cached if self.only_suffix else [0] * len(self.cached)


def read_inputs(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: Any, room: int) -> Inputs:
    """Take over what `generate` prepared, for up to `room` new tokens.

    Raises:
        ValueError: an input that no scheme can honour, or a cache that does not fit the ids and the mask.
    """
    foreign = sorted(name for name, value in model_kwargs.items() if not _is_idle(model, name, value))
    if foreign:
        # transformers encodes images and sounds before any decoding method sees them.
        foreign = [_ENCODED if name == "mm_encoder_outputs" else name for name in foreign]
        raise ValueError(
            f"semspec does not support the model input {', '.join(foreign)} yet: pass text as input_ids and "
            "attention_mask, or decode plainly with generate(..., semspec=None) and without assistant_model"
        )
    device = compute_device(model)
    _check_ids(model, input_ids)
    ids = input_ids.to(device, torch.long)
    batch, width = ids.shape
    if ids.numel() == 0:
        raise ValueError(f"input_ids has shape {(batch, width)}: pass at least one prompt of at least one token")
    mask = model_kwargs.get("attention_mask")
    columns = mask.shape[1] if mask is not None else getattr(config, "_mask_length", width)
    if columns < width or (mask is not None and len(mask) != batch):
        raise ValueError(
            f"attention_mask has shape {(len(mask) if mask is not None else batch, columns)}, input_ids "
            f"{(batch, width)}: give each id its entry"
        )
    visible = ids.new_ones((batch, columns), dtype=torch.bool) if mask is None else mask.to(device).bool()
    if not bool(visible[:, columns - width :].any(dim=1).all()):
        raise ValueError("attention_mask hides every token of a row: give each prompt at least one visible token")
    _check_rotary(model, visible, room)
    _check_positions(model_kwargs.get("position_ids"), visible, width)
    cache = given_cache(model_kwargs)
    held = 0 if cache is None else length_of(cache)
    only_suffix = columns > width
    if held and config.num_return_sequences > 1:
        raise ValueError(
            "a filled cache cannot be used with num_return_sequences > 1: repeat the prompt and its cache instead"
        )
    if held >= columns or (only_suffix and (held != columns - width or not bool(visible[:, held:].all()))):
        raise ValueError(
            f"the cache holds {held} tokens, input_ids has {width} and attention_mask {columns}: pass the whole text "
            "with at least one token more than the cache, or only the new, unpadded tokens with an attention_mask "
            "over all"
        )
    own = None if mask is None else visible[:, columns - width :]
    cached = visible[:, :held].sum(dim=1).tolist()
    if cache is not None and held and not holds_enough(cache, visible[:, :held]):
        if only_suffix:
            raise ValueError(
                "the cache's sliding layers lack tokens that their window shows, since rows of it hold padding: pass "
                "the whole text instead of the new tokens alone"
            )
        cached = [0] * batch
    fills_cache = held > 0 or getattr(cache, "_is_user_defined", False)
    if only_suffix:
        warn_once(
            "input_ids holds only what the cache lacks: the draft and the logits processors do not see the cached "
            "tokens, so fewer drafts may be accepted; pass the whole text to show it to them"
        )
    return Inputs(ids, own, visible, cache, fills_cache, cached, only_suffix)


def _check_ids(model: Any, ids: torch.Tensor) -> None:
    """Refuse ids that the model has no embedding for, which on an accelerator end the whole process. A model of more
    than text may have placeholders beyond its vocabulary."""
    config = text_config(model)
    if config is not model.config or not ids.numel():
        return
    lowest, highest = ids.aminmax()
    if int(lowest) < 0 or int(highest) >= config.vocab_size:
        wrong = int(lowest if int(lowest) < 0 else highest)
        raise ValueError(
            f"input_ids holds the id {wrong}, but {type(model).__name__} has ids from 0 to {config.vocab_size - 1}: "
            "encode the prompts with the target's tokenizer, and pad with an id that exists"
        )


def _check_rotary(model: Any, visible: torch.Tensor, room: int) -> None:
    """Refuse texts over which rotary frequencies change: keys cached before would stay turned by the old ones."""
    config, rope = text_config(model), rope_parameters(model)
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind not in ADAPTING:
        return
    border = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind == "dynamic" or border is None:
        border = config.max_position_embeddings
    lengths = visible.sum(dim=1)
    longest, shortest = int(lengths.max()) + room, int(lengths.min())
    if longest > border and (kind == "dynamic" or shortest <= border):
        raise ValueError(
            f"rope_type={kind!r} changes its frequencies at {border} tokens, and this text may grow from {shortest} "
            f"to {longest}: keep max_new_tokens below that, or decode plainly with generate(..., semspec=None) and "
            "without assistant_model"
        )


def _check_positions(position_ids: torch.Tensor | None, visible: torch.Tensor, width: int) -> None:
    """Refuse positions other than those that follow from the mask."""
    if position_ids is None:
        return
    columns = min(position_ids.shape[-1], visible.shape[1])
    seen = visible[:, visible.shape[1] - columns :]
    expected = (visible.long().cumsum(dim=-1) - 1)[:, visible.shape[1] - columns :]
    given = position_ids.to(visible.device)
    # In three dimensions a token of text has the same position in each of the first, and `generate` makes them so.
    if given.dim() not in (2, 3) or given.shape[-1] != columns or not bool(((given == expected) | ~seen).all()):
        raise ValueError(
            "semspec does not support position_ids of the caller's own: leave them out, the mask decides them"
        )


def _is_idle(model: Any, name: str, value: Any) -> bool:
    """Whether the model input `name` changes nothing that `model` reads beside the ids, the mask and the cache."""
    if name in _KNOWN or name in _DROPPED or value is None:
        return True
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    return name in _TYPES and text_config(model) is not model.config and not bool(value.any())
