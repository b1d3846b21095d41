"""Caches of models with recurrent layers (Mamba 2, gated delta rule, short convolutions), which can be put back.

A recurrent state cannot be cropped. So each forward keeps, for every recurrent layer, the state before it and what the
layer read. To put a row back into the midst of a block, its mixers read the tokens that stand once more from the state
before. Nothing else of the model runs for that, no token is fed twice, and a block is no wider than without them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from .cache import Cache, RaggedCache
from .row_states import RecurrentRow, RowStates, held
from .stock_caches import recurrent_states

# What a mixer keeps, ("conv" or "recurrent", number) -> (rows, ...).
State = dict[tuple[str, int], torch.Tensor]


@dataclass
class Reading:
    """A forward that may yet be taken back in part.

    Args:
        starts: for each row, its tokens before the block.
        widths: for each row, its tokens in the block, which stand at the block's end.
        width: of the block.
        before: the state of every recurrent layer before the block.
        read: what its mixer read, (rows, width, size).
    """

    starts: list[int]
    widths: list[int]
    width: int
    before: dict[int, State]
    read: dict[int, torch.Tensor]


class RecurrentCache(RaggedCache):
    """A ragged cache of a model with recurrent layers.

    Args:
        batch (`int`): rows.
        mixers: the module of every recurrent layer that keeps a state, by the layer's index.
    """

    def __init__(self, batch: int, mixers: dict[int, nn.Module], capacity: int = 64) -> None:
        super().__init__(batch, capacity)
        self.mixers = mixers
        self.now: dict[int, State] = {layer: {} for layer in mixers}
        self.ends, self.standing = [0] * batch, [0] * batch
        self.readings: list[Reading] = []
        self.pins = 0  # whether the first of them is there to go back to only
        self._others: dict[int, dict[str, Any]] = {}
        self._names: list[str] = []  # of the mixers' arguments that take the cache

    # What the mixers call.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution; `None` before the first forward."""
        return self._handed_out(layer_idx, ("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state of a recurrence; `None` before the first forward."""
        return self._handed_out(layer_idx, ("recurrent", state_idx))

    def _handed_out(self, layer_idx: int, key: tuple[str, int]) -> torch.Tensor | None:
        """A copy, since a step of one token changes it in place."""
        state = self.now[layer_idx]
        if key in state:
            state[key] = state[key].clone()
        return state.get(key)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep the last of `conv_states` (rows, size, width); returns them behind what was kept before."""
        key, state = ("conv", state_idx), self.now[layer_idx]
        if key in state:
            size, whole = state[key].shape[-1], torch.cat([state[key], conv_states], dim=-1)
        else:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        state[key] = whole[..., -size:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep this state."""
        self.now[layer_idx]["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was read."""
        return bool(self.now[next(reversed(self.now)) if layer_idx is None else layer_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: what a row goes back to is kept here."""
        return False

    # What the engine calls.

    @property
    def is_filled(self) -> bool:
        """Whether a forward has really written to this cache."""
        return super().is_filled or any(self.now.values())

    def begin(self, ends: Sequence[int], widths: Sequence[int], device: torch.device) -> None:
        """Put every row back to where the next forward begins, with `widths` tokens of each up to `ends`."""
        starts = [end - width for end, width in zip(ends, widths, strict=True)]
        self._put_back(starts)
        self.ends = list(ends)
        before = {layer: dict(state) for layer, state in self.now.items()}
        self.readings.append(Reading(starts, list(widths), max(widths), before, {}))
        self.mask = None
        if min(widths) < max(widths):
            first = max(widths) - torch.tensor(widths, device=device).unsqueeze(1)
            self.mask = (torch.arange(max(widths), device=device) >= first).long()

    def widths(self, ends: Sequence[int], width: int) -> list[int] | None:
        """For each row, the tokens to be read of a block of `width` up to `ends`, if not all can go back so far."""
        starts = [max(end - width, 0) for end in ends]
        reached = [self.reach(row, start) for row, start in enumerate(starts)]
        if reached == starts:
            return None
        nearest = [min(self.standing[row], end - 1) for row, end in enumerate(ends)]
        return [
            min(end, width) if found == start or held < start else end - held
            for end, start, found, held in zip(ends, starts, reached, nearest, strict=True)
        ]

    def reach(self, row: int, length: int) -> int:
        """The most of the first `length` tokens of `row` that it can go back to."""
        if length == self.ends[row]:
            return length
        spans = [(reading.starts[row], reading.starts[row] + reading.widths[row]) for reading in self.readings]
        return max((min(end, length) for start, end in spans if start <= length), default=0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the model runs, note what its mixers read, and show them the filling."""
        reading = self.readings[-1]

        def note(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not any(value is self for value in (*args, *kwargs.values())):
                return None  # of another thread
            (hidden,) = args or (kwargs["hidden_states"],)
            reading.read[mixer.layer_idx] = hidden
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._others[mixer.layer_idx] = {name: None if value is self else value for name, value in others.items()}
            self._names = [name for name, value in others.items() if value is self]
            return args, kwargs | {"attention_mask": self.mask}

        hooks = [mixer.register_forward_pre_hook(note, with_kwargs=True) for mixer in self.mixers.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def settle(self, lengths: Sequence[int]) -> None:
        """Forget what no row can go back to any more: of each, the first `lengths` tokens stand.

        A draft reads the last of them again; a row of which none stand begins anew.
        """
        self.standing, pins = list(lengths), self.pins
        while len(self.readings) > 1 + pins and all(
            start < length or not length for start, length in zip(self.readings[1 + pins].starts, lengths, strict=True)
        ):
            del self.readings[pins]

    def pin(self, lengths: Sequence[int]) -> None:
        """Keep the states of the rows after so many tokens of each, for rows that go back to there."""
        places = [(row, self._place(row, length)) for row, length in enumerate(lengths)]
        rows = [{layer: self._after(layer, place, [row]) for layer in self.mixers} for row, place in places]
        self._pin(list(lengths), self._of_rows(rows))

    def _pin(self, lengths: list[int], states: dict[int, State]) -> None:
        pinned = Reading(lengths, [0] * len(lengths), 0, states, {})
        self.readings, self.pins = [pinned, *self.readings[self.pins :]], 1

    def _put_back(self, starts: Sequence[int]) -> None:
        """Give every row the state that it had after its first `starts` tokens."""
        if list(starts) == self.ends:
            return
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row, start in enumerate(starts):
            groups.setdefault(self._place(row, start), []).append(row)
        for layer in self.mixers:
            parts = [self._after(layer, place, rows) for place, rows in groups.items()]
            order = [row for rows in groups.values() for row in rows]
            self.now[layer] = _joined(parts, order, self.now[layer])

    def _place(self, row: int, start: int) -> tuple[int, int, int]:
        """Where the state of `row` after `start` tokens comes from: the reading from before which, and the first and
        the end of the places of its block to read then; the reading is -1 for none, before any token."""
        if start == self.ends[row]:
            return len(self.readings), 0, 0
        if start <= 0:
            return -1, 0, 0
        for place in reversed(range(len(self.readings))):
            count = start - self.readings[place].starts[row]
            if 0 <= count <= self.readings[place].widths[row]:
                first = self.readings[place].width - self.readings[place].widths[row]
                return place, first, first + count
        if start > self.standing[row]:
            return -1, 0, 0  # it goes along with the others, unread
        raise RuntimeError(f"the state of row {row} after {start} tokens is not kept any more")

    def _after(self, layer: int, place: tuple[int, int, int], rows: list[int]) -> State:
        """The state of `rows` at a place that `_place` gave."""
        index, first, end = place
        if index < 0:
            return {key: torch.zeros_like(state[rows]) for key, state in self.now[layer].items()}
        if index == len(self.readings):
            return _chosen(self.now[layer], rows)
        reading = self.readings[index]
        before = _chosen(reading.before[layer], rows)
        if first == end:
            return before or self._after(layer, (-1, 0, 0), rows)
        return self.mix(layer, reading.read[layer][rows, first:end], before)[1]

    def mix(self, layer: int, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """What the mixer of `layer` makes of `hidden` (rows, width, size) from `state` on, and its state then."""
        given = self._others[layer] | dict.fromkeys(self._names, self)
        kept, self.now[layer] = self.now[layer], dict(state)
        try:
            output = self.mixers[layer](hidden, **given | {"attention_mask": None})
            return output[0] if isinstance(output, tuple) else output, self.now[layer]
        finally:
            self.now[layer] = kept

    def select(self, rows: list[int]) -> None:
        """Keep `rows` (indices into the batch, repeats allowed) in that order; frees the others."""
        super().select(rows)
        self._choose(rows)

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], start: int, end: int) -> None:
        """As [`RaggedCache.copy_rows`]; states go over whole."""
        super().copy_rows(sources, rows, start, end)
        if rows:
            chosen = dict(zip(rows, sources, strict=True))
            self._choose([chosen.get(row, row) for row in range(len(self.ends))])

    def rows(self, index: int, length: int) -> RecurrentRow:
        """A copy of what row `index` holds of its first `length` tokens."""
        place = self._place(index, length)
        states = {layer: self._after(layer, place, [index]) for layer in self.mixers}
        pinned = None
        if self.pins and (first := self.readings[0]).starts[index] <= length:
            pinned = first.starts[index], {layer: _chosen(state, [index]) for layer, state in first.before.items()}
        return RecurrentRow(super().rows(index, length), length, states, pinned)

    def adopt(self, other: Cache, visible: torch.Tensor) -> None:
        """As [`RaggedCache.adopt`]."""
        super().adopt(other, visible)
        self.ends = visible.sum(dim=1).tolist()
        self.standing, self.readings = list(self.ends), []
        for layer in self.mixers:
            self.now[layer] = {key: state.clone() for key, state in recurrent_states(other.layers[layer]).items()}

    def load(self, rows: Sequence[RowStates]) -> None:
        """As [`RaggedCache.load`]."""
        super().load(rows)
        self.ends, self.readings, self.pins = [held(row) for row in rows], [], 0
        self.standing = list(self.ends)
        self.now = self._of_rows([getattr(row, "recurrent", None) for row in rows])
        pinned = [getattr(row, "pinned", None) for row in rows]
        if any(pinned):
            self._pin([one[0] if one else 0 for one in pinned], self._of_rows([one and one[1] for one in pinned]))

    def _of_rows(self, rows: list[Any]) -> dict[int, State]:
        """The states of rows, of which some have none, as one for each layer."""
        states: dict[int, State] = {}
        for layer in self.mixers:
            like: State = next((row[layer] for row in rows if row), {})
            nothing = {key: torch.zeros_like(part) for key, part in like.items()}
            parts = [row[layer] if row else nothing for row in rows]
            states[layer] = {key: torch.cat([part[key] for part in parts]) for key in like}
        return states

    def empty(self, batch: int) -> "RecurrentCache":
        """A new cache of the same kind."""
        other = RecurrentCache(batch, self.mixers, self.planned.capacity)
        other._others, other._names = self._others, self._names
        return other

    def right_aligned(self, lengths: Sequence[int], source: int = 0) -> "RecurrentCache":
        """As [`RaggedCache.right_aligned`]."""
        other = cast(RecurrentCache, super().right_aligned(lengths, source))
        other.ends = list(lengths)
        places = [self._place(source, length) for length in lengths]
        for layer in self.mixers:
            parts = [self._after(layer, place, [source]) for place in places]
            other.now[layer] = _joined(parts, list(range(len(lengths))), parts[0])
        return other

    def part(self, rows: list[int]) -> "RecurrentCache":
        """As [`RaggedCache.part`], between `begin` and the forward: the rows stand where their block begins."""
        other = cast(RecurrentCache, super().part(rows))
        other.ends = [self.readings[-1].starts[row] for row in rows]
        other.now = {layer: _chosen(state, rows) for layer, state in self.now.items()}
        return other

    def take_back(self, rows: list[int], part: RaggedCache, start: int, end: int) -> None:
        """As [`RaggedCache.take_back`]."""
        super().take_back(rows, part, start, end)
        assert isinstance(part, RecurrentCache)
        (reading,), whole = part.readings, self.readings[-1]
        for layer, read in reading.read.items():
            if layer not in whole.read:
                whole.read[layer] = read.new_zeros((self.batch, whole.width, read.shape[2]))
            whole.read[layer][rows, whole.width - read.shape[1] :] = read
            for key, state in part.now[layer].items():
                own = self.now[layer].setdefault(key, state.new_zeros((self.batch, *state.shape[1:])))
                self.now[layer][key] = own.index_copy(0, torch.tensor(rows, device=own.device), state)

    def _choose(self, rows: list[int]) -> None:
        self.ends, self.standing = [self.ends[row] for row in rows], [self.standing[row] for row in rows]
        for reading in self.readings:
            reading.starts = [reading.starts[row] for row in rows]
            reading.widths = [reading.widths[row] for row in rows]
            reading.read = {layer: states[rows] for layer, states in reading.read.items()}
            reading.before = {layer: _chosen(state, rows) for layer, state in reading.before.items()}
        self.now = {layer: _chosen(state, rows) for layer, state in self.now.items()}


def _chosen(state: State, rows: list[int]) -> State:
    return {key: part[rows] for key, part in state.items()}


def _joined(parts: list[State], order: list[int], like: State) -> State:
    """The states of `parts`, whose rows stand in `order`, as one."""
    places = torch.tensor(order).argsort().tolist()
    return {key: torch.cat([part[key] for part in parts])[places] for key in like}
