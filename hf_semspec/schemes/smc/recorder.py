"""Collects the particles of a call of smc: every round's tokens and weights, and where each particle came from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.recorder import with_cut
from ...trace import Event, ParticleRound, Population, Row, Trace
from .ancestry import Lineage, Round
from .ends import Judged
from .weights import token_log_probs


@dataclass(frozen=True)
class Notes:
    """What a trace shows of a round beside its [`Round`]: tensors while the call runs, lists after it.

    Args:
        tokens, kept: (rows, N, γ+1) ids that were drawn, and (rows, N) how many stand.
        drafts: (rows, N, γ) the ids that were drafted.
        log_p: of the tokens.
        drafts_log_p, drafts_log_q: of the drafts.
        log_weights: (rows, N) before resampling.
        ess: (rows,), 0 for the first token.
    """

    tokens: Any
    kept: Any
    drafts: Any
    log_p: Any
    drafts_log_p: Any
    drafts_log_q: Any
    log_weights: Any
    ess: Any


class ParticleRecorder:
    """What happens to the particles of one call, round by round along its `lineage`."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self.notes: list[Notes] = []

    def block(self, judged: Judged) -> None:
        """Take the block of the lineage's last round."""
        scored, entry = judged.scored, self.lineage.rounds[-1]
        gone = torch.tensor(entry.collapsed, device=judged.kept.device)[:, None, None]
        tokens = torch.where(gone, judged.tokens, judged.drawn)
        self.notes.append(
            Notes(
                tokens,
                judged.kept,
                scored.ids.clone(),
                token_log_probs(scored.block.scores, tokens),
                scored.log_p,
                scored.log_q,
                judged.log_weights,
                torch.zeros(len(entry.live)) if entry.ess is None else entry.ess,
            )
        )

    def finish(
        self,
        settings: dict[str, Any],
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[tuple[int, int, int]],
        log_weights: torch.Tensor,
    ) -> Trace:
        """The record of the returned particles `chosen`, each (prompt, slot, new tokens), and of all others.

        Args:
            prompts: the ids of each prompt.
            log_weights: (prompts, N), at the end.
        """
        lineage, rounds = self.lineage, self.lineage.rounds
        notes = [Notes(*(value.tolist() for value in vars(each).values())) for each in self.notes]
        parts = [list(lineage.part(prompt))[::-1] for prompt in range(lineage.prompts)]
        populations = [
            Population(
                [_round(rounds[number], notes[number], place) for number, place in part],
                log_weights[prompt].tolist(),
                [slot for row, slot, _ in chosen if row == prompt],
            )
            for prompt, part in enumerate(parts)
        ]
        rows = []
        for prompt, slot, length in chosen:
            slots = [at for _, _, at in lineage.trace(prompt, slot)][::-1]
            events = [
                event
                for count, ((number, place), at) in enumerate(zip(parts[prompt], slots, strict=True))
                for event in _events(count, rounds[number], notes[number], place, at, length)
            ]
            rows.append(Row(list(prompts[prompt]), length, events, population=prompt, slot=slot))
        return Trace("smc", settings, rows, populations)


def _round(entry: Round, notes: Notes, place: int) -> ParticleRound:
    weighted = entry.ess is not None
    return ParticleRound(
        entry.starts[place],
        [ids[:kept] for ids, kept in zip(notes.tokens[place], notes.kept[place], strict=True)],
        notes.log_weights[place] if weighted else None,
        notes.ess[place] if weighted else None,
        entry.resampled[place],
        entry.collapsed[place],
        entry.ancestors[place],
    )


def _events(number: int, entry: Round, notes: Notes, place: int, slot: int, length: int) -> list[Event]:
    """What one round did to the particle that stood in `slot`; nothing if that had ended before."""
    start, drafted = entry.starts[place], entry.drafted[place]
    if start >= length:
        return []
    tokens, log_p = notes.tokens[place][slot], notes.log_p[place][slot]
    drafts, drafts_log_p, drafts_log_q = (
        values[place][slot] for values in (notes.drafts, notes.drafts_log_p, notes.drafts_log_q)
    )
    if drafted == 0:
        return [Event("plain", tokens[0], start, number, log_p=log_p[0])]
    if entry.collapsed[place]:
        events = [
            Event(
                "untested" if t else "rejected", drafts[t], start + t, number, False, drafts_log_p[t], drafts_log_q[t]
            )
            for t in range(drafted)
        ]
        return [*events, Event("residual", tokens[0], start, number, log_p=log_p[0])]
    events = [
        Event(
            "accepted" if t < drafted else "bonus",
            tokens[t],
            start + t,
            number,
            log_p=log_p[t],
            log_q=drafts_log_q[t] if t < drafted else math.nan,
        )
        for t in range(drafted + 1)
    ]
    return [with_cut(event, length) for event in events]
