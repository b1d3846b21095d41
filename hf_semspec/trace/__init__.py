"""What one call did, token by token: a record that saves itself as JSON or as a page to look at."""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What can become of a token, in the words of `RowStats`. The first ones are in the text, the others are not.
COMMITTED = ("accepted", "residual", "resampled", "bonus", "plain", "kept")
DROPPED = ("rejected", "triggered", "untested", "unkept")
KINDS = (*COMMITTED, *DROPPED)
_EVENT = (
    "kind",
    "token",
    "position",
    "round",
    "cut",
    "log_p",
    "log_q",
    "target_entropy",
    "draft_entropy",
    "others",
)


@dataclass(frozen=True)
class Event:
    """One token that was committed or dropped.

    Args:
        kind: one of `KINDS`: `accepted`, `residual`, `resampled`, `bonus`, `plain` and `kept` as `RowStats` counts
            them; `rejected` and `triggered` the drafted tokens that a `residual` or `resampled` one replaces;
            `untested` drafted ones behind those; `unkept` of a draft's answer (parse).
        token: its id.
        position: the column of new text that it takes, or would have taken.
        round: the row's target forward, 0 the first; of an answer, those before it.
        cut: committed, but behind the end of the row.
        log_p, log_q: of the token under the processed laws of target and draft, natural log; nan where not known.
        target_entropy, draft_entropy: of those laws, nats; nan where not known.
        others: what the other chains that carry the same text drafted here.
    """

    kind: str
    token: int
    position: int
    round: int
    cut: bool = False
    log_p: float = math.nan
    log_q: float = math.nan
    target_entropy: float = math.nan
    draft_entropy: float = math.nan
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prefix:
    """A judged prefix of an answer: its tokens, and the target's confidence in it, nan where it was not judged."""

    length: int
    confidence: float


@dataclass(frozen=True)
class Answer:
    """A whole answer by the draft, as the target judged it (parse).

    Args:
        start: new tokens of the row before it.
        written, kept: its tokens, a closing EOS included, and those of them that stand.
        accepted: whether it was returned as it was.
        prefixes: the judged ones, in order; the last is the whole answer.
        first_event: the place of its first token among the row's events.
    """

    start: int
    written: int
    kept: int
    accepted: bool
    prefixes: tuple[Prefix, ...]
    first_event: int


@dataclass(frozen=True)
class Span:
    """A stretch of a row's text that was decided on as a whole.

    Args:
        start, stop: columns of new text.
        label: what became of it, in a word or two.
        stands: whether a draft for it, if there was one, was kept.
        numbers: what it was decided by.
        next_event: the place among the row's events of the first one after it.
    """

    start: int
    stop: int
    label: str
    stands: bool
    numbers: dict[str, float | str]
    next_event: int


@dataclass
class Row:
    """One returned row.

    Args:
        prompt: ids that the row began with.
        length: its new tokens, a closing EOS included.
        events: in the order in which they happened.
        answers, spans: by what was decided on as a whole; empty for schemes that decide by the token.
        population, slot: the prompt's place in `Trace.populations` and the particle returned (smc); else -1.
    """

    prompt: list[int]
    length: int
    events: list[Event] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    population: int = -1
    slot: int = -1

    @property
    def tokens(self) -> list[int]:
        """The new tokens, in order."""
        return [event.token for event in self.events if event.kind in COMMITTED and not event.cut]

    def counts(self) -> dict[str, int]:
        """Events counted as `RowStats` counts them: of a round in which the row ends what was drafted behind the end
        is untested, and rounds behind it do not count."""
        begun = {e.round for e in self.events if e.kind in _OF_ROUNDS and e.position < self.length}
        kinds: Counter[str] = Counter()
        for event in self.events:
            if event.position < self.length or event.kind == "unkept":
                kinds[event.kind] += 1
            elif event.kind in _OF_ROUNDS and event.round in begun:
                kinds["untested"] += 1
        counts = {kind: kinds[kind] for kind in KINDS if kind != "unkept"}
        counts["tested"] = kinds["accepted"] + kinds["rejected"] + kinds["triggered"]
        counts["drafted"] = counts["tested"] + kinds["untested"]
        counts["written"] = kinds["kept"] + kinds["unkept"]
        counts["cut"] = sum(event.cut for event in self.events)
        counts["emitted"] = sum(kinds[kind] for kind in COMMITTED)
        counts["rounds"] = len(begun)
        return counts


_OF_ROUNDS = ("accepted", "rejected", "triggered", "untested")


@dataclass(frozen=True)
class ParticleRound:
    """One target forward over the particles of a prompt (smc). Lists have one entry a slot, as of before the copying.

    Args:
        start: new tokens before it.
        tokens: what each particle gained; empty for finished ones.
        log_weights: natural log, after the block and before resampling; `None` for the first token, which has none.
        ess: effective sample size of those, `None` likewise.
        resampled: whether the particles were resampled at its end.
        collapsed: whether the block was dropped because every weight vanished.
        ancestors: the slot that each slot was copied from at its end.
    """

    start: int
    tokens: list[list[int]]
    log_weights: list[float] | None
    ess: float | None
    resampled: bool
    collapsed: bool
    ancestors: list[int]


@dataclass(frozen=True)
class Population:
    """The particles of a prompt (smc): their rounds, their final log weights, and the slots returned."""

    rounds: list[ParticleRound]
    log_weights: list[float]
    returned: list[int]


@dataclass
class Trace:
    """What one call of `generate` did, token by token; asked for by `SemSpecConfig(..., trace=True)`.

    Args:
        scheme: name of the scheme.
        settings: the scheme's fields and the resolved sampling settings.
        rows: one for each returned row.
        populations: one for each prompt (smc); else empty.
        stats: the call's `DecodingStats` as a dict.
        tokenizer: the one that `generate` was given, or `None`.
        model_name: where the target was loaded from, or "".
    """

    scheme: str
    settings: dict[str, Any]
    rows: list[Row]
    populations: list[Population] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = field(default=None, repr=False)
    model_name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer as JSON-safe values; events are lists in the order of `event_fields`, and what
        is not known is `None`."""
        return {
            "format": "hf-semspec trace 1",
            "scheme": self.scheme,
            "model": self.shown_name,
            "settings": safe(self.settings),
            "stats": safe(self.stats),
            "event_fields": list(_EVENT),
            "rows": [_row(row) for row in self.rows],
            "populations": [_population(population) for population in self.populations],
        }

    @property
    def shown_name(self) -> str:
        """The target's name without the folders of this machine."""
        return Path(self.model_name).name if Path(self.model_name).is_absolute() else self.model_name

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to the file `path`."""
        Path(path).write_text(json.dumps(self.to_dict(), allow_nan=False), encoding="utf-8")

    def save_html(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write a page that shows the text token by token to the file `path`; it loads nothing from elsewhere.

        Args:
            path: the file.
            tokenizer (*optional*): the target's, to show tokens as text. By default the one that `generate` was
                given, else the one in the folder that the target came from; without any, tokens are shown as ids.
        """
        from .page import render

        Path(path).write_text(render(self, tokenizer or self._tokenizer()), encoding="utf-8")

    def _tokenizer(self) -> Any:
        if self.tokenizer is not None or not self.model_name:
            return self.tokenizer
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model_name, local_files_only=True)
        except (OSError, ValueError, ImportError):
            return None


def safe(value: Any) -> Any:
    """`value` for JSON: infinities as text, nan as `None`, other floats to six digits."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return float(f"{value:.6g}") if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(name): safe(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [safe(one) for one in value]
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _row(row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = {"prompt": row.prompt, "length": row.length, "tokens": row.tokens}
    entry["events"] = [[safe(getattr(event, name)) for name in _EVENT] for event in row.events]
    if row.answers:
        entry["answers"] = [
            {**vars(answer), "prefixes": [safe([one.length, one.confidence]) for one in answer.prefixes]}
            for answer in row.answers
        ]
    if row.spans:
        entry["spans"] = [safe(vars(span)) for span in row.spans]
    if row.population >= 0:
        entry["population"], entry["slot"] = row.population, row.slot
    return entry


def _population(population: Population) -> dict[str, Any]:
    return {
        "rounds": [safe(vars(entry)) for entry in population.rounds],
        "log_weights": safe(population.log_weights),
        "returned": population.returned,
    }
