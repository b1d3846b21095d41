"""Where a committed block ends: EOS, length and any stopping criterion, judged as if its tokens had come one by
one."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


class StopRules:
    """The caller's stopping criteria, split into what the host can decide from token ids and what must be called.

    Args:
        criteria: `generate`'s prepared stopping criteria.
        prompt_width (`int`): columns of the caller's prompt.
        max_length (`int`): what holds where no criterion limits the length; `generate` makes one of its own, whose
            place one of the caller's takes.
    """

    def __init__(self, criteria: Sequence[Any], prompt_width: int, max_length: int) -> None:
        eos = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.eos_ids = {int(token) for criterion in eos for token in criterion.eos_token_id.tolist()}
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.room = max(min(limits, default=max_length) - prompt_width, 1)
        self.called = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]

    def eos_only(self) -> "StopRules":
        """The same rules without the criteria that must be called, for text that may yet be dropped."""
        other = copy.copy(self)
        other.called = []
        return other

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over, for whoever works on without committing anything."""
        limits = [c for c in self.called if isinstance(c, MaxTimeCriteria)]
        return any(time.time() - limit.initial_timestamp > limit.max_time for limit in limits)

    def cut(
        self,
        tokens: Sequence[Sequence[int]],
        live: Sequence[int],
        widths: Sequence[int],
        show: Callable[[int], torch.Tensor],
        scores: Callable[[int], Any],
    ) -> list[int | None]:
        """For each row, how many of its new `tokens` stay if it ends among them, else `None`.

        Args:
            tokens: for each row, the ids just committed.
            live: for each row, its index in the caller's batch.
            widths: for each row, the columns of the caller's layout before those ids.
            show: gives the caller's (batch, width) ids for a width, with the new tokens in place; or several such
                blocks, (batch, blocks, width), whose rows `live` counts block after block.
            scores: gives what criteria get as `scores` for a width.
        """
        ends: list[int | None] = [None] * len(tokens)
        for i, row in enumerate(tokens):
            ends[i] = next((t + 1 for t, token in enumerate(row) if token in self.eos_ids), None)
        if not self.called:
            return ends
        last = {i: widths[i] + (ends[i] or len(row)) for i, row in enumerate(tokens)}
        for width in range(min(widths) + 1, max(last.values()) + 1):
            judged = [i for i in last if widths[i] < width <= last[i]]
            if not judged:
                continue
            verdict = self._call(show(width), scores(width))
            for i in judged:
                if verdict[live[i]]:
                    ends[i] = width - widths[i]
                    del last[i]
            if not last:
                break
        return ends

    def _call(self, ids: torch.Tensor, scores: Any) -> list[bool]:
        if ids.dim() == 3:
            return [flag for block in ids.unbind(dim=1) for flag in self._call(block.clone(), scores)]
        verdict = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        for criterion in self.called:
            verdict = verdict | torch.as_tensor(criterion(ids, scores), device=ids.device)
        return [bool(flag) for flag in verdict.tolist()]


class OneEnd:
    """The caller's streamer, which hears of the end once, whatever comes of it."""

    def __init__(self, streamer: Any) -> None:
        self.put = streamer.put
        self._end: Any = streamer.end

    def end(self) -> None:
        """Hand it on, the first time."""
        end, self._end = self._end, None
        if end is not None:
            end()


class SettledStream:
    """Feeds a streamer the way plain `generate` does: one column of the batch at a time, each once, and only settled
    ones."""

    def __init__(self, streamer: Any, prompt_width: int) -> None:
        self.streamer = streamer
        self.sent = prompt_width

    def advance(self, shown: torch.Tensor, width: int) -> None:
        """Send the columns of `shown` (batch, columns) up to `width` that were not sent yet."""
        if self.streamer is None or width <= self.sent:
            return
        for column in shown[:, self.sent : width].cpu().unbind(dim=1):
            self.streamer.put(column)
        self.sent = width

    def end(self) -> None:
        """Tell the streamer that nothing more comes."""
        if self.streamer is not None:
            self.streamer.end()
