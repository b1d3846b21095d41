"""What a cache holds of one row, while the row waits or once it has ended."""

from typing import Any

import torch

# Keys and values of each layer, (heads, length, head_dim); `None` for a layer without.
RowStates = list[tuple[torch.Tensor, torch.Tensor] | None]


class RecurrentRow(RowStates):
    """A row's states, those of recurrent layers after all its `length` tokens among them."""

    def __init__(self, pairs: RowStates, length: int, recurrent: dict[int, dict[Any, torch.Tensor]]) -> None:
        super().__init__(pairs)
        self.length, self.recurrent = length, recurrent


def held(states: RowStates) -> int:
    """Tokens that a row's states hold."""
    if isinstance(states, RecurrentRow):
        return states.length
    return next((keys.shape[1] for keys, _ in filter(None, states)), 0)


def cut(states: RowStates, length: int) -> RowStates:
    """The first `length` tokens of a row's states; none where a recurrent layer has read more."""
    if isinstance(states, RecurrentRow):
        return states if states.length == length else []
    return [None if pair is None else (pair[0][:, :length], pair[1][:, :length]) for pair in states]
