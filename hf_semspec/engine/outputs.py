"""What a call returns beside `generate`'s own fields: statistics that add up, and a way to collect them from any
call."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from ..trace import Trace


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


class _Rates:
    """Rates that follow from the counts, for one row or for a whole call; nan where nothing was counted."""

    rounds: int
    accepted: int
    tested: int
    triggered: int
    written: int
    kept: int
    emitted: int

    @property
    def kept_fraction(self) -> float:
        """Kept over written tokens of the draft's answers (parse)."""
        return _ratio(self.kept, self.written)

    @property
    def tokens_by_draft(self) -> int:
        """New tokens that the draft wrote: kept of its answers, or drafted and accepted."""
        return min(self.kept + self.accepted, self.emitted)

    @property
    def tokens_by_target(self) -> int:
        """New tokens that the target wrote itself."""
        return self.emitted - self.tokens_by_draft

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested drafted tokens."""
        return _ratio(self.accepted, self.tested)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted drafted tokens a round, the next token not counted."""
        return _ratio(self.accepted, self.rounds)

    @property
    def trigger_rate(self) -> float:
        """Triggers over the drafted tokens that passed the ordinary test (easd)."""
        return _ratio(self.triggered, self.accepted + self.triggered)


@dataclass
class RowStats(_Rates):
    """Counts of one returned row, in tokens. With several chains a drafted position counts once, however many chains
    cover it.

    They satisfy: drafted = tested + untested; tested = accepted + rejected + triggered; residual = rejected;
    resampled = triggered; emitted = accepted + residual + resampled + bonus + plain + kept = new tokens with
    EOS, without padding; rounds = sum(histogram).

    Args:
        rounds: draft-and-verify rounds the row took part in before its end.
        plain: tokens drawn from the target without a draft (the first one, and where nothing could be drafted).
        untested: drafted tokens that nothing was decided on, those behind the row's end among them.
        cut: tokens dropped because the row ended before them in its block; in no other count but `untested`.
        written: tokens of whole answers that the draft wrote, a closing EOS included (parse).
        kept: those of them that were kept (parse).
        histogram: `histogram[i]` is the number of rounds with `i` accepted tokens.
    """

    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    untested: int = 0
    accepted: int = 0
    rejected: int = 0
    triggered: int = 0
    residual: int = 0
    resampled: int = 0
    bonus: int = 0
    plain: int = 0
    cut: int = 0
    written: int = 0
    kept: int = 0
    emitted: int = 0
    histogram: list[int] = field(default_factory=list)

    def count_round(self, drafted: int, accepted: int, outcome: str | None, kept: int) -> None:
        """Add a round in which `accepted` of `drafted` tokens passed and the next came as `outcome` (bonus, residual,
        resampled), or none did as all that passed left no room. The row ends behind `kept` of these tokens: what was
        found out about the others does not count."""
        if kept <= accepted:
            accepted, outcome = kept, None
        stopped = outcome not in ("bonus", None)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tested += accepted + stopped
        self.untested += drafted - accepted - stopped
        self.rejected += outcome == "residual"
        self.triggered += outcome == "resampled"
        if outcome is not None:
            setattr(self, outcome, getattr(self, outcome) + 1)
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


@dataclass
class DecodingStats(_Rates):
    """What one call of `generate` did.

    Counts of `RowStats` read from this object are sums over `rows` (`histogram` added entry by entry).

    Args:
        scheme: name of the scheme.
        rows: one `RowStats` for each returned row.
        target_forwards, draft_forwards: calls of either model, prefill included.
        target_tokens, draft_tokens: query tokens fed in those calls, summed over rows.
        substituted_tokens: committed ids that the draft has no embedding for, fed to it as its pad token.
        draft_seconds, target_seconds, other_seconds, total_seconds: wall time by the host's clock; on an accelerator
            a model's share is the time to queue its work, and the wait for it falls to `other_seconds`.
        sampling: the resolved `do_sample`, `temperature`, `top_k` and `top_p` of the call.
        dead_particles: particles whose weight vanished, counted in the round where it did (smc).
        collapses: blocks dropped because every weight of a prompt vanished (smc).
        resamplings: resampling events, one a prompt and round (smc).
        mean_ess: effective sample size before resampling, mean over prompts and rounds (smc).
        answers, full_accepts: whole answers that were judged, and returned as they were (parse).
        monotonicity_violations: prefixes that passed though a shorter one had failed just before (parse).
        judging: how prefixes were judged: `"packed"` in one block, or `"expanded"` into rows (parse).
        drafting: of the draft writing its answers, its forwards not counted, with n-grams if those were asked for
            (parse); of the draft writing segments (semantic).
        segments, accepted_segments: drafted segments that were judged, and that stood (semantic).
        redrawn_segments: the target's own that were dropped again (semantic with `residual="exact"`).
        mean_target_entropy, mean_draft_entropy: of the processed laws at the drafted positions that were tested, nats
            (easd).
        auto: with `num_draft_tokens="auto"`, how γ was chosen: `rounds` by γ, whether drafting was `off` at the end,
            `costs` (`"measured"`, `"profile"`, or `"profile of an unnamed pair"`), `survival` (by i, the estimated
            chance that at least i drafted tokens stand), and in seconds what it was last chosen by: `target_seconds`
            by width, `draft_seconds` of a forward; `None` otherwise.
    """

    scheme: str
    rows: list[RowStats] = field(default_factory=list)
    target_forwards: int = 0
    draft_forwards: int = 0
    target_tokens: int = 0
    draft_tokens: int = 0
    substituted_tokens: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0
    sampling: dict[str, Any] = field(default_factory=dict)
    dead_particles: int = 0
    collapses: int = 0
    resamplings: int = 0
    mean_ess: float = math.nan
    answers: int = 0
    full_accepts: int = 0
    monotonicity_violations: int = 0
    judging: str = ""
    drafting: "DecodingStats | None" = None
    segments: int = 0
    accepted_segments: int = 0
    redrawn_segments: int = 0
    mean_target_entropy: float = math.nan
    mean_draft_entropy: float = math.nan
    auto: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in RowStats.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return sum(getattr(row, name) for row in self.rows)

    @property
    def histogram(self) -> list[int]:
        """Rounds by number of accepted tokens, over all rows."""
        size = max((len(row.histogram) for row in self.rows), default=0)
        return [sum(row.histogram[i] for row in self.rows if i < len(row.histogram)) for i in range(size)]

    @property
    def full_accept_rate(self) -> float:
        """Answers returned as they were, over those judged (parse)."""
        return _ratio(self.full_accepts, self.answers)

    @property
    def segment_acceptance_rate(self) -> float:
        """Segments that stood, over those judged (semantic)."""
        return _ratio(self.accepted_segments, self.segments)

    @property
    def other_seconds(self) -> float:
        """Wall time outside both models' forwards."""
        return self.total_seconds - self.draft_seconds - self.target_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-safe values; rates that are undefined are `None`."""
        names = (
            "acceptance_rate",
            "mean_accepted_length",
            "trigger_rate",
            "full_accept_rate",
            "segment_acceptance_rate",
            "kept_fraction",
            "tokens_by_draft",
            "tokens_by_target",
            "other_seconds",
            "histogram",
        )
        totals = {name: getattr(self, name) for name in RowStats.__dataclass_fields__ if name != "histogram"}
        values = dataclasses.asdict(self) | totals | {name: getattr(self, name) for name in names}
        if self.auto is None:
            del values["auto"]
        values["drafting"] = self.drafting.to_dict() if self.drafting is not None else None
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


@dataclass
class SegmentRecord:
    """A committed segment of one row (semantic), and the verdict that led to it.

    Args:
        start, end: its first new token, and the one after its last.
        source: who wrote it, `"draft"` or `"target"`; leading tokens that the target took over from a failed draft
            count as its own.
        rule: why a drafted one stands, `"score"` or `"top_k"`; of a target's segment `"first"`, `"rejected"` where a
            drafted one failed before it, or `"finish"` where the draft writes no more.
        target_score, draft_score: P̂ and Q̂ of the drafted segment that was judged; nan if none was.
    """

    start: int
    end: int
    source: str
    rule: str
    target_score: float = math.nan
    draft_score: float = math.nan


class SemSpecOutput(GenerateDecoderOnlyOutput):
    """`generate`'s output with what the scheme did beside it.

    The additions are attributes, not items: code that iterates over the output, as pipelines do, sees what it always
    saw.

    Args:
        stats (`DecodingStats`): counts and times of the call.
        trace (`Trace`): what happened token by token, with `save_html(path)` and `to_dict()`; only with `trace=True`
            in the config.
        triggers (`torch.Tensor` of shape `(batch, new_tokens)`, bool): easd only: tokens drawn because a trigger
            rejected the drafted one.
        target_entropies, draft_entropies (`torch.Tensor` of shape `(batch, new_tokens)`, float32): easd only: nats of
            the processed laws where a drafted token was tested, nan elsewhere.
        verdicts (`torch.Tensor` of shape `(batch, M)`, float32): parse only, as the next two: the target's confidence
            in each judged prefix, in order; nan where a row has fewer, or one was not judged.
        boundaries (`torch.LongTensor` of shape `(batch, M)`): new tokens that each of these prefixes holds; -1 where
            a row has fewer.
        kept_tokens (`torch.LongTensor` of shape `(batch,)`): tokens kept of the draft's answers.
        segments (`list` of `list` of `SegmentRecord`): semantic only: the segments of each row, in order.
        particles (`torch.LongTensor` of shape `(prompts, N, length)`): smc only, as all below: every particle, laid
            out like `sequences`.
        log_weights (`torch.Tensor` of shape `(prompts, N)`, float64): natural log, since the last resampling, not
            normalised.
        ess (`torch.Tensor` of shape `(prompts, rounds)`, float64): effective sample size before resampling, nan after
            a prompt's end.
        ancestors (`torch.LongTensor` of shape `(prompts, rounds, N)`): the slot that each slot was copied from at the
            end of the round; the identity where nothing was resampled.
        log_evidence (`torch.Tensor` of shape `(prompts,)`, float64): log of the estimate of Σ p^α over texts; -inf
            after a collapse.
        sequence_log_weights (`torch.Tensor` of shape `(rows,)`, float64): `log_weights` of the returned rows.
    """

    stats: DecodingStats
    trace: Trace
    triggers: torch.Tensor
    target_entropies: torch.Tensor
    draft_entropies: torch.Tensor
    verdicts: torch.Tensor
    boundaries: torch.Tensor
    kept_tokens: torch.Tensor
    segments: list[list[SegmentRecord]]
    particles: torch.Tensor
    log_weights: torch.Tensor
    ess: torch.Tensor
    ancestors: torch.Tensor
    log_evidence: torch.Tensor
    sequence_log_weights: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        hint = ": pass trace=True to SemSpecConfig to record it" if name == "trace" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


_lock = threading.Lock()
_open_records: list[list[DecodingStats]] = []


@contextlib.contextmanager
def record_stats() -> Iterator[list[DecodingStats]]:
    """Collect the `DecodingStats` of every call that starts while the block is open, from any thread of the process.

    For callers that never see the output object, such as pipelines.

    Returns:
        A list that grows by one entry as each call ends.
    """
    record: list[DecodingStats] = []
    with _lock:
        _open_records.append(record)
    try:
        yield record
    finally:
        with _lock:
            _open_records[:] = [other for other in _open_records if other is not record]


def open_records() -> list[list[DecodingStats]]:
    """The records open now; a call takes this at its start and hands it to `publish` at its end."""
    with _lock:
        return list(_open_records)


def publish(stats: DecodingStats, records: list[list[DecodingStats]]) -> None:
    """Append `stats` to each of `records`."""
    with _lock:
        for record in records:
            record.append(stats)
