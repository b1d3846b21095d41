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


class TailMasks:
    """`block_masks` for blocks at the end of rows in step, where no window hides anything: for each width all are cut
    from one tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._whole: dict[int, torch.Tensor] = {}

    def __call__(self, start: int, end: int) -> torch.Tensor:
        """The mask (1, 1, end - start, end) of a block in columns [`start`, `end`) of every row."""
        width = end - start
        whole = self._whole.get(width)
        if whole is None or whole.shape[3] < end:
            whole = torch.zeros((1, 1, width, 2 * end), dtype=self.dtype, device=self.device)
            hidden = torch.full((width, width), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
            whole[:, :, :, 2 * end - width :] = hidden.triu_(1)
            self._whole[width] = whole
        # Kernels on accelerators want rows that begin at aligned addresses.
        return whole.narrow(3, whole.shape[3] - end, end).contiguous()


def within_windows(end: int, windows: Mapping[str, int | None]) -> bool:
    """Whether the windows hide nothing from a block that ends before column `end`."""
    return all(window is None or end <= window for window in windows.values())
