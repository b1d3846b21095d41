"""What a model reads beside its text, and the cache that goes with it: an encoder's states, or images."""

import copy
from typing import Any, Literal

import torch
from transformers.modeling_outputs import BaseModelOutput

from .cache import Cache, RaggedCache
from .masks import aligned_mask
from .stock_caches import cross_states, crossed_cache, paired_caches

Positions = Literal["given", "relative", "counted"]


class Source:
    """What the forwards of a model get beside text: nothing; and the cache that they write to.

    `positions` says how a model knows where a token stands: `"given"` as an argument, `"relative"` from the distance
    between columns, `"counted"` from the length of the cache, which is then one number for all rows.
    """

    positions: Positions = "given"

    def __init__(self, cache: RaggedCache) -> None:
        self.cache = cache

    def arguments(self, given: dict[str, Any], cache_name: str) -> dict[str, Any]:
        """The arguments of a forward, made from those of a causal LM reading text alone."""
        return given

    def complete(self, cache: Cache) -> Cache:
        """The cache that `generate` returns, made of the one of the text."""
        return cache

    def align(self, shifts: list[int], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Show the planned forward, a block of `width`, each row moved `shifts` columns to the right, so that all end
        together; returns its mask."""
        raise NotImplementedError

    def part(self, rows: list[int]) -> "Source":
        """The same for `rows` alone, with copies of what the cache holds of them."""
        part = copy.copy(self)
        part.cache = self.cache.part(rows)
        return part


class Images(Source):
    """Images, which the first forward gets; it reads the whole prompts.

    Args:
        batch (`int`): number of prompts.
        inputs: the forward's arguments by name.
    """

    def __init__(self, batch: int, inputs: dict[str, Any]) -> None:
        super().__init__(RaggedCache(batch))
        self.inputs = inputs

    def arguments(self, given: dict[str, Any], cache_name: str) -> dict[str, Any]:
        """`given`, with the images the first time."""
        inputs, self.inputs = self.inputs, {}
        return given | inputs


class Encoded(Source):
    """An encoder's states, to which every forward of the decoder attends.

    Args:
        hidden: (batch, source length, width), the encoder's last hidden states.
        mask: (batch, source length), which of them are no padding; `None` for all.
        positions: as [`Source`].
        nested (`bool`): whether the model is an encoder-decoder, not a decoder that takes `encoder_outputs`.
        keeps_first (`bool`): keep what the first rows have of the encoder, for a cache that is returned.
    """

    cache: "CrossCache"

    def __init__(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: Positions,
        nested: bool = True,
        keeps_first: bool = False,
    ) -> None:
        super().__init__(CrossCache(hidden, mask, keeps_first=keeps_first))
        self.positions = positions
        self.nested = nested

    def arguments(self, given: dict[str, Any], cache_name: str) -> dict[str, Any]:
        """`given` under the decoder's names, with the encoder's states and a cache for both kinds of attention."""
        positions = given.pop("position_ids")
        if self.nested:
            given["decoder_input_ids"] = given.pop("input_ids")
            given["decoder_attention_mask"] = given.pop("attention_mask")
            given["attention_mask"] = self.cache.mask
        if self.positions == "given":
            given["decoder_position_ids" if self.nested else "position_ids"] = positions
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=self.cache.hidden)
        given[cache_name] = paired_caches(self.cache, self.cache.crossed)
        return given

    def complete(self, cache: Cache) -> Cache:
        """`cache` beside what the first rows of the decoder had of the encoder."""
        crossed = self.cache.crossed
        return paired_caches(cache, crossed_cache(self.cache.first or cross_states(crossed)))

    def align(self, shifts: list[int], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As [`Source.align`]."""
        moved = torch.tensor(shifts, device=device)
        self.cache.show_aligned(moved)
        return aligned_mask(moved, width, self.cache.planned.end, dtype)


class CrossCache(RaggedCache):
    """A ragged cache of a decoder, with what its rows have of the encoder.

    Args:
        hidden, mask, keeps_first: as [`Encoded`].
    """

    def __init__(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, capacity: int = 64, keeps_first: bool = False
    ) -> None:
        super().__init__(len(hidden), capacity)
        self.hidden = hidden
        self.mask = mask
        self.crossed = crossed_cache([])
        self.keeps_first = keeps_first
        self.first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._order: torch.Tensor | None = None

    def plan(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """As [`RaggedCache.plan`]; the states are shown as they stand."""
        super().plan(start, end, columns)
        self._order = None

    def show_aligned(self, shifts: torch.Tensor) -> None:
        """Show the planned forward every row moved `shifts` (batch,) columns to the right."""
        columns = torch.arange(self.planned.end, device=shifts.device)
        self._order = (columns - shifts.unsqueeze(1)).clamp(min=0)[:, None, :, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the planned block and return the states that its queries may see."""
        keys, values = super().update(key_states, value_states, layer_idx)
        if self._order is None:
            return keys, values
        index = self._order.to(keys.device).expand(-1, keys.shape[1], -1, -1)
        shown = [states.gather(2, index.expand(-1, -1, -1, states.shape[3])) for states in (keys, values)]
        return shown[0], shown[1]

    def select(self, rows: list[int]) -> None:
        """Keep `rows` (indices into the batch, repeats allowed) in that order; frees the others."""
        super().select(rows)
        crossed = cross_states(self.crossed)
        if self.keeps_first:
            self.first = self.first or crossed
        self.hidden, self.mask, self.crossed = self._chosen(rows)

    def part(self, rows: list[int]) -> "CrossCache":
        """As [`RaggedCache.part`]."""
        hidden, mask, crossed = self._chosen(rows)
        other = CrossCache(hidden, mask, self.planned.capacity)
        self.lend(rows, other)
        other.crossed = crossed
        return other

    def _chosen(self, rows: list[int]) -> tuple[Any, Any, Any]:
        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, torch.tensor(rows, device=tensor.device))

        mask = None if self.mask is None else chosen(self.mask)
        crossed = crossed_cache([(chosen(keys), chosen(values)) for keys, values in cross_states(self.crossed)])
        return chosen(self.hidden), mask, crossed
