"""What one call of a token-level scheme has committed so far, whoever decodes: text, ended rows, what is returned."""

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

from ..common.fields import SAMPLING_SETTINGS
from .cache import RowStates, text_config
from .encoders import Sources
from .hooks import compute_device
from .inputs import read_inputs
from .model import CachedModel, context_of
from .outputs import DecodingStats, RowStats
from .processors import CallRandomness
from .recorder import Recorder
from .request import Request
from .results import Columns, ReturnedRows, build_output
from .returned_cache import build_cache
from .row_states import at_most
from .stopping import InOrder, SettledStream, StopRules
from .tokens import Canvas


class CallState:
    """One call: decoders work on it in turns, the rows that one leaves open are the next one's.

    Args:
        request: the call.
        chains (`int`): chains of drafts a row.
        randomness: of the call that this one is a part of.
    """

    def __init__(self, request: Request, chains: int = 1, randomness: CallRandomness | None = None) -> None:
        self.began = time.perf_counter()
        self.request = request
        model, config = request.model, request.generation_config
        self.device = compute_device(model)
        self.sources = Sources(request)
        width = request.input_ids.shape[1]
        self.rules = StopRules(request.criteria, width, config.max_length)
        self.inputs = inputs = read_inputs(model, request.input_ids, self.sources.text, config, self.rules.room)
        self.offsets = inputs.offsets
        self.role = "target"
        self.randomness = randomness or CallRandomness(self.device)
        self.sampling = bool(config.do_sample)
        batch = len(inputs.ids)
        self.stream = SettledStream(request.streamer, width)
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.canvas = Canvas(inputs.ids, inputs.mask, chains, pad, min(self.rules.room, 1024) + 64, self.vocabulary)
        wanted = bool(config.return_dict_in_generate)
        self.scores = Columns(batch, wanted and bool(config.output_scores))
        self.logits = Columns(batch, wanted and bool(config.output_logits))
        self.keep_cache = (wanted and config.use_cache is not False) or inputs.fills_cache
        self.row_states: list[RowStates] = [[] for _ in range(batch)]
        self.hits: dict[int, int] = {}
        self.canvas.eos_ids = self.rules.eos_ids
        self.canvas.ended = self.hits
        self.rows_end_alone = self.rules.has_eos  # without EOS plain `generate` keeps all rows going until the last
        self.late = not self.rows_end_alone or bool(self.rules.custom)  # what rows keep is known at the end only
        self.uncounted: list[tuple[int, int, int, int, int, str | None]] = []
        self.substituted: list[tuple[int, int]] = []
        self.order = InOrder(self.rules.custom, self.stream, width)
        self.stats = self.new_stats()
        self.stats.sampling = {name: getattr(config, name, None) for name in SAMPLING_SETTINGS}
        self.trace = Recorder(batch) if request.trace else None

    @property
    def batch(self) -> int:
        """Rows of the caller's batch."""
        return len(self.canvas.generated)

    @property
    def rows(self) -> range:
        """All rows of the caller's batch."""
        return range(self.batch)

    @property
    def vocabulary(self) -> int:
        """How many ids the target scores."""
        return int(text_config(self.request.model).vocab_size)

    @property
    def longest(self) -> int:
        """The longest that a row may become, in columns of the caller's ids and new ones."""
        return int(self.canvas.prompt_width + self.rules.room)

    def new_stats(self) -> DecodingStats:
        """Statistics in which nothing is counted yet."""
        return DecodingStats(self.request.scheme.name, [RowStats() for _ in self.rows])

    def target(self, judges: bool = False) -> CachedModel:
        """The target, with what the caller's cache holds.

        Args:
            judges: whether it reads whole texts: their last token is never fed in plain decoding.
        """
        inputs = self.inputs
        last = inputs.visible.shape[1] + self.rules.room - 2
        if judges and last + 1 < (context_of(self.request.model) or math.inf):
            last += 1
        target = CachedModel(self.request.model, self.batch, last, self.sources.of_target())
        if inputs.cache is not None and any(inputs.cached):
            target.cache.adopt(inputs.cache, inputs.visible[:, : inputs.cache.get_seq_length()])
        return target

    def within(
        self,
        *,
        role: str = "draft",
        stats: DecodingStats | None = None,
        own_text: bool = False,
        criteria: bool = True,
    ) -> "CallState":
        """A call within this one, for a model that writes what has yet to be judged.

        It shares the request, its inputs, the random numbers and, unless told otherwise, the canvas and the rules:
        what it writes stands behind the rows of this call, too, until those are told to hold less. It owns which rows
        have ended and where, and what it counts. It streams, records and returns nothing.

        Args:
            role: the model that writes, "draft" or "target"; the draft's cache counts the caller's ids alone.
            stats: what it counts in; new by default.
            own_text: write on a copy of the canvas, which this call never sees.
            criteria: whether stop strings and `max_time` end rows; EOS and the length do in any case. Criteria of the
                caller's own are never asked: what is written here may be dropped.
        """
        other = copy.copy(self)
        other.role = role
        other.offsets = self.offsets if role == "target" else [0] * self.batch
        other.canvas = copy.deepcopy(self.canvas) if own_text else self.canvas
        other.rules = self.rules.tentative(criteria)
        other.stream = SettledStream(None, 0)
        other.scores, other.logits = Columns(self.batch, False), Columns(self.batch, False)
        other.keep_cache = False
        other.row_states = [[] for _ in self.rows]
        other.hits = {}
        other.rows_end_alone, other.late = True, False
        other.stats = stats or self.new_stats()
        other.trace = None
        return other

    def lengths(self, live: Sequence[int]) -> list[int]:
        """Tokens that the decoder's cache counts for the rows `live`, those before the caller's ids included."""
        lengths = self.canvas.lengths(live)
        return [length + self.offsets[row] for row, length in zip(live, lengths, strict=True)]

    def end(self, row: int, length: int) -> None:
        """The row ends at `length` new tokens, unless it has ended before."""
        self.hits.setdefault(row, length)

    def keep(self, row: int, states: RowStates) -> None:
        """Take what the target's cache held of a row that has ended, for the cache that is returned."""
        self.row_states[row] = states

    def clear(self, row: int, start: int, stop: int) -> None:
        """Forget the tokens of `row` in columns [start, stop) of new text."""
        self.canvas.clear(row, start, stop)
        self.scores.clear(row, start)
        self.logits.clear(row, start)

    def ended(self, row: int) -> bool:
        """Whether the row has ended for good: others may end it earlier still, but it gets no more tokens."""
        return self.rows_end_alone and row in self.hits

    def _judge(self) -> None:
        """Let the caller's own criteria judge every width that all open rows have reached. A row that ran ahead of
        the others, whether it has ended or not, is cut back to where they end it."""
        generated, canvas = self.canvas.generated, self.canvas

        def until() -> int:
            if len(self.hits) == len(generated):
                return min(max(self.hits.values()), max(generated) if self.rows_end_alone else min(generated))
            return min(generated[row] for row in self.rows if not self.ended(row))

        def stop(row: int, length: int) -> None:
            if self.hits.get(row, length + 1) > length:
                self.hits[row] = length
                if self.rows_end_alone:
                    self._cut(row, length)

        scores = self.scores
        self.order.advance(until, lambda at: canvas.shown[:, 0, :at], lambda count: scores.upto(count), stop)

    def _cut(self, row: int, length: int) -> None:
        """Drop what the row holds behind `length` new tokens."""
        surplus = self.canvas.generated[row] - length
        if surplus > 0:
            self.clear(row, length, length + surplus)
            self.canvas.hold(row, length)
            self.stats.rows[row].cut += surplus
            self.stats.rows[row].emitted -= surplus

    def settle(self, live: Sequence[int]) -> list[int]:
        """Judge and stream what is settled; returns the places in `live` of the rows that have ended."""
        if self.rules.custom:
            self._judge()
        generated = self.canvas.generated
        final = max(self.hits.values()) if len(self.hits) == len(generated) else None
        if self.rows_end_alone:
            leaving = [i for i, row in enumerate(live) if row in self.hits]
            open_rows = [row for row in self.rows if row not in self.hits]
            settled = min((generated[row] for row in open_rows), default=max(generated))
        else:
            goal = self.rules.room if final is None else final
            leaving = [i for i, row in enumerate(live) if generated[row] >= goal]
            settled = min(*generated, goal)
        self.stream.advance(self.canvas.shown[:, 0], self.canvas.prompt_width + settled)
        return leaving

    def count(self, row: int, kept: int, drafted: int, accepted: int, outcome: str | None) -> None:
        """Count a round of which the row keeps `kept` tokens, see [`RowStats.count_round`], unless it keeps none, or
        the `kept` tokens of an answer (outcome "kept"); where what stands is found out later, once that is known. Call
        before the row holds its tokens."""
        if self.late:
            self.uncounted.append((row, self.canvas.generated[row], kept, drafted, accepted, outcome))
        elif outcome == "kept":
            self.stats.rows[row].kept += kept
        elif drafted and kept:
            self.stats.rows[row].count_round(drafted, accepted, outcome, kept)
        else:
            self.stats.rows[row].plain += kept

    def substitute(self, row: int, ids: Sequence[int], vocabulary: int) -> None:
        """Count the `ids`, which the row is about to hold, that a draft of `vocabulary` has no embedding for."""
        start = self.canvas.generated[row]
        found = [(row, start + t) for t, token in enumerate(ids) if token >= vocabulary]
        if self.late:
            self.substituted += found
        else:
            self.stats.substituted_tokens += len(found)

    def all_rows(self) -> ReturnedRows:
        """Every row of the call, without what stands behind the longest one's end."""
        generated, width = self.canvas.generated, max(self.hits.values())
        for row, count in enumerate(generated):
            surplus = max(count - width, 0)
            self.canvas.hold(row, count - surplus)
            self.stats.rows[row].cut += surplus
            self.stats.rows[row].emitted -= surplus
        self.late = False
        for row, start, kept, drafted, accepted, outcome in self.uncounted:
            self.count(row, max(min(kept, generated[row] - start), 0), drafted, accepted, outcome)
        self.stats.substituted_tokens += sum(column < generated[row] for row, column in self.substituted)
        states = [at_most(one, length) for one, length in zip(self.row_states, self.lengths(self.rows), strict=True)]
        return ReturnedRows(self.rows, [0] * self.batch, generated, states, self.scores, self.logits)

    def output(
        self, target: CachedModel, draft: CachedModel | None, returned: ReturnedRows | None = None
    ) -> tuple[Any, DecodingStats]:
        """What `generate` returns (the ids, or a `SemSpecOutput` if `return_dict_in_generate`), and the statistics.

        Args:
            returned: the rows; all, of their first chain, by default.
        """
        returned = returned or self.all_rows()
        lengths, places = returned.lengths, list(returned.rows)
        width = max(lengths)
        sequences = self.canvas.shown[places, list(returned.chains), : self.canvas.prompt_width + width].to(
            self.request.input_ids.device
        )
        if self.rules.custom:  # a particle's own text may go on
            for row, length in zip(sequences, lengths, strict=True):
                row[self.canvas.prompt_width + length :] = self.canvas.pad
        self.stream.advance(sequences, sequences.shape[1])
        self.stream.end()
        cache = caller = self.inputs.cache if self.keep_cache else None
        built = build_cache(target, self.sources, self.inputs, returned, sequences) if self.keep_cache else None
        if built is not None and caller is None:
            cache = target.source.complete(built)
        stats = self.stats
        stats.target_forwards, stats.target_tokens = target.forwards, target.tokens
        stats.target_seconds = target.seconds
        if draft is not None:
            stats.draft_forwards, stats.draft_tokens = draft.forwards, draft.tokens
            stats.draft_seconds = draft.seconds
        stats.total_seconds = time.perf_counter() - self.began
        output: Any = sequences
        if self.request.generation_config.return_dict_in_generate:
            output = build_output(sequences, returned.scores.upto(width), returned.logits.upto(width), cache, stats)
            if self.trace is not None:
                output.trace = self.trace.finish(stats.scheme, self.request.settings, self.inputs.texts, lengths)
        if built is not None and caller is not None:
            caller.layers = built.layers  # nothing can fail any more
        return output, stats
