"""Attention masks for blocks written into a `RaggedCache`: additive, 4-D, in the model's dtype, or None where all is
visible."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def hidden(window: int | None) -> torch.Tensor:
        return causal if window is None or window >= end else causal | (keys <= queries - window)

    return _for_each(windows, lambda window: _additive(hidden(window), dtype))


class Masks:
    """The masks of one model's forwards.

    Args:
        windows: sliding window in tokens (`None`: full attention) for every layer type of the model.
        taken (`bool`): whether its attention takes 4-D masks.
        dtype, device: the model's.
    """

    def __init__(
        self, windows: Mapping[str, int | None], taken: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.windows, self.taken = windows, taken
        self.dtype, self.device = dtype, device
        self._whole: dict[int, torch.Tensor] = {}

    def __call__(self, columns: torch.Tensor, end: int, in_step: bool = False) -> Any:
        """For a block of queries in `columns`, see [`block_masks`]; `in_step` if it is the last before `end` in every
        row.

        Returns:
            `None` where the model's own causal mask is right: one query at the end of its row, or a block that begins
            it; under flash attention any block at the end of rows in step.
        """
        width = columns.shape[1]
        if in_step and not self.taken:
            return None
        if in_step and all(window is None or end <= window for window in self.windows.values()):
            if width in (1, end):
                return None
            mask = self._tail(width, end)
            return _for_each(self.windows, lambda window: mask)
        return block_masks(columns, end, self.windows, self.dtype)

    def packed(self, slots: "Slots", end: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """For a packed block, see [`packed_masks`]."""
        return packed_masks(slots, end, self.windows, self.dtype)

    def _tail(self, width: int, end: int) -> torch.Tensor:
        """The mask (1, 1, width, end) of the last `width` columns, where no window hides anything: for each width all
        are cut from one tensor."""
        whole = self._whole.get(width)
        if whole is None or whole.shape[3] < end:
            whole = torch.zeros((1, 1, width, 2 * end), dtype=self.dtype, device=self.device)
            hidden = torch.full((width, width), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
            whole[:, :, :, 2 * end - width :] = hidden.triu_(1)
            self._whole[width] = whole
        # Kernels on accelerators want rows that begin at aligned addresses.
        return whole.narrow(3, whole.shape[3] - end, end).contiguous()


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

    def visible(window: int | None) -> torch.Tensor:
        if window is None:
            return text | own
        return (text & (position - keys < window)) | (own & (column - keys < window))

    return _for_each(windows, lambda window: _additive(~visible(window), dtype))


def aligned_mask(shifts: torch.Tensor, width: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Mask of a block in the last `width` of `end` columns, of rows that begin in column `shifts` (batch,).

    A query sees its row up to itself; one before its row's beginning, whose logits no one reads, sees itself alone.

    Returns:
        (batch, 1, width, end) additive, 0 or the dtype's finite minimum.
    """
    keys = torch.arange(end, device=shifts.device)
    queries = keys[end - width :].unsqueeze(1)
    return _additive((keys > queries) | ((keys < shifts[:, None, None]) & (keys != queries)), dtype)


def padding_mask(shifts: torch.Tensor, end: int) -> torch.Tensor:
    """The 2-D mask of rows that begin in column `shifts` (batch, 1) and end together: (batch, end) int64, 1 for a
    token."""
    return (torch.arange(end, device=shifts.device) >= shifts).long()


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(batch, width, end) bool as (batch, 1, width, end), 0 or the dtype's finite minimum where it is True."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


def _for_each(
    windows: Mapping[str, int | None], mask: Callable[[int | None], torch.Tensor]
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask of the one layer type, or a dict by type if there are several."""
    masks = {name: mask(window) for name, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))
