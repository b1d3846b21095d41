"""Key/value caches whose rows have unequal lengths; the only module that names transformers' cache classes.

Every row is stored left-aligned: the token at position `c` of a row owns column `c`, whatever padding the caller
used. A forward writes its block at explicit columns, in place, into buffers that grow by doubling, so rolling back is
only a matter of which columns the next attention mask shows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput

from ..common.wrappers import forward_parameters
from .plan import Plan
from .row_states import RowStates as RowStates
from .row_states import cut as cut
from .row_states import held as held

ROLLBACK_LAYER_TYPES = ("full_attention", "sliding_attention")


# The field of `generate`'s output that holds the cache: `cache` since transformers 5.24, `past_key_values` before.
CACHE_FIELD = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def cache_argument(model: nn.Module) -> str:
    """Name of the forward argument that takes the cache; a wrapper that hides it gets the installed version's."""
    parameters = forward_parameters(model)
    return next((name for name in ("cache", "past_key_values") if name in parameters), CACHE_FIELD)


def text_config(model: Any) -> Any:
    """The configuration of the model's text decoder."""
    return model.config.get_text_config(decoder=True)


def attention_windows(model: Any) -> dict[str, int | None]:
    """Sliding window (in tokens, `None` for full attention) of every layer type of `model`."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return {"full_attention" if window is None else "sliding_attention": window}
    windows = {"full_attention": None, "sliding_attention": window}
    return {name: windows[name] for name in dict.fromkeys(layer_types) if name in windows} or {"full_attention": None}


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, (batch, heads, capacity, head_dim), written where its cache's [`Plan`] says."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, planned: Plan) -> None:
        super().__init__()
        self.planned = planned

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocate buffers of the cache's capacity."""
        assert value_states is not None
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self.planned.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the planned block and return the states that its queries may see."""
        plan = self.planned
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (self.keys.dtype, self.values.dtype) != (key_states.dtype, value_states.dtype):
            self._widen(key_states, value_states)
        self.reserve(plan.end)
        keys, values = self.keys, self.values
        if plan.columns is None:
            keys.narrow(2, plan.start, plan.end - plan.start).copy_(key_states)
            values.narrow(2, plan.start, plan.end - plan.start).copy_(value_states)
        else:
            rows, columns = plan.slots(keys.device)
            keys[rows, :, columns] = key_states.transpose(1, 2).to(keys.dtype)
            values[rows, :, columns] = value_states.transpose(1, 2).to(values.dtype)
        return keys.narrow(2, 0, plan.end), values.narrow(2, 0, plan.end)

    def _widen(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Hold what both kinds of states fit in: a cache of the caller's may be of another precision."""
        self.keys = self.keys.to(torch.promote_types(self.keys.dtype, key_states.dtype))
        self.values = self.values.to(torch.promote_types(self.values.dtype, value_states.dtype))

    def reserve(self, end: int) -> None:
        """Make sure that columns up to `end` exist."""
        if self.keys.shape[2] < end:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, states: torch.Tensor) -> torch.Tensor:
        grown = states.new_zeros((*states.shape[:2], self.planned.capacity, states.shape[3]))
        grown[:, :, : states.shape[2]].copy_(states)
        return grown

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Columns the planned block sees, and their offset."""
        return self.planned.end, 0

    def get_seq_length(self) -> int:
        """Columns before the planned block."""
        return self.planned.start

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit (the name before transformers 5)."""
        return -1


class RaggedCache(Cache):
    """A cache of `batch` rows of unequal length.

    Before a forward, `plan` says where its block goes; afterwards nothing has to be cropped: columns past a row's own
    length hold leftovers that no mask shows. Buffers double until they hold `longest` columns, the most that text will
    need, where that is known.
    """

    def __init__(self, batch: int, capacity: int = 64) -> None:
        super().__init__(layers=[])
        self.batch = batch
        self.planned = Plan(capacity)

    def plan(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """Direct the next forward's block to columns [`start`, `end`) of every row, or to `columns` (batch, width) <
        `end`."""
        self.planned.direct(start, end, columns)

    def expect(self, longest: int, capacity: int | None = None) -> None:
        """Size the buffers for a text of `longest` columns, beginning with `capacity`."""
        self.planned.longest = longest
        if capacity is not None:
            self.planned.capacity = min(capacity, longest)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the planned block and return the states that its queries may see."""
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer(self.planned))
        states: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the planned block."""
        return self.planned.start

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Columns the planned block sees, and their offset."""
        return self.planned.end, 0

    @property
    def is_filled(self) -> bool:
        """Whether a forward has really written to this cache."""
        return any(layer.is_initialized for layer in self.layers)

    def select(self, rows: list[int]) -> None:
        """Keep `rows` (indices into the batch, repeats allowed) in that order; frees the others."""
        self.batch = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys = layer.keys.index_select(0, index)
                layer.values = layer.values.index_select(0, index)

    @torch.inference_mode()
    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], start: int, end: int) -> None:
        """Overwrite columns [`start`, `end`) of row `rows[i]` with those of row `sources[i]` before the call, in
        place."""
        if not rows:
            return
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor([list(sources), list(rows)], device=layer.keys.device)
                for states in (layer.keys, layer.values):
                    states[index[1], :, start:end] = states[index[0], :, start:end]

    def adopt(self, other: Cache, visible: torch.Tensor) -> None:
        """Copy in what the caller's cache `other` holds; `visible` (batch, columns) bool says which of its columns
        are tokens.

        Sliding layers of `other` keep only their last columns; the older ones stay empty here, outside every window.
        """
        width = visible.shape[1]
        order = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)  # (batch, columns): real columns first
        lengths = visible.sum(dim=1, keepdim=True)
        self.plan(0, width)
        for source in other.layers:
            layer = RaggedLayer(self.planned)
            self.layers.append(layer)
            if not holds_keys(source):
                continue
            kept = source.keys.shape[2]
            index = order.to(source.keys.device) - (width - kept)
            real = torch.arange(width, device=index.device) < lengths.to(index.device)
            real = (real & (index >= 0))[:, None, :, None]
            index = index.clamp(min=0)[:, None, :, None]
            layer.lazy_initialization(source.keys, source.values)
            for target, states in ((layer.keys, source.keys), (layer.values, source.values)):
                gathered = states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
                target[:, :, :width] = torch.where(real, gathered, 0)

    def load(self, rows: Sequence[RowStates]) -> None:
        """Replace all that is held by `rows`, one entry a row as [`RaggedCache.rows`] gives it; an empty one holds
        nothing."""
        self.batch, self.layers = len(rows), []
        lengths = [held(states) for states in rows]
        self.plan(0, max(lengths))
        for index in range(max(len(states) for states in rows)):
            layer = RaggedLayer(self.planned)
            self.layers.append(layer)
            for row, states in enumerate(rows):
                pair = states[index] if states else None
                if pair is None:
                    continue
                if not layer.is_initialized:
                    layer.lazy_initialization(*(part.expand(self.batch, *part.shape) for part in pair))
                layer.keys[row, :, : lengths[row]] = pair[0]
                layer.values[row, :, : lengths[row]] = pair[1]

    def empty(self, batch: int) -> "RaggedCache":
        """A new cache of the same kind."""
        return RaggedCache(batch, self.planned.capacity)

    @torch.inference_mode()
    def right_aligned(self, lengths: Sequence[int], source: int = 0) -> "RaggedCache":
        """A new cache with a row for each of `lengths`: so many columns of the row `source`, ending together."""
        other, longest = self.empty(len(lengths)), max(lengths)
        for layer in self.layers:
            copy = RaggedLayer(other.planned)
            other.layers.append(copy)
            if layer.is_initialized:
                copy.lazy_initialization(*(s[:1].expand(len(lengths), -1, -1, -1) for s in (layer.keys, layer.values)))
                for row, length in enumerate(lengths):
                    copy.keys[row, :, longest - length : longest] = layer.keys[source, :, :length]
                    copy.values[row, :, longest - length : longest] = layer.values[source, :, :length]
        return other

    def part(self, rows: list[int]) -> "RaggedCache":
        """A cache of its own with copies of `rows`."""
        other = self.empty(len(rows))
        self.lend(rows, other)
        return other

    def lend(self, rows: list[int], other: "RaggedCache") -> None:
        """Put copies of `rows` into `other`, which is empty."""
        for layer in self.layers:
            copied = RaggedLayer(other.planned)
            copied.keys, copied.values, copied.is_initialized = layer.keys, layer.values, layer.is_initialized
            other.layers.append(copied)
        RaggedCache.select(other, rows)

    @torch.inference_mode()
    def take_back(self, rows: list[int], part: "RaggedCache", start: int, end: int) -> None:
        """Copy in columns [`start`, `end`) of `part`, which holds `rows`."""
        self.plan(start, end)
        for own, layer in zip(self.layers, part.layers, strict=True):
            if own.is_initialized:
                own.reserve(end)
                own.keys[rows, :, start:end] = layer.keys[:, :, start:end]
                own.values[rows, :, start:end] = layer.values[:, :, start:end]

    def reach(self, row: int, length: int) -> int:
        """The most of the first `length` tokens of `row` that it can go back to."""
        return length

    def rows(self, index: int, length: int) -> RowStates:
        """A copy of the first `length` columns of row `index`: one (keys, values), each (heads, length, head_dim), a
        layer."""
        return [
            (layer.keys[index, :, :length].clone(), layer.values[index, :, :length].clone())
            if layer.is_initialized
            else None
            for layer in self.layers
        ]


def holds_keys(layer: Any) -> bool:
    """Whether a layer of the caller's cache has keys and values; a recurrent one never does."""
    return getattr(layer, "keys", None) is not None
