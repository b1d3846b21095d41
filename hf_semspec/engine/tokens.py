"""The token ids of a call: as plain `generate` would show them, and as the models read them."""

from collections.abc import Container, Sequence

import torch


class Canvas:
    """Ids of all rows of a call, drafted ones included, with room that grows by doubling.

    `shown` keeps the caller's rows, order and padding, so a token's column is the same as in plain `generate`.
    Columns past a row's last token hold the pad id, or drafted tokens while a block is open.

    Args:
        input_ids: (batch, prompt_width) int64, the caller's ids.
        visible: (batch, prompt_width) bool, the caller's mask; `None` if all ids are visible.
        chains (`int`): chains of drafts a row.
        pad (`int`): id that fills what holds no token.
        room (`int`): new tokens to make space for at first.
        vocabulary (`int`): how many ids the target has. A pad id that is none of them is shown, but never read:
            `filler` takes its place.

    What processors may be asked about follows from `eos_ids`, the rows that have `ended`, and `idle`, (batch, chains)
    bool: which chains' text has ended or is none, `None` for no chain's.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        visible: torch.Tensor | None,
        chains: int,
        pad: int,
        room: int,
        vocabulary: int,
    ) -> None:
        batch, self.prompt_width = input_ids.shape
        self.pad = pad
        self.filler = pad if 0 <= pad < vocabulary else 0
        self.generated = [0] * batch
        self.eos_ids: set[int] = set()
        self.ended: Container[int] = ()
        self.idle: torch.Tensor | None = None
        self.shown = self._filled(input_ids, chains, room)
        self.prompt_lengths = [self.prompt_width] * batch
        self._read = self.shown
        if visible is not None:
            self.prompt_lengths = visible.sum(dim=1).tolist()
            order = torch.argsort(visible.to(torch.uint8), dim=1, stable=True)
            packed = input_ids.gather(1, order)
            if not torch.equal(packed, input_ids):
                self._read = self._filled(packed, chains, room)

    def _filled(self, ids: torch.Tensor, chains: int, room: int) -> torch.Tensor:
        canvas = ids.new_full((ids.shape[0], chains, self.prompt_width + room), self.pad)
        canvas[:, :, : self.prompt_width] = ids.unsqueeze(1)
        return canvas

    def reserve(self, width: int) -> None:
        """Make sure that columns up to `width` exist."""
        missing = width - self.shown.shape[2]
        if missing > 0:
            extra = self.shown.new_full((*self.shown.shape[:2], max(missing, self.shown.shape[2])), self.pad)
            separate = self._read is not self.shown
            self.shown = torch.cat([self.shown, extra], dim=2)
            self._read = torch.cat([self._read, extra], dim=2) if separate else self.shown

    def set_chains(self, chains: int) -> None:
        """Hold `chains` chains a row, all like the first one."""
        separate = self._read is not self.shown
        self.shown = self.shown[:, :1].repeat(1, chains, 1)
        self._read = self._read[:, :1].repeat(1, chains, 1) if separate else self.shown

    def hold(self, row: int, count: int) -> None:
        """The row now has `count` new tokens; what stands behind them is no longer its own."""
        self.generated[row] = count

    def clear(self, row: int, start: int, stop: int) -> None:
        """Fill columns [start, stop) of the new text of `row`."""
        self.shown[row, :, self.prompt_width + start : self.prompt_width + stop] = self.pad

    def widths(self, live: Sequence[int]) -> list[int]:
        """Columns of `shown` that hold tokens, for the rows `live`."""
        return [self.prompt_width + self.generated[row] for row in live]

    def lengths(self, live: Sequence[int]) -> list[int]:
        """Tokens, padding not counted, for the rows `live`."""
        return [self.prompt_lengths[row] + self.generated[row] for row in live]

    def read(self, live: Sequence[int], back: int, ahead: int) -> torch.Tensor:
        """The last `back` tokens of the rows `live` and the `ahead` ids drafted after them: (len(live) * chains, back
        + ahead)."""
        ids = self._at(self._read, live, -back, ahead).reshape(-1, back + ahead)
        return ids if self.filler == self.pad else ids.masked_fill(ids == self.pad, self.filler)

    def texts(self, live: Sequence[int]) -> list[list[int]]:
        """The ids of the rows `live`, of their first chain, without padding; one host read."""
        lengths = self.lengths(live)
        rows = self._at(self._read, live, -max(lengths), 0)[:, 0].tolist()
        return [ids[-length:] for ids, length in zip(rows, lengths, strict=True)]

    def write(self, live: Sequence[int], ahead: int, ids: torch.Tensor) -> None:
        """Put `ids` (len(live), chains or 1, width) `ahead` columns after the last tokens of the rows `live`."""
        first, last = ahead, ahead + ids.shape[2]
        self.reserve(max(self.widths(live)) + last)
        for canvas in (self.shown,) if self._read is self.shown else (self.shown, self._read):
            widths = self.widths(live)
            if self._in_step(live, widths):
                canvas[:, :, widths[0] + first : widths[0] + last] = ids
            else:
                rows, columns = self._index(live, widths, first, last)
                canvas[rows, :, columns] = ids.expand(-1, canvas.shape[1], -1).transpose(1, 2)

    def copy_chains(self, rows: Sequence[int], sources: Sequence[int], chains: Sequence[int], width: int) -> None:
        """Overwrite what chain `chains[i]` of row `rows[i]` holds from the prompt up to column `width` of `shown` with
        what chain `sources[i]` holds."""
        for canvas in (self.shown,) if self._read is self.shown else (self.shown, self._read):
            canvas[rows, chains, self.prompt_width : width] = canvas[rows, sources, self.prompt_width : width]

    def _at(self, canvas: torch.Tensor, live: Sequence[int], first: int, last: int) -> torch.Tensor:
        widths = self.widths(live)
        if self._in_step(live, widths):
            return canvas[:, :, widths[0] + first : widths[0] + last]
        rows, columns = self._index(live, widths, first, last)
        return canvas[rows, :, columns].transpose(1, 2)

    def _in_step(self, live: Sequence[int], widths: Sequence[int]) -> bool:
        return len(live) == self.shown.shape[0] and min(widths) == max(widths)

    def _index(
        self, live: Sequence[int], widths: Sequence[int], first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.shown.device
        columns = torch.tensor(widths, device=device).unsqueeze(1) + torch.arange(first, last, device=device)
        return torch.tensor(live, device=device).unsqueeze(1), columns.clamp(min=0)
