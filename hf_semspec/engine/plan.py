"""Where in a ragged cache a forward writes."""

from dataclasses import dataclass, field

import torch


@dataclass
class Plan:
    """Where the next forward's block goes. A cache and its layers share it, and do not know one another both ways: a
    cache goes with the last reference to it, not when the collector comes by.

    Args:
        capacity: columns of the buffers.
        longest: the most columns that text will need, where that is known.
        start, end: the block's columns, or the first of them that any row takes, and the end of all that is shown.
        columns: (batch, width) those of each row, where they are not the same for all.
    """

    capacity: int
    longest: int = 0
    start: int = 0
    end: int = 0
    columns: torch.Tensor | None = None
    _slots: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def direct(self, start: int, end: int, columns: torch.Tensor | None) -> None:
        """See [`RaggedCache.plan`]."""
        self.start, self.end, self.columns = start, end, columns
        self._slots.clear()
        while self.capacity < end:
            self.capacity *= 2
            if self.capacity > self.longest >= end:
                self.capacity = self.longest

    def slots(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row (batch, 1) and column (batch, width) indices of the block on `device`."""
        if device not in self._slots:
            assert self.columns is not None
            rows = torch.arange(len(self.columns), device=device).unsqueeze(1)
            self._slots[device] = rows, self.columns.to(device)
        return self._slots[device]
