"""Which texts a processor may be asked about: those that decoding can come to, and no others."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import PrefixConstrainedLogitsProcessor, logits_process

from .tokens import Canvas


def asks_for_text(processor: Any) -> bool:
    """Whether a processor may fail on a text that is none: any but transformers' own, of which a trie may."""
    kind = type(processor)
    return kind is PrefixConstrainedLogitsProcessor or kind.__module__ != logits_process.__name__


class Prefixes:
    """The texts that end before each place of a block, for rows of a call and their chains, and whether they are real.

    Not real is what stands behind an EOS, behind an id that was not drafted, or that the processors mask out, and the
    text of a chain that is idle.

    Args:
        canvas: the text of all rows.
        live: the rows of the block, indices into the caller's batch.
        ids: (rows, chains, γ) int64, what stands behind their text; places are γ + 1.
        valid: (rows, chains or 1, γ) bool, which of them there really are; all by default.
    """

    def __init__(
        self, canvas: Canvas, live: Sequence[int], ids: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> None:
        shape, device = (len(live), canvas.shown.shape[1]), canvas.shown.device
        self.ids = torch.zeros(*shape, 0, dtype=torch.long, device=device) if ids is None else ids
        self.eos = torch.tensor(sorted(canvas.eos_ids), dtype=torch.long, device=device)
        self.prompt_width, self.first = canvas.prompt_width, 0
        real = torch.ones(*shape, self.ids.shape[2] + 1, dtype=torch.bool, device=device)
        if canvas.idle is not None:
            real[:, :, 0] = ~canvas.idle[list(live)]
        real[:, :, 1:] = ~torch.isin(self.ids, self.eos) & (True if valid is None else valid)
        self.real: list[list[list[bool]]] = real.cumprod(dim=-1).bool().tolist()
        rows = range(len(canvas.generated))
        widths = canvas.widths(rows)
        # Columns up to which a row that is not asked about shows its own text: one that has ended, its padding too.
        self.reach = [float("inf") if row in canvas.ended else widths[row] for row in rows]

    def at(self, first: int) -> "Prefixes":
        """The same from place `first` on."""
        other = copy.copy(self)
        other.first = first
        return other

    def only(self, rows: Sequence[bool]) -> "Prefixes":
        """The same without the rows that are not among `rows`, one flag each."""
        other = copy.copy(self)
        other.real = [
            own if kept else [[False] * len(one) for one in own] for own, kept in zip(self.real, rows, strict=True)
        ]
        return other

    def grow(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        """The one place of each chain moves behind `tokens` (rows, chains), which were taken by `scores` (rows,
        chains, vocabulary)."""
        own = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        goes_on = (~torch.isin(tokens, self.eos) & (own != -torch.inf)).tolist()
        self.real = [
            [[one[0] and more] for one, more in zip(row, flags, strict=True)]
            for row, flags in zip(self.real, goes_on, strict=True)
        ]

    def in_blocks(self, rows: int, ids: torch.Tensor) -> "Prefixes":
        """The same for a population that stands in blocks of `rows` rows for each prompt, as its `ids` do."""
        other = copy.copy(self)
        last, blocks = len(self.real[0]) - 1, ids.shape[1]
        other.ids = ids
        other.real = [[own[min(c * rows + i, last)] for c in range(blocks)] for own in self.real for i in range(rows)]
        other.reach = [width for width in self.reach for _ in range(rows)]
        return other

    def ask(
        self,
        processors: Sequence[tuple[Any, bool]],
        scores: torch.Tensor,
        shown: torch.Tensor,
        live: Sequence[int],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Process `scores` where the text is real, place by place, all processors in turn; the rest stays as it is.

        Args:
            processors: in order, and whether each looks at the scores alone.
            scores, shown, live, lengths: as [`processors.Processors.__call__`].
        """
        scores, positions = scores.clone(), scores.shape[2]
        for length in sorted({own + t for own in lengths for t in range(positions)}):
            for chain in range(scores.shape[1]):
                places = {i: length - own for i, own in enumerate(lengths) if 0 <= length - own < positions}
                at = [i for i, t in places.items() if self.real[i][chain][self.first + t]]
                if not at:
                    continue
                where = (at, chain, [places[i] for i in at])
                rows = [live[i] for i in at]
                history = self._history(shown[:, chain, :length], rows)
                found = scores[where]
                for processor, alone in processors:
                    found = processor(history, found) if alone else self._asked(processor, history, rows, found)
                    found = found.to(scores.dtype)
                scores[where] = found
                self._drop_masked(at, chain, [self.first + places[i] for i in at], found)
        return scores

    def _history(self, shown: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """What is shown of all rows; one whose text does not go so far has the new text of one that is asked about."""
        history, width = shown.clone(), self.prompt_width
        for row in self._standing_in(shown.shape[1], rows):
            history[row, width:] = history[rows[0], width:]
        return history

    def _standing_in(self, length: int, rows: Sequence[int]) -> list[int]:
        return [row for row, width in enumerate(self.reach) if row not in rows and width <= length]

    def _asked(self, processor: Any, history: torch.Tensor, rows: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            # It asks about each row by itself, and numbers prompts: the rows of other texts need not be there.
            allowed, each = processor._prefix_allowed_tokens_fn, processor._num_beams
            own = PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index] // each, ids), 1)
            constrained: torch.Tensor = own(history[list(rows)], scores)
            return constrained
        full = scores.new_zeros((len(history), scores.shape[-1]))
        full[self._standing_in(history.shape[1], rows)] = scores[0]
        full[list(rows)] = scores
        processed: torch.Tensor = processor(history.clone(), full)[list(rows)]
        return processed

    def _drop_masked(self, at: Sequence[int], chain: int, places: Sequence[int], scores: torch.Tensor) -> None:
        """What stands behind an id that is masked out is no text."""
        going = [k for k, place in enumerate(places) if place < self.ids.shape[2]]
        if not going:
            return
        ids = self.ids[[at[k] for k in going], chain, [places[k] for k in going]]
        masked = scores[going].gather(-1, ids.unsqueeze(-1)).squeeze(-1) == -torch.inf
        for k, flag in zip(going, masked.tolist(), strict=True):
            if flag:
                real = self.real[at[k]][chain]
                real[places[k] + 1 :] = [False] * (len(real) - places[k] - 1)
