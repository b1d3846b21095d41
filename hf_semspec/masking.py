"""Attention masks for blocks written into a `RaggedCache`: additive, 4-D, in the model's dtype, or None where all is
visible."""

from collections.abc import Mapping

import torch


def block_masks(
    columns: torch.Tensor, end: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Mask of a block of queries against the first `end` columns of the cache.

    A query in column `c` sees columns `j` with `c - window < j <= c`. It always sees itself, so no row is ever fully
    masked.

    Args:
        columns: (batch or 1, width) int64, the column of every query.
        windows: sliding window in tokens (`None`: full attention) for every layer type of the model.

    Returns:
        (batch or 1, 1, width, end) additive, 0 or the dtype's finite minimum; a dict by layer type if there are
        several.
    """
    keys = torch.arange(end, device=columns.device)
    queries = columns.unsqueeze(-1)
    causal = keys > queries  # (batch, width, end), True where hidden
    masks = {}
    for name, window in windows.items():
        hidden = causal if window is None or window >= end else causal | (keys <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=columns.device)
        masks[name] = mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def all_visible(start: int, end: int, windows: Mapping[str, int | None]) -> bool:
    """Whether a block in columns [`start`, `end`) of every row needs no mask beyond the model's own causal one.

    True for one query at the end of the row and for a block that begins the row, as long as no window hides anything.
    """
    short = all(window is None or end <= window for window in windows.values())
    return short and (start == 0 or end - start == 1)
