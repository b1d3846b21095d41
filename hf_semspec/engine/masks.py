"""Attention masks for blocks written into a `RaggedCache`: additive, 4-D, in the model's dtype, or None where all is
visible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Slots:
    """Where the tokens of a packed block stand, each (rows, width) int64.

    A token sees the columns below `seen`, which hold its row's text, and its own run, from column `first` up to its
    own. Text has `seen` = `first` = 0; a copy of the judging suffix sees its prefix and itself; filling sees itself.

    Args:
        columns: the column of the cache that the token takes.
        positions: its position.
        seen, first: what it sees.
    """

    columns: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    first: torch.Tensor

    def __getitem__(self, part: slice) -> "Slots":
        return Slots(*(value[:, part] for value in (self.columns, self.positions, self.seen, self.first)))


def packed_slots(
    starts: Sequence[int], lengths: Sequence[int], copies: Sequence[Sequence[int]], sizes: Sequence[int]
) -> Slots:
    """Slots of [text ; copy ; copy ; ...] for rows of unequal length, filled up to a rectangle.

    Args:
        starts: for each row, the tokens of its text that precede the block.
        lengths: for each row, the tokens of its text.
        copies: for each row, the length of the prefix that each copy follows; -1 where a row has no such copy.
        sizes: tokens of each copy's suffix.
    """
    text = max(length - start for length, start in zip(lengths, starts, strict=True))
    width = text + sum(sizes)
    columns = torch.tensor(starts).unsqueeze(1) + torch.arange(width)  # (rows, width)
    positions, seen, first = torch.zeros_like(columns), torch.zeros_like(columns), columns.clone()
    for row, (start, length, prefixes) in enumerate(zip(starts, lengths, copies, strict=True)):
        positions[row, : length - start] = columns[row, : length - start]
        first[row, : length - start] = 0
        at = text
        for prefix, size in zip(prefixes, sizes, strict=True):
            if prefix >= 0:
                positions[row, at : at + size] = torch.arange(prefix, prefix + size)
                seen[row, at : at + size] = prefix
                first[row, at : at + size] = columns[row, at]
            at += size
    return Slots(columns, positions, seen, first)


def packed_masks(
    slots: Slots, end: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Mask of a packed block against the first `end` columns of the cache.

    A sliding window counts positions: a copy's own tokens lie right behind its prefix, whatever their columns are.

    Returns:
        (rows, 1, width, end) additive, 0 or the dtype's finite minimum; a dict by layer type if there are several.
    """
    keys = torch.arange(end, device=slots.columns.device)
    column, position = slots.columns.unsqueeze(-1), slots.positions.unsqueeze(-1)
    text = keys < slots.seen.unsqueeze(-1)  # (rows, width, end)
    own = (keys >= slots.first.unsqueeze(-1)) & (keys <= column)
    masks = {}
    for name, window in windows.items():
        if window is None:
            visible = text | own
        else:
            visible = (text & (position - keys < window)) | (own & (column - keys < window))
        mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device)
        masks[name] = mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def aligned_mask(shifts: torch.Tensor, width: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Mask of a block in the last `width` of `end` columns, of rows that begin in column `shifts` (batch,).

    A query sees its row up to itself; one before its row's beginning, whose logits no one reads, sees itself alone.

    Returns:
        (batch, 1, width, end) additive, 0 or the dtype's finite minimum.
    """
    keys = torch.arange(end, device=shifts.device)
    queries = keys[end - width :].unsqueeze(1)
    hidden = (keys > queries) | ((keys < shifts[:, None, None]) & (keys != queries))
    mask = torch.zeros(hidden.shape, dtype=dtype, device=shifts.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
