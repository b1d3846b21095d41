"""Collects what a call does, while it does it: values stay on the device until the call ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..trace import COMMITTED, Answer, Event, Prefix, Row, Span, Trace
from .acceptance import RESAMPLED, RESIDUAL, Acceptance, entropy
from .request import Block, Decided

_NEXT = ("bonus", "residual", "resampled")
_STOPPED = {RESIDUAL: "rejected", RESAMPLED: "triggered"}


@dataclass(frozen=True)
class _Round:
    """A committed block. Lists have one entry a live row.

    Args:
        live, starts: the rows, and their new tokens before it.
        decided: why each row stopped, and the ids decided on: the drafted ones that stand, and the next one if any.
        counts: tokens that were to be drafted; 0 for a plain step.
        drafts: (rows, chains, γ) ids, `None` for a plain step.
        chains: (rows,) the chain that was committed.
        stopped: (rows,) the drafted token that a trigger stopped, where several chains leave that open.
        numbers: (rows, 6, γ+1): log p, log q of the committed ids, H(p), H(q), log p, log q of the drafted ids.
    """

    live: list[int]
    starts: list[int]
    decided: Decided
    counts: list[int]
    drafts: torch.Tensor | None
    chains: torch.Tensor
    stopped: torch.Tensor | None
    numbers: torch.Tensor


class Recorder:
    """What happens to the rows of one call.

    Args:
        batch: rows of the caller's batch.
    """

    def __init__(self, batch: int) -> None:
        self.log: list[list[Any]] = [[] for _ in range(batch)]  # of each row, in order: (round, place), answers, runs
        self.rounds: list[_Round] = []

    def block(
        self,
        block: Block,
        decision: Acceptance,
        live: Sequence[int],
        starts: Sequence[int],
        decided: Decided,
    ) -> None:
        """Take a block that the rows `live`, of `starts` new tokens each, have decided on."""
        rows, chain, draft = torch.arange(len(live), device=decision.outcome.device), decision.lead, block.draft
        log_p = block.scores[rows, chain].log_softmax(dim=-1)  # (rows, γ+1, vocabulary)
        numbers = log_p.new_full((len(live), 6, log_p.shape[1]), torch.nan)
        padded = [ids + [0] * (log_p.shape[1] - len(ids)) for ids in decided.tokens]
        ids = torch.tensor(padded, device=log_p.device)
        numbers[:, 0], numbers[:, 2] = _of(log_p, ids), entropy(log_p)
        stopped, counts = None, [0] * len(live)
        if draft is not None:
            counts, stopped = list(draft.counts), decision.triggered
            drafted = draft.ids[rows, chain]
            if stopped is not None:
                at = decision.num_accepted.clamp(max=drafted.shape[1] - 1).unsqueeze(1)
                took = (decision.outcome == RESAMPLED).unsqueeze(1)
                value = torch.where(took, stopped.unsqueeze(1), drafted.gather(1, at))
                drafted = drafted.scatter(1, at, value)
            numbers[:, 4, :-1] = _of(log_p[:, :-1], drafted)
            if draft.log_q is not None:
                log_q = draft.log_q[rows, chain]
                numbers[:, 1, :-1], numbers[:, 3, :-1] = _of(log_q, ids[:, :-1]), entropy(log_q)
                numbers[:, 5, :-1] = _of(log_q, drafted)
        for place, row in enumerate(live):
            self.log[row].append((len(self.rounds), place))
        drafts = None if draft is None else draft.ids.clone()
        self.rounds.append(_Round(list(live), list(starts), decided, counts, drafts, chain, stopped, numbers))

    def answer(
        self,
        row: int,
        start: int,
        ids: list[int],
        kept: int,
        accepted: bool,
        lengths: Sequence[int],
        confidences: Sequence[float],
    ) -> None:
        """Take an answer of `row`, judged: `ids` with a closing EOS, of which `kept` stand."""
        prefixes = tuple(Prefix(n, c) for n, c in zip(lengths, confidences, strict=True))
        self.log[row].append((Answer(start, len(ids), kept, accepted, prefixes, 0), ids))

    def tokens(self, row: int, start: int, ids: list[int], kind: str) -> None:
        """Take tokens of one kind that `row` got, or lost, from column `start` of its new text on."""
        self.log[row].append((kind, start, ids))

    def span(self, row: int, start: int, stop: int, label: str, stands: bool, **numbers: float | str) -> None:
        """Take a stretch of `row` that was decided on as a whole, once its tokens are taken; and by which numbers."""
        self.log[row].append((Span(start, stop, label, stands, numbers, 0),))

    def finish(
        self, scheme: str, settings: dict[str, Any], prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Trace:
        """The record of rows that began with `prompts` and hold `lengths` new tokens each."""
        numbers = [entry.numbers.tolist() for entry in self.rounds]
        drafts = [None if entry.drafts is None else entry.drafts.tolist() for entry in self.rounds]
        chains = [entry.chains.tolist() for entry in self.rounds]
        stopped = [None if entry.stopped is None else entry.stopped.tolist() for entry in self.rounds]
        rows = []
        for log, prompt, length in zip(self.log, prompts, lengths, strict=True):
            row = Row(list(prompt), length)
            forwards = 0
            for item in log:
                if isinstance(item[0], Span):
                    row.spans.append(replace(item[0], next_event=len(row.events)))
                elif isinstance(item[0], Answer):
                    row.answers.append(replace(item[0], first_event=len(row.events)))
                    row.events += _answer_events(item[0], item[1], forwards)
                elif isinstance(item[0], str):
                    kind, start, ids = item
                    row.events += [Event(kind, token, start + t, forwards) for t, token in enumerate(ids)]
                else:
                    which, place = item
                    of_row = [None if values is None else values[which] for values in (drafts, stopped)]
                    offered, stop = (None if values is None else values[place] for values in of_row)
                    entry = self.rounds[which]
                    row.events += _block_events(
                        entry, place, offered, chains[which][place], stop, numbers[which][place], forwards
                    )
                    forwards += 1
            row.events = [with_cut(event, length) for event in row.events]
            rows.append(row)
        return Trace(scheme, settings, rows)


def mark_segments(trace: Trace, segments: Sequence[Sequence[Any]]) -> None:
    """Put `segments`, for each row its [`outputs.SegmentRecord`]s, on `trace` as spans."""
    for row, records in zip(trace.rows, segments, strict=True):
        places = {event.position: i for i, event in enumerate(row.events) if event.kind in COMMITTED}
        for one in records:
            numbers: dict[str, float | str] = {"rule": one.rule}
            numbers |= {"P̂": one.target_score, "Q̂": one.draft_score} if one.target_score == one.target_score else {}
            label = f"{one.source}: {one.rule}"
            row.spans.append(Span(one.start, one.end, label, one.rule != "rejected", numbers, places[one.end - 1] + 1))


def with_cut(event: Event, length: int) -> Event:
    """`event`, marked where it was committed behind a row's end at `length`."""
    if event.kind not in COMMITTED or event.position < length:
        return event
    return replace(event, cut=True)


def _block_events(
    entry: _Round,
    place: int,
    offered: list[list[int]] | None,
    chain: int,
    stopped: int | None,
    numbers: list[list[float]],
    forward: int,
) -> list[Event]:
    """What became of one row's block: the accepted tokens, the one that failed, its replacement, those behind it."""
    start, ids, count = entry.starts[place], entry.decided.tokens[place], entry.counts[place]
    log_p, log_q, h_p, h_q, drafted_p, drafted_q = numbers
    accepted, outcome = entry.decided.accepted[place], entry.decided.outcomes[place]

    def event(kind: str, token: int, t: int, draft: bool = False, others: tuple[int, ...] = ()) -> Event:
        pair = (drafted_p[t], drafted_q[t]) if draft else (log_p[t], log_q[t])
        return Event(kind, token, start + t, forward, False, *pair, h_p[t], h_q[t], others)

    if offered is None or count == 0:
        return [event("plain", ids[0], 0)]
    drafted = offered[chain]
    events = [event("accepted", ids[t], t, others=_others(offered, chain, ids, t)) for t in range(accepted)]
    if outcome in _STOPPED:
        token = stopped if outcome == RESAMPLED and stopped is not None else drafted[accepted]
        events.append(event(_STOPPED[outcome], token, accepted, True, _others(offered, chain, ids, accepted, token)))
    behind = accepted + (outcome in _STOPPED)
    events += [event("untested", drafted[t], t, True) for t in range(behind, count)]
    return [*events, event(_NEXT[outcome], ids[accepted], accepted)] if accepted < len(ids) else events


def _others(offered: list[list[int]], chain: int, ids: list[int], t: int, token: int | None = None) -> tuple[int, ...]:
    """What other chains that carry the first `t` of `ids` drafted next, without what was taken."""
    own = offered[chain][t] if token is None else token
    carrying = [ids_of[t] for ids_of in offered if ids_of[:t] == ids[:t]]
    return tuple(dict.fromkeys(other for other in carrying if other != own))


def _answer_events(answer: Answer, ids: list[int], forwards: int) -> list[Event]:
    return [
        Event("kept" if t < answer.kept else "unkept", token, answer.start + t, forwards)
        for t, token in enumerate(ids)
    ]


def _of(laws: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The values of `ids` (...) in `laws` (..., vocabulary)."""
    return laws.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
