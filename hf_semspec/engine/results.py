"""What `generate` returns: rows, with scores and logits column by column."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cache import CACHE_FIELD, Cache, RowStates
from .outputs import DecodingStats, SemSpecOutput


class Columns:
    """(batch, vocabulary) float32 values for each column of new text; rows that have no token there hold zeros.

    Args:
        batch (`int`): rows of the caller's batch.
        wanted (`bool`): whether to keep anything at all.
    """

    def __init__(self, batch: int, wanted: bool) -> None:
        self.batch = batch
        self.wanted = wanted
        self.columns: list[torch.Tensor] = []

    def put(self, values: torch.Tensor, live: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Take the first `counts[i]` positions of `values[i]` (rows, positions, vocabulary) as row `live[i]`'s from
        column `starts[i]`."""
        if not self.wanted:
            return
        for i, row in enumerate(live):
            for t in range(counts[i]):
                while len(self.columns) <= starts[i] + t:
                    self.columns.append(values.new_zeros((self.batch, values.shape[-1])))
                self.columns[starts[i] + t][row] = values[i, t]

    def clear(self, row: int, start: int) -> None:
        """Forget row `row` from column `start` on."""
        for column in self.columns[start:]:
            column[row] = 0

    def upto(self, width: int) -> tuple[torch.Tensor, ...] | None:
        """The first `width` columns, or `None` if they were not wanted."""
        return tuple(self.columns[:width]) if self.wanted else None


@dataclass(frozen=True)
class ReturnedRows:
    """The rows that a call returns, one entry each.

    Args:
        rows, chains: where each stands: its row of the call, and the chain of it.
        lengths: its new tokens.
        states: what the target's cache holds of it; empty if no cache is returned.
        scores, logits: of these rows.
    """

    rows: Sequence[int]
    chains: Sequence[int]
    lengths: Sequence[int]
    states: list[RowStates]
    scores: Columns
    logits: Columns


def build_output(
    sequences: torch.Tensor,
    scores: tuple[torch.Tensor, ...] | None,
    logits: tuple[torch.Tensor, ...] | None,
    cache: Cache | None,
    stats: DecodingStats,
) -> SemSpecOutput:
    """A `SemSpecOutput` under the field names of the installed transformers."""
    output = SemSpecOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE_FIELD: cache})
    output.stats = stats
    return output
