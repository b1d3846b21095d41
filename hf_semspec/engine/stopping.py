"""Where text ends: EOS, length and any stopping criterion, judged as if its tokens had come one by one."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation import utils as generation_utils

from .ranks import share, share_value

# Criteria that judge each row by its own ids, or by the clock: they may be asked about text that is dropped later.
EARLY = (StopStringCriteria, MaxTimeCriteria)

# Before `StopCheck` came, `generate` streamed a column first and then asked the criteria.
STREAMS_FIRST = not hasattr(generation_utils, "StopCheck")


class StopRules:
    """The caller's stopping criteria: what the host can decide from token ids (EOS and the length), `early` those that
    may be called for any text, and `custom` those that are to see what plain decoding shows, see [`InOrder`].

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
        self.early = [c for c in criteria if type(c) in EARLY]
        self.custom = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria, *EARLY)]

    def tentative(self, early: bool) -> "StopRules":
        """The same rules for text that may yet be dropped: EOS, the length and, if asked for, those of `early`."""
        other = copy.copy(self)
        other.custom = []
        other.early = self.early if early else []
        return other

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over, for whoever works on without committing anything."""
        limits = [c for c in self.early if isinstance(c, MaxTimeCriteria)]
        return share_value(any(time.time() - limit.initial_timestamp > limit.max_time for limit in limits))

    def cut(
        self,
        tokens: Sequence[Sequence[int]],
        live: Sequence[int],
        widths: Sequence[int],
        show: Callable[[int], torch.Tensor],
    ) -> list[int | None]:
        """For each row, how many of its new `tokens` stay if it ends among them, else `None`; by all but `custom`.

        Args:
            tokens: for each row, the ids just committed.
            live: for each row, its index in the caller's batch.
            widths: for each row, the columns of the caller's layout before those ids.
            show: gives the caller's (batch, width) ids for a width, with the new tokens in place; or several such
                blocks, (batch, blocks, width), whose rows `live` counts block after block.
        """
        ends: list[int | None] = [None] * len(tokens)
        for i, row in enumerate(tokens):
            ends[i] = next((t + 1 for t, token in enumerate(row) if token in self.eos_ids), None)
        if not self.early:
            return ends
        last = {i: widths[i] + (ends[i] or len(row)) for i, row in enumerate(tokens)}
        for width in range(min(widths) + 1, max(last.values()) + 1):
            judged = [i for i in last if widths[i] < width <= last[i]]
            if not judged:
                continue
            verdict = self._called(show(width))
            for i in judged:
                if verdict[live[i]]:
                    ends[i] = width - widths[i]
                    del last[i]
            if not last:
                break
        return ends

    def _called(self, ids: torch.Tensor) -> list[bool]:
        if ids.dim() == 3:
            return [flag for block in ids.unbind(dim=1) for flag in self._called(block)]
        return verdict(self.early, ids, None)


def verdict(criteria: Sequence[Any], ids: torch.Tensor, scores: Any) -> list[bool]:
    """What `criteria` say of `ids` (rows, width): for each row whether one of them ends it; one answer counts for all
    rows. They may keep what they are shown, and write to it."""
    found = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        answer = torch.as_tensor(criterion(ids.clone(), scores), device=ids.device)
        found = found | (answer.reshape(len(ids)) if answer.dim() > 1 else answer)
    return [bool(flag) for flag in share(found.long()).tolist()]


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


class InOrder:
    """Shows the caller's own criteria what plain decoding shows them: the whole batch, each width once and in order,
    settled text only, before the streamer gets that column (on transformers 4 after it).

    Args:
        criteria: to be asked.
        stream: what hears of each column afterwards.
        prompt_width (`int`): columns of the caller's prompt.
    """

    def __init__(self, criteria: Sequence[Any], stream: SettledStream, prompt_width: int) -> None:
        self.criteria, self.stream, self.prompt_width = criteria, stream, prompt_width
        self.judged = 0

    def advance(
        self,
        until: Callable[[], int],
        show: Callable[[int], torch.Tensor],
        scores: Callable[[int], Any],
        stop: Callable[[int, int], None],
    ) -> None:
        """Judge every width that is settled by now, in new tokens.

        Args:
            until: the widest that is; asked again after each verdict.
            show: gives the (batch, width) ids for columns of text.
            scores: gives what criteria get as `scores` for new tokens.
            stop: told of each row that a verdict ends, and the new tokens it has there; also of those that have ended
                before.
        """
        while self.judged < until():
            self.judged += 1
            width = self.prompt_width + self.judged
            ids = show(width)
            if STREAMS_FIRST:
                self.stream.advance(ids, width)
            for row, stops in enumerate(verdict(self.criteria, ids, scores(self.judged))):
                if stops:
                    stop(row, self.judged)
            self.stream.advance(ids, width)
