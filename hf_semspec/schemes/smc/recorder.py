"""Collects the particles of a call of smc: every round's tokens and weights, and where each particle came from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.recorder import with_cut
from ...trace import Event, ParticleRound, Population, Row, Trace
from .weights import token_log_probs


@dataclass(frozen=True)
class _Round:
    """One target forward. `tokens`, `kept`, `drafts`: (rows, N, ...) ids; `numbers`: log p of the tokens, log p and
    log q of the drafts."""

    live: list[int]
    starts: list[int]
    drafted: list[int]
    collapsed: list[bool]
    resampled: list[bool]
    ancestors: list[list[int]]
    weighted: bool
    tokens: torch.Tensor
    kept: torch.Tensor
    drafts: torch.Tensor
    log_p: torch.Tensor
    drafts_log_p: torch.Tensor
    drafts_log_q: torch.Tensor
    log_weights: torch.Tensor
    ess: torch.Tensor


class ParticleRecorder:
    """What happens to the particles of one call of `prompts` prompts."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.rounds: list[_Round] = []

    def block(
        self,
        block: Any,
        live: Sequence[int],
        starts: Sequence[int],
        collapsed: list[bool],
        resampled: list[bool],
        ancestors: list[list[int]],
        ess: torch.Tensor | None,
    ) -> None:
        """Take a block that was committed, see [`blocks.Block`]; `ess` is `None` for the first token."""
        gone = torch.tensor(collapsed, device=block.kept.device)[:, None, None]
        tokens = torch.where(gone, block.tokens, block.drawn)
        self.rounds.append(
            _Round(
                list(live),
                list(starts),
                list(block.counts),
                collapsed,
                resampled,
                ancestors,
                ess is not None,
                tokens,
                block.kept,
                block.ids.clone(),
                token_log_probs(block.scores, tokens),
                block.log_p,
                block.log_q,
                block.log_weights if ess is not None else block.log_p.new_zeros(block.kept.shape),
                ess if ess is not None else block.log_p.new_zeros(len(live)),
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
        rounds = [{name: _on_host(value) for name, value in vars(entry).items()} for entry in self.rounds]
        populations = [
            Population(
                [_round(entry, entry["live"].index(prompt)) for entry in rounds if prompt in entry["live"]],
                log_weights[prompt].tolist(),
                [slot for row, slot, _ in chosen if row == prompt],
            )
            for prompt in range(self.prompts)
        ]
        rows = []
        for prompt, slot, length in chosen:
            lineage, at = [], slot
            for number, entry in reversed(list(enumerate(e for e in rounds if prompt in e["live"]))):
                place = entry["live"].index(prompt)
                at = entry["ancestors"][place][at]
                lineage.append((number, entry, place, at))
            events = [
                event
                for number, entry, place, at in reversed(lineage)
                for event in _events(number, entry, place, at, length)
            ]
            rows.append(Row(list(prompts[prompt]), length, events, population=prompt, slot=slot))
        return Trace("smc", settings, rows, populations)


def _on_host(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _round(entry: dict[str, Any], place: int) -> ParticleRound:
    weighted = entry["weighted"]
    return ParticleRound(
        entry["starts"][place],
        [ids[:kept] for ids, kept in zip(entry["tokens"][place], entry["kept"][place], strict=True)],
        entry["log_weights"][place] if weighted else None,
        entry["ess"][place] if weighted else None,
        entry["resampled"][place],
        entry["collapsed"][place],
        entry["ancestors"][place],
    )


def _events(number: int, entry: dict[str, Any], place: int, slot: int, length: int) -> list[Event]:
    """What one round did to the particle that stood in `slot`; nothing if that had ended before."""
    start, drafted = entry["starts"][place], entry["drafted"][place]
    if start >= length:
        return []
    tokens, log_p = entry["tokens"][place][slot], entry["log_p"][place][slot]
    drafts, drafts_log_p, drafts_log_q = (entry[f"drafts{name}"][place][slot] for name in ("", "_log_p", "_log_q"))
    if drafted == 0:
        return [Event("plain", tokens[0], start, number, log_p=log_p[0])]
    if entry["collapsed"][place]:
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
