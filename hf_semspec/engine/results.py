"""What `generate` returns: scores and logits column by column, and the cache plain `generate` would have left."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cache import CACHE_FIELD, Cache, RowStates, new_dynamic_cache
from .outputs import DecodingStats, SemSpecOutput

Places = slice | torch.Tensor


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


def build_cache(
    model: Any,
    states: list[RowStates],
    visible: torch.Tensor,
    generated: Sequence[int],
    caller: Cache | None,
) -> Cache:
    """The cache of plain `generate`: one column less than the text, in the caller's layout; the caller's own is
    extended in place.

    Args:
        states: for each row, its left-aligned key/value states.
        visible: (batch, columns) bool, the caller's mask over cached and passed ids.
        generated: for each row, its number of new tokens.
    """
    prompt = visible.shape[1]
    width = prompt + max(generated) - 1
    first = caller.get_seq_length() if caller is not None else 0
    places = []
    for row, count in enumerate(generated):
        place = torch.cat(
            [visible[row].nonzero().squeeze(1), torch.arange(prompt, prompt + count, device=visible.device)]
        )
        held = next(state[0].shape[1] for state in states[row] if state is not None)
        places.append(place[:held].cpu())
    return export(states, places, first, width, caller if caller is not None else new_dynamic_cache(model))


def export(rows: list[RowStates], places: list[torch.Tensor], first: int, width: int, into: Cache) -> Cache:
    """Append columns [`first`, `width`) of plain `generate`'s cache to `into` and return it.

    Args:
        rows: for each row of the batch its left-aligned states, as [`cache.RaggedCache.rows`] gives them.
        places: for each row the column, in the caller's padded layout, of each of its states, (length,) int64.
    """
    moves = [_move(place, first, width) for place in places]
    for index, states in enumerate(zip(*rows, strict=True)):
        held = [state for state in states if state is not None]
        if held:
            keys, values = (_padded([state[part] for state in held], moves, width - first) for part in (0, 1))
            into.update(keys, values, index)
    return into


def _move(place: torch.Tensor, first: int, width: int) -> tuple[Places, Places]:
    """Which of a row's states go into columns [`first`, `width`), and to which of these: slices but for a row with
    holes."""
    new = ((place >= first) & (place < width)).nonzero().squeeze(1)
    to = place[new] - first
    if not len(new) or int(place[new[-1]] - place[new[0]]) + 1 > len(new):
        return new, to
    return slice(int(new[0]), int(new[-1]) + 1), slice(int(to[0]), int(to[-1]) + 1)


def _padded(states: list[torch.Tensor], moves: list[tuple[Places, Places]], width: int) -> torch.Tensor:
    """Rows of (heads, length, head_dim) at their places: (batch, heads, width, head_dim), zeros elsewhere."""
    block = states[0].new_zeros((len(states), states[0].shape[0], width, states[0].shape[2]))
    for row, (state, (source, to)) in enumerate(zip(states, moves, strict=True)):
        block[row][:, to] = state[:, source]
    return block


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
