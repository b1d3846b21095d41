"""Drafts: chains of tokens from a smaller model, for our own loop and for transformers' assisted one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.generation.candidate_generator import CandidateGenerator

from ..engine.acceptance import leading
from ..engine.cache import RowStates, held
from ..engine.draft import Draft, Drafter
from ..engine.gamma import ChosenLength, FixedLength
from ..engine.mapped_model import MappedModel
from ..engine.misfits import report_choice, without_a_law
from ..engine.model import context_of, warn_of_context
from ..engine.prefixes import Prefixes
from ..engine.processors import BROKEN, CallRandomness, Processors, faults
from ..engine.sources import Source
from ..engine.timing import RoundClock
from ..engine.tokens import Canvas
from .static import StaticDraft


class ChainGenerator(Drafter, CandidateGenerator):
    """Drafts token by token from `draft`, which keeps its own cache and is never forwarded just to catch up.

    It serves our loop through `propose`, any batch and several chains, and transformers' assisted loop through
    `get_candidates`, one prompt at a time.

    Args:
        draft: a causal LM.
        vocabulary (`int`): the target's vocabulary size, on which the draft's law lives: ids the draft lacks have no
            mass, ids the target lacks are dropped.
        processors: the draft's own copies of the logits processors.
        randomness: draws for sampling; `None` drafts greedily.
        length: γ for each round.
        batch, chains (`int`): rows, and chains for each.
        max_length (`int`): the longest a row may become, in tokens.
        with_laws (`bool`): keep `log_q`; implied by sampling.
        device: where ids, laws and draws live, the target's device; by default the draft's own.
        decoder: the draft with what its cache holds already; made anew by default.
        static (`bool`): run the new one's one-token forwards from fixed buffers.
        source: what the draft reads beside text.
    """

    def __init__(
        self,
        draft: Any,
        vocabulary: int,
        processors: Processors,
        randomness: CallRandomness | None,
        length: FixedLength,
        *,
        batch: int = 1,
        chains: int = 1,
        max_length: int,
        with_laws: bool = False,
        device: torch.device | None = None,
        decoder: MappedModel | None = None,
        static: bool = False,
        source: Source | None = None,
    ) -> None:
        self.context = context_of(draft) or max_length
        self.decoder: MappedModel = decoder or (StaticDraft if static else MappedModel)(
            draft, vocabulary, device, batch, min(max_length - 2, self.context - 1), source
        )
        self.device = self.decoder.law_device
        self.own_vocabulary = self.decoder.own_vocabulary
        self.processors = processors
        self.randomness = randomness
        self.length = length
        self.chains = chains
        self.max_length = max_length
        self.with_laws = with_laws or randomness is not None
        self.filled = [0] * batch
        self._fed: torch.Tensor | None = None
        self._seen: list[tuple[int, int]] = []
        costs = length.costs
        self.clock = None if costs is None or costs.fixed else RoundClock(costs, self.decoder.device)

    def lengths(self, canvas: Canvas, live: Sequence[int]) -> list[int]:
        """How many ids the draft reads of each of the rows `live`."""
        return canvas.lengths(live)

    def read(self, canvas: Canvas, live: Sequence[int], back: int) -> torch.Tensor:
        """The last `back` of these, as the decoder takes them: (rows * chains, back)."""
        return canvas.read(live, back, 0)

    def plan(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int]) -> list[int]:
        """For each row, how many tokens to draft this round, see [`ChainGenerator.counts`]."""
        counts = self.counts(live, canvas, rooms, self.most(live))
        self.begin(counts)
        return counts

    def most(self, live: Sequence[int]) -> int:
        """γ for the next round; asked once a round."""
        return self.length.pick(len(live) * self.chains)

    def begin(self, counts: Sequence[int]) -> None:
        """A round begins, in which so many tokens of each row go to the target beside the last one."""
        if self.clock is not None:
            self.clock.start(len(counts) * self.chains, max(counts) + 1)

    def counts(self, live: Sequence[int], canvas: Canvas, rooms: Sequence[int], most: int) -> list[int]:
        """For each row, how many of `most` tokens can be drafted.

        A row with room for `rooms[i]` more tokens is drafted at most one less, since the round ends with one of the
        target's; past the draft's own context nothing is drafted.
        """
        spaces = [self.context - length + 1 for length in self.lengths(canvas, live)]
        if min(spaces) <= 0:
            warn_of_context(self.context)
        return [max(0, min(most, room - 1, space)) for room, space in zip(rooms, spaces, strict=True)]

    def propose(self, canvas: Canvas, live: Sequence[int], counts: list[int]) -> Draft:
        """Draft for each chain of the rows `live` and leave the ids on `canvas` behind the rows' tokens.

        All rows go along with the one that is to get most; what a row gets past its own count is not valid. One that
        is to get nothing, since it is past the draft's context or else, is not read for its own sake.
        """
        num_tokens = max(counts)
        lengths = self.lengths(canvas, live)
        gaps = [length - filled for length, filled in zip(lengths, self.filled, strict=True)]
        back = max(gap for gap, count in zip(gaps, counts, strict=True) if count)
        ids = self.read(canvas, live, back)
        expand = self.chains > 1 and self.decoder.cache.batch == len(live) and not self.decoder.cache.is_filled
        if expand:
            ids = ids[:: self.chains]
        drafted, laws, peaks = [], [], []
        texts = Prefixes(canvas, live) if self.processors.wants_text else None
        for t in range(num_tokens):
            # A row without room goes along in the last column: what it gets is not valid.
            ends = [min(length + t, self.context) for length in lengths for _ in range(1 if expand else self.chains)]
            logits = self.decoder.feed(ids, ends, keep=1)
            if expand:
                chain_rows = [row for row in range(len(live)) for _ in range(self.chains)]
                self.decoder.cache.select(chain_rows)
                logits, expand = logits[chain_rows], False
            scores = logits.view(len(live), self.chains, -1)
            if self.processors.processors:
                widths = [width + t for width in canvas.widths(live)]
                asked = None if texts is None else texts.only([count > t for count in counts])
                scores = self.processors(scores.unsqueeze(2), canvas.shown, live, widths, asked).squeeze(2)
            tokens, peak, log_q = self._pick(scores, first=t == 0)
            if self.processors.processors:
                canvas.write(live, t, tokens.unsqueeze(-1))
            if texts is not None:
                texts.grow(tokens, scores)
            ids = tokens.reshape(-1, 1)
            drafted.append(tokens)
            peaks.append(peak)
            laws.append(log_q)
        # What a row drafts along with the others without being asked is not committed.
        read = [length + (num_tokens - 1 if count else 0) for length, count in zip(lengths, counts, strict=True)]
        left = [0] * len(live) if self.decoder.recurrent else self.filled
        self.filled = [kept if gap > back else new for kept, gap, new in zip(left, gaps, read, strict=True)]
        draft = self._draft(drafted, peaks, laws, counts)
        canvas.write(live, 0, draft.ids)
        if self.clock is not None:
            self.clock.drafted(num_tokens if back <= 2 else 0)
        return draft

    def read_prompts(self, prompts: torch.Tensor, lengths: Sequence[int], rows: list[int]) -> None:
        """Read whole prompts before any row can leave.

        Args:
            prompts: (prompts, width) ids, of which the rows of the call are copies.
            lengths: for each row of the call, how many it has read then.
            rows: for each chain of each row, its prompt.
        """
        ends = dict(zip(rows[:: self.chains], lengths, strict=True))
        self.decoder.feed(prompts, [ends[prompt] for prompt in range(len(prompts))], keep=1)
        self.decoder.cache.select(rows)
        self.filled = list(lengths)

    def commit(self, lengths: Sequence[int]) -> None:
        """Roll back to what was committed: the rows now hold `lengths` tokens, the last of which was never fed."""
        self.filled = [min(filled, length - 1) for filled, length in zip(self.filled, lengths, strict=True)]
        if self.decoder.cache.batch == len(self.filled) * self.chains:
            self.decoder.settle([filled for filled in self.filled for _ in range(self.chains)])
        self.settle()

    def settle(self) -> None:
        """A round is over."""
        if self.clock is not None:
            self.clock.stop()
        if self._seen:
            self.length.observe(self._seen)
            self._seen = []

    def select(self, rows: list[int]) -> None:
        """Keep only `rows` of the current batch."""
        self.filled = [self.filled[row] for row in rows]
        if self.decoder.cache.is_filled:
            self.decoder.cache.select([row * self.chains + chain for row in rows for chain in range(self.chains)])
        else:
            self.decoder.cache.select(rows)

    def resume(self, states: Sequence[RowStates], lengths: Sequence[int]) -> None:
        """Go on with rows of `lengths` tokens, the last of which was never fed, of which the cache held `states`."""
        self.decoder.cache.load(states)
        known = [min(held(row), length - 1) for row, length in zip(states, lengths, strict=True)]
        self.filled = [self.decoder.cache.reach(row, length) for row, length in enumerate(known)]
        if self.decoder.cache.is_filled and self.chains > 1:
            self.decoder.cache.select([row for row in range(len(states)) for _ in range(self.chains)])

    def states(self, row: int) -> RowStates:
        """A copy of what the draft's cache holds of a row, of its first chain."""
        return self.decoder.cache.rows(row * self.chains, self.filled[row]) if self.decoder.cache.is_filled else []

    def observe(self, place: int, drafted: int, kept: int) -> None:
        """Take note that `kept` of the tokens drafted for the row at `place` stand."""
        self._seen.append((drafted, kept))

    def report(self, call: Any) -> None:
        """Put into the statistics of `call` how γ was chosen, and say once of a pair that nothing is gained."""
        if isinstance(self.length, ChosenLength):
            report_choice(self.length, call)

    def _draft(
        self, drafted: list[torch.Tensor], peaks: list[torch.Tensor], laws: list[Any], counts: list[int]
    ) -> Draft:
        num_tokens = len(drafted)
        found = faults(torch.stack(peaks, dim=-1))
        valid, broken = found == 0, found == BROKEN
        if min(counts) < num_tokens:
            limits = torch.tensor(counts, device=self.device)[:, None, None]
            within = torch.arange(num_tokens, device=self.device) < limits
            valid, broken = valid & within, broken & within
        log_q = torch.stack(laws, dim=2) if self.with_laws else None
        return Draft(torch.stack(drafted, dim=-1), valid, counts, log_q, broken.any())

    def _pick(self, scores: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids (rows, chains), the highest score of each (-inf also where the id was drawn from no law), the law."""
        log_q = functional.log_softmax(scores, dim=-1) if self.with_laws else None
        if self.randomness is not None:
            assert log_q is not None
            tokens, lawless = self.randomness.draw(log_q.exp().flatten(0, 1))
            tokens, lawless, peak = (*(part.view(scores.shape[:2]) for part in (tokens, lawless)), scores.amax(dim=-1))
            return tokens, peak.masked_fill(lawless & (peak < torch.inf), -torch.inf), log_q
        peak, tokens = scores.max(dim=-1)
        if first and self.chains > 1:
            best = scores.nan_to_num(nan=-torch.inf).topk(self.chains, dim=-1).indices  # chains agree: equal rows
            tokens = best.diagonal(dim1=1, dim2=2)
        return tokens, peak, log_q

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for transformers' own assisted loop.

        Args:
            input_ids: (1, length) int64.

        Returns:
            (1, length + γ) ids and, unless drafting greedily, their (1, γ, vocabulary) log-probabilities: as far as
            the draft has a law.

        Raises:
            ValueError: the draft's logits hold nan or +inf.
        """
        length, most = input_ids.shape[1], self.most([0])
        canvas = Canvas(input_ids.to(self.device), None, self.chains, 0, most, self.decoder.vocabulary)
        if self._fed is not None:
            same = min(self.filled[0], length - 1)
            differs = (self._fed[0, :same] != canvas.shown[0, 0, :same]).nonzero()
            self.filled = [int(differs[0]) if len(differs) else same]
        counts = self.counts([0], canvas, [self.max_length - length], most)
        if counts == [0]:
            return input_ids, None
        draft = self.propose(canvas, [0], counts)
        self._fed = canvas.shown[0, :, : length + counts[0]]
        if draft.broken:
            raise without_a_law("draft", self.decoder.model)
        assert draft.valid is not None
        count = int(leading(draft.valid[0, 0]))
        ids = torch.cat([input_ids, draft.ids[:, 0, :count].to(input_ids.device)], dim=1)
        return ids, None if self.randomness is None or draft.log_q is None else draft.log_q[:, 0, :count]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Tell the draft length what transformers' loop accepted."""
        self.length.observe([(scores.shape[1] - 1, int(num_matches))])
