"""Turns of `semantic`: the draft writes a segment for some rows, the target reads it, while the other rows wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...engine.acceptance import Acceptance
from ...engine.cache import RowStates, cut, held
from ...engine.call import CallState
from ...engine.draft import Draft
from ...engine.model import CachedModel, Fed
from ...engine.prefixes import Prefixes
from ...engine.processors import Processors, faults
from ...engine.request import Block, Decided
from ...engine.rounds import Speculation
from .rules import within_top_k

CHECK_TOKENS = 128  # positions whose logits are held at once


class Evidence(NamedTuple):
    """What scorers look at of a segment in each of some rows, under one model.

    Args:
        log_prob: (rows,) float64 sum of the tokens' log-probabilities; `None` if not asked for.
        features: (rows, size) sum of the last hidden states that predict the tokens; `None` if not asked for.
    """

    log_prob: torch.Tensor | None
    features: torch.Tensor | None

    def of(self, rows: Sequence[int]) -> "Evidence":
        """That of `rows` alone, which are places in these."""
        index = list(rows)
        return Evidence(*(None if part is None else part[index] for part in self))


class RowShelf:
    """Which rows a model's cache holds, in order, and what it held of the rows that wait.

    Args:
        model: with a cache that holds all rows.
        cached: for each row, the tokens it holds.
    """

    def __init__(self, model: CachedModel, cached: Sequence[int]) -> None:
        self.model = model
        self.cached = list(cached)
        self.rows = list(range(len(cached)))
        self.parked: dict[int, RowStates] = {}

    def bring(self, rows: Sequence[int]) -> None:
        """Let the cache hold exactly `rows`, in this order."""
        rows = list(rows)
        if not rows:
            self.park_all()
        elif rows == self.rows:
            pass
        elif set(rows) <= set(self.rows):
            places = {row: place for place, row in enumerate(self.rows)}
            self._park(set(self.rows) - set(rows))
            self.model.cache.select([places[row] for row in rows])
        else:
            self._park(set(self.rows))
            self.model.cache.load([self.parked.pop(row, []) for row in rows])
        self.rows = rows
        for place, row in enumerate(rows):
            self.cached[row] = self.model.cache.reach(place, self.cached[row])

    def states(self, row: int) -> RowStates:
        """What is held of a row that waits."""
        return cut(self.parked.get(row, []), self.cached[row])

    def park_all(self) -> None:
        """Let all rows wait."""
        self._park(set(self.rows))
        self.rows = []

    def take(self, state: Speculation, states: dict[int, RowStates], lengths: Sequence[int]) -> None:
        """Note what a turn has left in the cache, of rows that now have `lengths` (one for each row of the call).

        Args:
            states: what the turn kept of the rows that left; a single row stays where it is without.
        """
        goes_on = {*state.live, *state.paused}
        self.parked.update({row: states[row] for row in state.paused if row in states})
        self.rows = [row for row in self.rows if row in goes_on and row not in self.parked]
        for row in goes_on:
            self.hold(row, lengths[row])

    def park(self, row: int, states: RowStates) -> None:
        """Let a row wait, of which a cache held `states`."""
        self.parked[row], self.cached[row] = states, held(states)

    def hold(self, row: int, length: int) -> None:
        """The row has `length` tokens, of which all but the last are held."""
        self.cached[row] = length - 1

    def roll_back(self, row: int, length: int) -> None:
        """The row now has `length` tokens, the last of which is still to be fed."""
        self.cached[row] = min(self.cached[row], length - 1)

    def _park(self, rows: set[int]) -> None:
        for place, row in enumerate(self.rows):
            if row in rows:
                self.cached[row] = self.model.cache.reach(place, self.cached[row])
                self.parked[row] = self.model.cache.rows(place, self.cached[row])


class Turn(Speculation):
    """Rounds over some of a call's rows, while others wait or are written by another turn.

    Args:
        dictated: ids that are decided already, by row: where there are any the next one is taken instead of a draw.
        others: as [`Speculation`].
    """

    def __init__(self, *args: Any, dictated: dict[int, list[int]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dictated = dictated or {}

    def commit(self, block: Block, decision: Acceptance) -> Decided:
        """Append what was decided."""
        queues = [self.dictated.get(row) for row in self.live]
        if any(queues):
            decision = self.drawn(decision)
            assert decision.token is not None
            token = decision.token.clone()
            for place, ids in enumerate(queues):
                if ids:
                    token[place] = ids.pop(0)
            decision = decision._replace(token=token)
        return super().commit(block, decision)


class Writing(Turn):
    """A turn of a model that writes by itself, and what scorers want to know of its tokens.

    Args:
        with_features (`bool`): whether to keep `features`.
        others: as [`Speculation`]; `target` is the model that writes.

    Afterwards `evidence` holds both sums for any of its rows, the first if laws are kept.
    """

    def __init__(self, *args: Any, with_features: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, with_hidden=with_features, **kwargs)
        self.log_prob = torch.zeros(self.call.batch, dtype=torch.float64, device=self.call.device)
        self.features: torch.Tensor | None = None

    def commit(self, block: Block, decision: Acceptance) -> Decided:
        """Append one token to each row that has a law."""
        decision = self.drawn(decision)
        assert decision.token is not None
        rows, none = torch.tensor(self.live, device=self.call.device), block.faults[:, 0] > 0  # (rows,), (rows, 1)
        if block.log_p is not None:
            own = block.log_p[:, 0, 0].gather(-1, decision.token.unsqueeze(-1)).masked_fill(none, 0.0).squeeze(-1)
            self.log_prob.index_add_(0, rows, own.double())
        if block.hidden is not None:
            hidden = wide(block.hidden[:, -1].to(self.call.device)).masked_fill(none, 0.0)
            if self.features is None:
                self.features = hidden.new_zeros(self.call.batch, hidden.shape[-1])
            self.features.index_add_(0, rows, hidden)
        return super().commit(block, decision)

    def run(self, cached: Sequence[int]) -> None:
        """Feed what the model lacks of the rows, of which it holds `cached` tokens each, and write until none is
        open. Rows that its own EOS has ended are paused like the others: nobody has judged them yet."""
        lengths = dict(zip(self.live, self.call.lengths(self.live), strict=True))
        self.prefill(cached)
        self.target.pin([lengths[row] - 1 for row in self.live])
        while self.running:
            block = self.draft_and_score()
            self.commit(block, self.plain(block))
        self.paused = sorted({*self.paused, *self.call.hits})

    def evidence(self, rows: Sequence[int]) -> Evidence:
        """Of what it has written in `rows`."""
        return Evidence(self.log_prob, self.features).of(rows)


@dataclass
class Reading:
    """What a model has read of segments that the other one wrote, one a row, of at most γ tokens.

    Args:
        ids: (rows, γ) int64; what is behind a row's own count means nothing, here as in the following.
        counts: tokens of each row's segment.
        first, last: (rows, vocabulary) processed scores before the segment's first token, and after its last.
        choices: (rows, γ + 1) int64, the best id at each place.
        top_k: (rows,) bool, whether every token is among the k best; `None` if k is 0.
        evidence: what scorers look at.
        scores, logits: (rows, γ + 1, vocabulary) float32, processed and raw; `None` unless the caller wants them, or
            a trace the processed ones.
        faults: (rows,) int64, the worst that is wrong with the scores of a row's own places.
    """

    ids: torch.Tensor
    counts: list[int]
    first: torch.Tensor
    last: torch.Tensor
    choices: torch.Tensor
    top_k: torch.Tensor | None
    evidence: Evidence
    scores: torch.Tensor | None
    logits: torch.Tensor | None
    faults: torch.Tensor

    def block(self, rows: list[int], draft: Draft, sampling: bool) -> Block:
        """What is to be committed of it, with the segments it was made of."""
        scores = self.scores
        if scores is None:
            scores = self.first[:, None, :1].expand(-1, draft.ids.shape[2] + 1, -1)  # only their number is looked at
        logits = None if self.logits is None else self.logits.unsqueeze(1)
        choices = None if sampling else self.choices.unsqueeze(1)
        flaws = self.faults[:, None, None].expand(-1, 1, scores.shape[1])
        return Block(rows, draft, scores.unsqueeze(1), logits, None, choices, None, flaws)


class Reader:
    """Reads segments that another model wrote: the target those of the draft.

    Args:
        call: the call.
        target: the model that reads.
        processors: of its logits.
        top_k (`int`): k of `Reading.top_k`.
        with_laws, with_features (`bool`): which of its evidence is wanted.
    """

    def __init__(
        self,
        call: CallState,
        target: CachedModel,
        processors: Processors,
        top_k: int = 0,
        with_laws: bool = False,
        with_features: bool = False,
    ) -> None:
        self.call, self.target, self.processors = call, target, processors
        self.top_k, self.with_laws, self.with_features = top_k, with_laws, with_features

    def __call__(self, rows: Sequence[int], counts: Sequence[int], cached: Sequence[int]) -> Reading:
        """Read the `counts` ids that stand on the canvas behind each of `rows`, in as many forwards as keep
        `CHECK_TOKENS` logits a row each.

        Args:
            rows: what the target's cache holds, in order.
            cached: for each of them, the tokens that the cache holds, at least one fewer than the row has.
        """
        most, lengths = max(counts), self.call.lengths(rows)
        back = max(length - held for length, held in zip(lengths, cached, strict=True))
        self.call.canvas.reserve(max(self.call.canvas.widths(rows)) + most)
        ids = self.call.canvas.read(rows, 0, most)
        numbers = torch.tensor(counts, device=self.call.device).unsqueeze(1)
        texts = None
        if self.processors.wants_text:
            valid = torch.arange(most, device=ids.device) < numbers
            texts = Prefixes(self.call.canvas, rows, ids.unsqueeze(1), valid.unsqueeze(1))
        parts: dict[str, list[torch.Tensor]] = {}
        for at in range(0, most + 1, CHECK_TOKENS):
            size = min(most + 1 - at, CHECK_TOKENS)
            block = self.call.canvas.read(rows, back, size - 1) if at == 0 else ids[:, at - 1 : at - 1 + size]
            ends = [length + at + size - 1 for length in lengths]
            fed = self.target.forward(block, ends, size, self.with_features)
            for name, value in self._part(rows, ids, numbers, fed, at, texts).items():
                parts.setdefault(name, []).append(value)
        last = parts["last"][0]
        for here, value in zip(parts["holds_last"][1:], parts["last"][1:], strict=True):
            last = torch.where(here, value, last)
        return Reading(
            ids,
            list(counts),
            parts["first"][0],
            last,
            torch.cat(parts["choices"], dim=1),
            torch.stack(parts["top_k"]).all(dim=0) if "top_k" in parts else None,
            Evidence(*(torch.stack(parts[name]).sum(dim=0) if name in parts else None for name in Evidence._fields)),
            torch.cat(parts["scores"], dim=1) if "scores" in parts else None,
            torch.cat(parts["logits"], dim=1) if "logits" in parts else None,
            torch.stack(parts["faults"]).amax(dim=0),
        )

    def _part(
        self, rows: Sequence[int], ids: torch.Tensor, numbers: torch.Tensor, fed: Fed, at: int, texts: Prefixes | None
    ) -> dict[str, torch.Tensor]:
        """What the logits (rows, size, vocabulary) of the places from `at` on say: place t predicts the segment's
        token t, and the place behind its last token what follows it. Rows end at different places."""
        call, size = self.call, fed.logits.shape[1]
        raw = fed.logits.to(device=call.device, dtype=torch.float32)
        found: dict[str, torch.Tensor] = {"logits": raw.clone()} if call.logits.wanted else {}
        widths = [width + at for width in call.canvas.widths(rows)]
        asked = None if texts is None else texts.at(at)
        scores = self.processors(raw.unsqueeze(1), call.canvas.shown, rows, widths, asked).squeeze(1)
        if call.scores.wanted or call.trace is not None:
            found["scores"] = scores
        t = torch.arange(at, at + size, device=call.device)
        drafted, real = t < numbers, t <= numbers  # (rows, size)
        peak, found["choices"] = scores.max(dim=-1)
        found["faults"] = faults(peak).masked_fill(~real, 0).amax(dim=-1)
        found["first"] = scores[:, 0]
        found["holds_last"] = (numbers >= at) & (numbers < at + size)
        place = (numbers - at).clamp(min=0, max=size - 1).squeeze(1)
        found["last"] = scores[torch.arange(len(rows), device=call.device), place]
        tokens = functional.pad(ids, (0, 1))[:, at : at + size]
        if self.top_k:
            found["top_k"] = (within_top_k(scores, tokens, self.top_k) | ~drafted).all(dim=-1)
        if self.with_laws:
            own = functional.log_softmax(scores, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            own = own.masked_fill(peak == -torch.inf, -torch.inf)  # no law at all: nan
            found["log_prob"] = own.double().masked_fill(~drafted, 0.0).sum(dim=-1)
        if fed.hidden is not None:
            hidden = wide(fed.hidden[:, -size:].to(call.device))
            found["features"] = hidden.masked_fill(~drafted.unsqueeze(-1), 0.0).sum(dim=1)
        return found


def wide(values: torch.Tensor) -> torch.Tensor:
    """`values` in float32, or in float64 if they are."""
    return values if values.dtype == torch.float64 else values.float()
