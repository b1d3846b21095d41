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


def tail_mask(start: int, end: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`block_masks` for a block in columns [`start`, `end`) of every row, where no window hides anything."""
    width = end - start
    mask = torch.zeros((1, 1, width, end), dtype=dtype, device=device)
    mask.narrow(3, start, width).copy_(
        torch.full((width, width), torch.finfo(dtype).min, dtype=dtype, device=device).triu_(1)
    )
    return mask


def within_windows(end: int, windows: Mapping[str, int | None]) -> bool:
    """Whether the windows hide nothing from a block that ends before column `end`."""
    return all(window is None or end <= window for window in windows.values())
