"""A causal language model with a ragged cache of its own: blocks of tokens in, logits out."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ..common.warn_once import warn_once
from ..common.wrappers import forward_parameters
from .cache import Cache, RaggedCache, attention_windows, cache_argument, text_config
from .fed import Fed as Fed
from .fed import Wanted as Wanted
from .hooks import call_for_hidden, call_for_states, compute_device, is_hooked
from .masks import Masks, Slots, padding_mask
from .mixers import RECURRENT, mixers_of
from .ranks import share, take_turn, takes_turns
from .recurrent import RecurrentCache
from .sources import Source


class CachedModel:
    """Feeds blocks to `model`, always through its `__call__`, so that hooks, wrappers and device maps keep working.

    Args:
        model: a causal LM (quantized, sharded, wrapped: anything callable like one).
        batch (`int`): number of rows.
        last_position (`int`): positions are capped here; only tokens that can never be returned are ever fed beyond
            it.
        source: what it reads beside text, with the cache that goes with it.
    """

    def __init__(self, model: Any, batch: int, last_position: int, source: Source | None = None) -> None:
        self.model = model
        mixers = mixers_of(model, CachedModel)
        self.source = source or Source(RecurrentCache(batch, mixers) if mixers else RaggedCache(batch))
        self.cache = self.source.cache
        self.last_position = max(last_position, 0)
        self.cache.expect(self.last_position + 64 & ~63)  # kernels like even sizes
        self.cache_name = cache_argument(model)
        parameters = forward_parameters(model)
        self.keeps_logits = "logits_to_keep" in parameters
        self.recurrent = bool(mixers)
        self.takes_positions = "position_ids" in parameters or not self.recurrent
        self.settings = {"use_cache": True, "return_dict": True}
        if "output_router_logits" in parameters:
            self.settings["output_router_logits"] = False  # the loss that a config may ask for reads a 2-D mask
        self.device = compute_device(model)
        self.dtype: torch.dtype = model.dtype
        self.inference_mode = keeps_no_tensors(model) and not takes_turns()
        self.takes_masks = takes_masks(model)
        self.reads_packed = self.takes_masks and not self.recurrent
        self.masks = Masks(attention_windows(model), self.takes_masks, self.dtype, self.device)
        self._places = torch.arange(0, device=self.device).unsqueeze(0)
        self.forwards = 0
        self.tokens = 0
        self.seconds = 0.0

    def feed(self, ids: torch.Tensor, ends: Sequence[int], keep: int) -> torch.Tensor:
        """Run one forward over `ids`, whose last token of row `i` takes column `ends[i] - 1`.

        A block may reach back over tokens that are cached already: they are computed and written again. A row shorter
        than the block has its surplus leading ids put in unused columns behind its end.

        Args:
            ids: (batch, width) int64.
            ends: for each row, the number of tokens it holds after this block.
            keep: how many trailing positions to return logits for.

        Returns:
            (batch, keep, vocabulary) logits, in the model's dtype, on the model's device.
        """
        return self.forward(ids, ends, keep).logits

    def forward(self, ids: torch.Tensor, ends: Sequence[int], keep: int, with_hidden: Wanted = False) -> Fed:
        """As [`CachedModel.feed`], with the last hidden states if they are wanted, or those named."""
        if self.source.positions == "counted" and not _in_step(ends, ids.shape[1]):
            return self._feed_in_parts(ids, ends, keep, [min(ids.shape[1], end) for end in ends], with_hidden)
        if isinstance(self.cache, RecurrentCache):
            widths = self.cache.widths(ends, ids.shape[1])
            if widths is not None:
                self._begin(self.cache, ends, widths)
                return self._feed_in_parts(ids, ends, keep, widths, with_hidden)
        return self._feed(self.source, ids, ends, keep, with_hidden)

    def _feed(
        self,
        source: Source,
        ids: torch.Tensor,
        ends: Sequence[int],
        keep: int,
        with_hidden: Wanted = False,
    ) -> Fed:
        """As `forward`, for rows of which `source` has the cache."""
        width, low, high = ids.shape[1], min(ends), max(ends)
        end = max(high, width)
        uniform = _in_step(ends, width)
        columns = self._columns(ends, width, uniform)
        if not uniform and source.positions == "relative":
            source.cache.plan(end - width, end, columns)
            mask = source.align([end - other for other in ends], width, self.dtype, self.device)
        else:
            source.cache.plan(low - width, end, None if uniform else columns)
            mask = self.masks(columns, end, uniform)
        positions = columns if end <= self.last_position + 1 else columns.clamp(max=self.last_position)
        if isinstance(source.cache, RecurrentCache):
            self._begin(source.cache, ends, [min(width, end) for end in ends])
        logits, hidden = self._run(source, ids, mask, positions.expand(len(ends), -1), keep, with_hidden)
        return share(Fed(logits if logits.shape[1] == keep else logits[:, -keep:], hidden))

    def _feed_in_parts(
        self,
        ids: torch.Tensor,
        ends: Sequence[int],
        keep: int,
        widths: Sequence[int],
        with_hidden: Wanted,
    ) -> Fed:
        """A forward for each length and width of a row's block, for a model that counts what the cache holds, or whose
        states cannot all be put back to one width."""
        logits: dict[int, torch.Tensor] = {}
        hidden: dict[int, torch.Tensor] = {}
        for width, end in sorted(set(zip(widths, ends, strict=True))):
            rows = [row for row, other in enumerate(zip(widths, ends, strict=True)) if other == (width, end)]
            part = self.source.part(rows)
            fed = self._feed(part, ids[rows, ids.shape[1] - width :], [end] * len(rows), keep, with_hidden)
            logits |= dict(zip(rows, fed.logits, strict=True))
            if fed.hidden is not None:
                hidden |= dict(zip(rows, functional.pad(fed.hidden, (0, 0, ids.shape[1] - width, 0)), strict=True))
            self.cache.take_back(rows, part.cache, end - width, end)
        rows = list(range(len(ends)))
        return Fed(_stacked(logits, rows), _stacked(hidden, rows) if hidden else None)

    def _begin(self, cache: RecurrentCache, ends: Sequence[int], widths: Sequence[int]) -> None:
        """Put the rows back to where a forward begins; the time counts."""
        began = time.perf_counter()
        with torch.inference_mode() if self.inference_mode else torch.no_grad():
            cache.begin(ends, widths, self.device)
        self.seconds += time.perf_counter() - began

    def settle(self, lengths: Sequence[int]) -> None:
        """Tell a cache that keeps what rows may go back to how many tokens of each stand."""
        if isinstance(self.cache, RecurrentCache):
            self.cache.settle(lengths)

    def pin(self, lengths: Sequence[int]) -> None:
        """Let such a cache keep what it holds of the first `lengths` tokens of each row, however far they go on."""
        if isinstance(self.cache, RecurrentCache):
            self.cache.pin(lengths)

    def feed_packed(self, ids: torch.Tensor, slots: Slots, keep: list[int]) -> torch.Tensor:
        """Run one forward over a block whose tokens stand where `slots` says.

        Args:
            ids: (batch, width) int64.
            slots: on the host.
            keep: places in the block to return logits for.

        Returns:
            (batch, len(keep), vocabulary) logits, in the model's dtype, on the model's device.
        """
        start, end = int(slots.columns.min()), int(slots.columns.max()) + 1
        uniform = end - start == ids.shape[1]
        slots = Slots(*(part.to(self.device) for part in (slots.columns, slots.positions, slots.seen, slots.first)))
        self.cache.plan(start, end, None if uniform else slots.columns)
        mask = self.masks.packed(slots, end)
        index = torch.tensor(keep or [ids.shape[1] - 1], device=self.device)
        text = slots.positions.clamp(max=self.last_position)
        positions = torch.where(slots.seen == 0, text, slots.positions)
        logits, _ = self._run(self.source, ids, mask, positions, index)
        logits = logits if logits.shape[1] == len(index) else logits[:, index]
        return share(logits) if keep else logits[:, :0]

    def feed_copies(self, ids: torch.Tensor, prefixes: Sequence[int], row: int = 0) -> torch.Tensor:
        """Run one forward over copies of a row, each cut to its prefix, for models that cannot read them packed.

        Args:
            ids: (copies, width) int64, what follows each prefix.
            prefixes: columns of the row that each copy sees.

        Returns:
            (copies, vocabulary) logits after the last id, in the model's dtype, on the model's device.
        """
        width, longest = ids.shape[1], max(prefixes)
        cut = Source(self.cache.right_aligned(prefixes, row))
        cut.cache.plan(longest, longest + width)
        if isinstance(cut.cache, RecurrentCache):
            self._begin(cut.cache, [prefix + width for prefix in prefixes], [width] * len(prefixes))
        starts = torch.tensor(prefixes, device=self.device).unsqueeze(1)
        positions = starts + torch.arange(width, device=self.device)
        mask = padding_mask(longest - starts, longest + width)
        return share(self._run(cut, ids, mask, positions, 1).logits[:, -1])

    def feed_padded(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> None:
        """Run one forward as plain decoding does, over rows in the caller's layout.

        Args:
            ids, positions: (batch, width) int64.
            mask: (batch, columns) int64 over what `cache` holds and `ids`, 1 for a token.
            cache: a cache of transformers' own, which is extended.
        """
        self._run(Source(cast(Any, cache)), ids, mask.to(self.device), positions.to(self.device), 1)

    def count(self, other: "CachedModel") -> None:
        """Count the forwards of `other` among its own."""
        self._count(other.forwards, other.tokens, other.seconds)

    def _count(self, forwards: int, tokens: int, seconds: float) -> None:
        self.forwards += forwards
        self.tokens += tokens
        self.seconds += seconds

    def _run(
        self,
        source: Source,
        ids: torch.Tensor,
        mask: Any,
        positions: torch.Tensor,
        keep: int | torch.Tensor,
        with_hidden: Wanted = False,
    ) -> Fed:
        """One counted call of the model, see `_call`."""
        began = time.perf_counter()
        fed = self._call(source, ids, mask, positions, keep, with_hidden)
        if not self.forwards and not source.cache.is_filled:
            raise ValueError(
                f"{type(self.model).__name__} wrote nothing to the cache it was given (gradient checkpointing in "
                "train mode does that): call .eval() or .gradient_checkpointing_disable() on it first"
            )
        self._count(1, ids.numel(), time.perf_counter() - began)
        return fed

    def _call(
        self,
        source: Source,
        ids: torch.Tensor,
        mask: Any,
        positions: torch.Tensor,
        keep: int | torch.Tensor,
        with_hidden: Wanted = False,
    ) -> Fed:
        """One call of the model, which may return logits beyond `keep`, a number of last places or an index."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "attention_mask": mask,
            "position_ids": positions,
            self.cache_name: source.cache,
            **self.settings,
        }
        if self.keeps_logits and (not isinstance(keep, int) or keep < ids.shape[1]):
            arguments["logits_to_keep"] = keep
        if not self.takes_positions:
            del arguments["position_ids"]
        if self.recurrent and isinstance(mask, dict):
            arguments["attention_mask"] = dict.fromkeys(RECURRENT) | mask
        arguments = source.arguments(arguments, self.cache_name)
        take_turn(self.model)
        noted = source.cache.reading() if isinstance(source.cache, RecurrentCache) else nullcontext()
        with torch.inference_mode() if self.inference_mode else torch.no_grad(), noted:
            if not with_hidden:
                return Fed(self.model(**arguments).logits, None)
            if isinstance(with_hidden, tuple):
                output, hidden = call_for_states(self.model, arguments, with_hidden)
            else:
                output, hidden = call_for_hidden(self.model, arguments)
        return Fed(output.logits, hidden)

    def _columns(self, ends: Sequence[int], width: int, uniform: bool) -> torch.Tensor:
        if uniform:
            if self._places.shape[1] < ends[0]:
                self._places = torch.arange(2 * ends[0], device=self.device).unsqueeze(0)
            return self._places.narrow(1, ends[0] - width, width)
        columns = torch.tensor(ends, device=self.device).unsqueeze(1) + torch.arange(-width, 0, device=self.device)
        return torch.where(columns < 0, columns + width, columns)


def context_of(model: Any) -> int | None:
    """The longest text that `model` can read, in tokens; `None` where its config names no limit."""
    config = text_config(model)
    names = ("max_target_positions", "max_position_embeddings")
    return next((limit for limit in (getattr(config, name, None) for name in names) if limit), None)


def warn_of_context(context: int) -> None:
    """One warning that the draft has been outgrown."""
    warn_once(
        f"the text has outgrown the draft's context of {context} tokens: rows past it are decoded without drafts "
        "from there on",
        late=True,
    )


def takes_masks(model: Any) -> bool:
    """Whether the attention of `model` takes a 4-D mask; flash attention takes none."""
    return getattr(model.config, "_attn_implementation", None) in ("eager", "sdpa")


def keeps_no_tensors(model: Any) -> bool:
    """Whether `model` may run in inference mode, a tenth faster on small CPU models.

    What is made there can never enter autograd again, so models that may store results of a forward are left out:
    those in train mode, quantized ones, ones with hooks or wrappers, and rotary embeddings that adapt to the text's
    length.
    """
    return (
        isinstance(model, PreTrainedModel)
        and not model.training
        and getattr(model, "hf_quantizer", None) is None
        and not is_hooked(model)
        and not has_adapting_rope(model)
    )


ADAPTING = ("dynamic", "longrope")


def rope_parameters(model: Any) -> Any:
    """What the config of `model` says of its rotary embeddings, whatever the version of transformers calls it."""
    config = text_config(model)
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def has_adapting_rope(model: Any) -> bool:
    """Whether rotary embeddings of `model`, of any kind of layer, change with the text's length."""
    return any(kind in str(rope_parameters(model)) for kind in ADAPTING)


def _stacked(found: dict[int, torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    return torch.stack([found[row] for row in rows])


def _in_step(ends: Sequence[int], width: int) -> bool:
    """Whether a block of `width` that ends at `ends` takes the same columns in every row, none before the first."""
    return width <= min(ends) == max(ends)
