"""What a drafter promises, and what it hands over."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .cache import RaggedCache, RowStates
from .model import CachedModel
from .tokens import Canvas


@dataclass
class Draft:
    """A drafted block.

    Args:
        ids: (rows, chains, γ) int64.
        valid: (rows, chains, γ) bool: positions that were really drafted, which takes a law; `None` if all were.
        counts: for each row, how many of the γ positions were to be drafted.
        log_q: (rows, chains, γ, vocabulary) log-probabilities the ids were drawn from, nan where there was no law;
            `None` if they were not asked for.
        broken: () bool, whether scores of positions that were to be drafted hold nan or +inf.
    """

    ids: torch.Tensor
    valid: torch.Tensor | None
    counts: list[int]
    log_q: torch.Tensor | None
    broken: torch.Tensor


class Drafter:
    """What [`Speculation`] asks of a drafter, and tells it: to one without a cache most of that means nothing.

    `chains` is the number of drafts a row, `decoder` the model that drafts, if there is one; a committed id from
    `own_vocabulary` on is one that it has no embedding for. `taps` are the target's hidden states that it reads.
    """

    chains: int = 1
    own_vocabulary: int = sys.maxsize
    decoder: CachedModel | None = None
    taps: tuple[int, ...] = ()

    @property
    def caches(self) -> list[RaggedCache]:
        """The caches that hold drafted tokens."""
        return [] if self.decoder is None else [self.decoder.cache]

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """For each of the rows `live`, which have room for so many tokens more, how many to draft this round."""
        raise NotImplementedError

    def begin(self, counts: Sequence[int]) -> None:
        """A round begins, in which so many tokens of each row go to the target beside the last one."""

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Draft for the rows `live` and leave the ids on `canvas` behind their tokens; called only where something was
        planned."""
        raise NotImplementedError

    def observe(self, place: int, drafted: int, kept: int) -> None:
        """Take note that `kept` of the tokens drafted for the row at `place` stand."""

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """Take note of what was committed to a row of the caller's batch."""

    def see(self, states: torch.Tensor, starts: Sequence[int]) -> None:
        """Take the target's hidden states `taps` of tokens from `starts` on, (rows, width, states * size); those past
        what is committed next mean nothing."""

    def resume(self, states: Sequence[RowStates], lengths: Sequence[int]) -> None:
        """Go on with rows of `lengths` tokens, the last of which was never fed, of which the cache held `states`."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Roll back to what was committed: the rows now hold `lengths` tokens, the last of which was never fed."""

    def select(self, rows: list[int]) -> None:
        """Keep only `rows` of the current batch."""

    def states(self, row: int) -> RowStates:
        """A copy of what the drafter's cache holds of a row."""
        return []

    def report(self, call: Any) -> None:
        """Put into the statistics of `call`, which it drafts for no longer, what it has to say."""


class NoDrafts(Drafter):
    """Drafts nothing, so that the target decodes alone.

    Args:
        own_vocabulary (`int`): as for [`Drafter`], where a draft reads later what the target writes now.
    """

    def __init__(self, own_vocabulary: int = sys.maxsize) -> None:
        self.own_vocabulary = own_vocabulary

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """Nothing for any row."""
        return [0] * len(live)
