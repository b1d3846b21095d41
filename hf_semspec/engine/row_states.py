"""What a cache holds of one row, while the row waits or once it has ended."""

from typing import Any

import torch

# Keys and values of each layer, (heads, length, head_dim); `None` for a layer without.
RowStates = list[tuple[torch.Tensor, torch.Tensor] | None]


Recurrent = dict[int, dict[Any, torch.Tensor]]


class RecurrentRow(RowStates):
    """A row's states, those of recurrent layers after all its `length` tokens among them.

    Args:
        pairs: as of any other row.
        length: its tokens.
        recurrent: the states by layer.
        pinned: fewer tokens that it can still go back to, and the states after them.
    """

    def __init__(
        self, pairs: RowStates, length: int, recurrent: Recurrent, pinned: tuple[int, Recurrent] | None = None
    ) -> None:
        super().__init__(pairs)
        self.length, self.recurrent, self.pinned = length, recurrent, pinned


def held(states: RowStates) -> int:
    """Tokens that a row's states hold."""
    if isinstance(states, RecurrentRow):
        return states.length
    return next((keys.shape[1] for keys, _ in filter(None, states)), 0)


def at_most(states: RowStates, length: int) -> RowStates:
    """What a row's states hold of its first `length` tokens, see `cut`."""
    return states if held(states) <= length else cut(states, length)


def cut(states: RowStates, length: int) -> RowStates:
    """The first `length` tokens of a row's states; fewer where a recurrent layer has read more."""
    if not isinstance(states, RecurrentRow):
        return [None if pair is None else (pair[0][:, :length], pair[1][:, :length]) for pair in states]
    if states.length == length:
        return states
    if states.pinned is None or states.pinned[0] > length:
        return []
    return RecurrentRow(cut(list(states), states.pinned[0]), *states.pinned)
