"""The cache that plain `generate` would have left, padding included.

Plain decoding reads the padding of the prompts, and pads behind the end of a row while others go on. Whoever masks
them never sees them; whoever goes on without a mask does. So they are read here too, by one forward each, where a
cache is returned and rows are padded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .cache import Cache, RowStates, cut, held, text_config
from .encoders import Sources
from .inputs import Inputs
from .model import CachedModel
from .results import ReturnedRows
from .row_states import RecurrentRow
from .stock_caches import new_dynamic_cache, put_recurrent_states, rows_of, states_of

Places = slice | torch.Tensor


class Padding(NamedTuple):
    """What was read of prompts that are padded behind what the caller's cache holds.

    Args:
        rows: of the call.
        hidden: (rows, width) bool, which of the columns read are padding.
        cache: holds these columns, and those before.
    """

    rows: list[int]
    hidden: torch.Tensor
    cache: Cache


def build_cache(
    target: CachedModel, sources: Sources, inputs: Inputs, returned: ReturnedRows, sequences: torch.Tensor
) -> Cache:
    """What the caller's cache holds, which stays as it is, and behind it the rest of all but the last column of
    `sequences` (rows, columns).

    Where the model reads more than text, the padding of prompts holds zeros.
    """
    visible, first = inputs.visible[list(returned.rows)], inputs.held
    width = visible.shape[1] + max(returned.lengths) - 1
    new = torch.arange(visible.shape[1], width, device=visible.device)
    places = [torch.cat([row.nonzero().squeeze(1), new]).cpu() for row in visible]
    states = _with_ends(target, sources, returned, sequences, [len(place) for place in places])
    moves = [_move(place, first) for place in places]
    padding = None if sources.beside_text else _read_padding(target, sources, inputs)
    cache = new_dynamic_cache(target.model) if inputs.cache is None else rows_of(inputs.cache)
    for index, layer in enumerate(zip(*states, strict=True)):
        pairs = [pair for pair in layer if pair is not None]
        if pairs:
            keys, values = (_padded([pair[part] for pair in pairs], moves, width - first) for part in (0, 1))
            if padding is not None:
                for block, read in zip((keys, values), states_of(padding.cache, index), strict=True):
                    _fill(block, read, padding, returned.rows)
            cache.update(keys, values, index)
    rows = [row for row in states if isinstance(row, RecurrentRow)]
    for index in rows[0].recurrent if rows else ():
        joined = {key: torch.cat([row.recurrent[index][key] for row in rows]) for key in rows[0].recurrent[index]}
        put_recurrent_states(cache, index, joined)
    return cache


def _with_ends(
    target: CachedModel,
    sources: Sources,
    returned: ReturnedRows,
    sequences: torch.Tensor,
    ends: Sequence[int],
) -> list[RowStates]:
    """The rows' first `ends` states: a shorter row's last token, and the pads behind it, are fed."""
    states = [cut(one, end) for one, end in zip(returned.states, ends, strict=True)]
    short = [row for row, end in enumerate(ends) if held(states[row]) < end]
    if short:
        most = max(ends[row] - held(states[row]) for row in short)
        source = sources.of_rows([returned.rows[row] for row in short])
        reader = CachedModel(target.model, len(short), target.last_position, source)
        reader.cache.load([states[row] for row in short])
        # Plain decoding would have failed at an id that there is no embedding for.
        ids = sequences[short, -1 - most : -1].clamp(0, text_config(target.model).vocab_size - 1)
        reader.feed(ids, [ends[row] for row in short], keep=1)
        target.count(reader)
        for place, row in enumerate(short):
            states[row] = reader.cache.rows(place, ends[row])
    return states


def _read_padding(target: CachedModel, sources: Sources, inputs: Inputs) -> Padding | None:
    """Read padded prompts as plain decoding does; `None` if there are none.

    Padding sees no padding, and nothing behind it, so no more is read than reaches to the last of it. `eager`
    attention spreads over everything where it may see nothing: there all is read.
    """
    hidden = ~inputs.visible[:, inputs.held :]
    rows = hidden.any(dim=1).nonzero().squeeze(1).tolist()
    if not rows:
        return None
    width = length = hidden.shape[1]
    if target.model.config._attn_implementation != "eager":
        width = int(hidden.any(dim=0).nonzero().max()) + 1
    positions = sources.request.model_kwargs.get("position_ids")
    if positions is None:  # transformers 4.57 makes them for each forward
        positions = (inputs.visible.long().cumsum(dim=1) - 1).masked_fill(~inputs.visible, 1)
    ids, positions = (values[:, values.shape[1] - length :][rows, :width] for values in (inputs.ids, positions))
    cache = new_dynamic_cache(target.model) if inputs.cache is None else rows_of(inputs.cache, rows)
    target.feed_padded(ids, inputs.visible[rows, : inputs.held + width].long(), positions, cache)
    return Padding(rows, hidden[rows, :width], cache)


def _fill(block: torch.Tensor, read: torch.Tensor, padding: Padding, rows: Sequence[int]) -> None:
    """Put what was `read` of padding where it belongs in `block`, which stands for `rows`; a sliding layer has its
    last columns alone."""
    width = padding.hidden.shape[1]
    kept = min(read.shape[2], width)
    at = [place for place, row in enumerate(rows) if row in padding.rows]
    of = [padding.rows.index(rows[place]) for place in at]
    hidden = padding.hidden[of, width - kept :].to(block.device)[:, None, :, None]
    columns = slice(width - kept, width)
    block[at, :, columns] = torch.where(hidden, read[of, :, read.shape[2] - kept :], block[at, :, columns])


def _move(place: torch.Tensor, first: int) -> tuple[Places, Places]:
    """Which of a row's states, that belong in the columns `place`, go into those from `first` on, and to which of
    these: slices but for a row with holes."""
    new = (place >= first).nonzero().squeeze(1)
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
