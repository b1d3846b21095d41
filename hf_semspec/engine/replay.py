"""Processors that keep a state, as functions of `(input_ids, scores)`: each row has its own, fed its text in order."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


def restarts(processor: Any) -> Callable[[int], Any] | None:
    """How to get one like `processor` that has seen nothing, for a row of the caller's batch; `None` if it does not
    say how.

    A processor says so by a method `fresh()`. Those of outlines (any backend) and `xgrammar.contrib.hf` are known.
    """
    if callable(getattr(processor, "fresh", None)):
        return lambda row: processor.fresh()
    homes = {(base.__module__, base.__name__) for base in type(processor).__mro__}
    if ("outlines.processors.base_logits_processor", "OutlinesLogitsProcessor") in homes:
        return lambda row: _reset(processor)
    if ("xgrammar.contrib.hf", "LogitsProcessor") in homes:
        grammars = list(processor.compiled_grammars)
        return lambda row: type(processor)(grammars[row % len(grammars)])
    return None


def _reset(processor: Any) -> Any:
    """A shallow copy, reset; it asks no `__getstate__`, which may reset the original."""
    other = object.__new__(type(processor))
    other.__dict__.update(vars(processor))
    other.reset()
    return other


class Replayed:
    """A processor with a state as a function of `(input_ids, scores)`.

    Every row has one of its own, which is called once a token, with that row alone, as plain decoding does. Where the
    text is not what it was fed before, it starts anew. A text with an id that the processor masked out itself, or with
    an EOS, is never real: its scores are returned as they are.

    Args:
        fresh: makes a processor that has seen nothing, for a row.
        width (`int`): columns of the prompt.
        eos: ids that end a row.
    """

    def __init__(self, fresh: Callable[[int], Any], width: int, eos: Iterable[int] = ()) -> None:
        self.fresh, self.width, self.eos = fresh, width, frozenset(eos)
        self.rows: dict[int, tuple[Any, list[int], torch.Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> "Replayed":
        return Replayed(self.fresh, self.width, self.eos)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process `scores` (rows, vocabulary) behind `input_ids` (rows, width)."""
        texts = input_ids[:, self.width :].tolist()
        rows = [self._row(row, text, input_ids[row], scores[row]) for row, text in enumerate(texts)]
        return torch.stack([row.to(scores.dtype) for row in rows])

    def _row(self, row: int, text: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if any(token in self.eos or not 0 <= token < len(scores) for token in text):
            return scores
        processor, told, answer = self.rows.pop(row, (None, [], scores))
        start = len(told) + 1
        # What it was shown last may have been masked by others: only its answers to zeros say what it allows.
        if (
            processor is None
            or start > len(text)
            or text[: start - 1] != told
            or not answer[text[start - 1]] > -torch.inf
        ):
            processor, start = self.fresh(row), 0
        for count in range(start, len(text) + 1):
            if count > start and not answer[text[count - 1]] > -torch.inf:
                return scores
            given = scores if count == len(text) else torch.zeros_like(scores)
            answer = processor(ids[None, : self.width + count].clone(), given[None].clone())[0]
        self.rows[row] = (processor, text, answer.detach().clone())
        return answer
