"""Whole answers by the draft alone, for rows of a call."""

from collections.abc import Callable, Sequence

from ...drafts.ngram import NGramGenerator
from ...drafts.static import StaticDraft
from ...engine.cache import RowStates, cut, held
from ...engine.call import CallState
from ...engine.draft import Drafter, NoDrafts
from ...engine.mapped_model import MappedModel
from ...engine.model import CachedModel, context_of, warn_of_context
from ...engine.processors import Processors
from ...engine.rounds import Speculation
from .judge import Answer

NGRAM_TOKENS = 5
Run = Callable[[Speculation], None]


class AnswerWriter:
    """Lets the draft go on with rows until they end, by its own law; its cache stays for whoever drafts next.

    Args:
        call: the call.
        run: rounds of `lossless`, which leave the draft's law as it is.
        ngrams (`bool`): speed the draft up by n-grams from the text.
    """

    def __init__(self, call: CallState, run: Run, ngrams: bool) -> None:
        self.call = call
        self.run = run
        self.ngrams = ngrams
        request = call.request
        self.vocabulary = call.vocabulary
        self.context = context_of(request.draft) or call.longest
        kind = StaticDraft if request.scheme.compile_draft else MappedModel
        self.model: CachedModel = kind(
            request.draft, self.vocabulary, call.device, call.batch, min(call.longest, self.context) - 1
        )
        self.processors = Processors(request.processors).copies()
        self.states: dict[int, RowStates] = {}  # what the draft's cache held of each row when it stopped
        self.stats = call.new_stats()

    def write(self, live: Sequence[int]) -> list[Answer]:
        """Write an answer for each of the rows `live` onto the canvas."""
        call, canvas = self.call, self.call.canvas
        starts = {row: canvas.generated[row] for row in live}
        limits = [min(call.rules.room, self.context + 1 - length) for length in canvas.prompt_lengths]
        writing = [row for row in live if limits[row] > starts[row]]
        draft, unknown = call.within(stats=self.stats), set[int]()
        if writing:
            cached = self.held(writing)
            self.model.cache.load(cached)
            state = Speculation(
                draft,
                self.model,
                self._lookup(draft, writing),
                writing,
                limits=limits,
                keep_states=True,
                pause_masked=True,
                processors=self.processors,
            )
            prompts = dict(zip(writing, canvas.lengths(writing), strict=True))
            state.prefill([held(states) for states in cached])
            self.model.pin([prompts[row] - 1 for row in state.live])
            self.run(state)
            self.take(state.target_states)
            unknown = state.masked  # there the target goes on
        if any(row not in draft.hits and row not in unknown for row in live):
            warn_of_context(self.context)
        texts = canvas.shown[list(live), 0, canvas.prompt_width :].tolist()
        answers = []
        for row, text in zip(live, texts, strict=True):
            ids = text[starts[row] : canvas.generated[row]]
            closed = row in draft.hits and ids[-1] in call.rules.eos_ids
            answers.append(Answer(starts[row], ids[:-1] if closed else ids, row in draft.hits, closed))
        return answers

    def forget(self, row: int, length: int) -> None:
        """Keep only the first `length` tokens of what the draft's cache held of `row`."""
        self.states[row] = cut(self.states.get(row, []), length)

    def held(self, rows: Sequence[int]) -> list[RowStates]:
        """What the draft's cache held of each of `rows`."""
        return [self.states.get(row, []) for row in rows]

    def take(self, states: dict[int, RowStates]) -> None:
        """Go on from what the draft's cache held of rows when another decoder was done with it."""
        self.states.update(states)

    def _lookup(self, call: CallState, rows: Sequence[int]) -> Drafter:
        if not self.ngrams:
            return NoDrafts()
        return NGramGenerator(
            self.vocabulary,
            NGRAM_TOKENS,
            dict(zip(rows, call.canvas.texts(rows), strict=True)),
            max_length=call.longest,
            with_laws=call.sampling,
            device=call.device,
        )
