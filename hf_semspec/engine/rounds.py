"""The rounds of a token-level scheme: draft a block, score it with one target pass, commit what the scheme decides."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from .acceptance import BONUS, RESAMPLED, Acceptance
from .cache import RowStates
from .call import CallState
from .draft import Draft, Drafter
from .misfits import check_laws, warn_of_low_acceptance
from .model import CachedModel, Fed
from .outputs import DecodingStats
from .prefixes import Prefixes
from .processors import BROKEN, MASKED, Processors, faults
from .ranks import share
from .request import Block, Decided
from .results import ReturnedRows

OUTCOMES = ("bonus", "residual", "resampled")


class Speculation:
    """Rounds of a token-level scheme over rows of a call. Rows that end, or pause, leave the batch of both models.

    Args:
        call: what the rows hold so far; its canvas has the drafter's chains.
        target: the model that decides.
        drafter: what it is offered.
        live: the rows, indices into the caller's batch; `target` and `drafter` hold these, in this order.
        with_laws (`bool`): keep p and q of every drafted position also when greedy.
        tested (`bool`): whether drafted tokens are tested, for which a call that samples keeps both laws and draws a
            number each.
        limits: the most new tokens of each row of the caller's batch; what the call has room for by default.
        pause: asked after each round, with every row's index in the caller's batch and its newly committed ids,
            whether it leaves although it has not ended.
        keep_states: keep what both caches hold of the rows that leave, for whoever goes on with them.
        pause_masked (`bool`): let a row in which every id is masked out leave like one that pauses: what the draft
            does not know is no error where it writes. Such rows are in `masked`.
        processors: the call's own by default.
        with_hidden (`bool`): keep the target's hidden states of every block.
    """

    def __init__(
        self,
        call: CallState,
        target: CachedModel,
        drafter: Drafter,
        live: Sequence[int] | None = None,
        *,
        with_laws: bool = False,
        tested: bool = True,
        limits: Sequence[int] | None = None,
        pause: Callable[[int, list[int]], bool] | None = None,
        keep_states: bool = False,
        pause_masked: bool = False,
        processors: Processors | None = None,
        with_hidden: bool = False,
    ) -> None:
        self.call = call
        self.target = target
        self.drafter = drafter
        self.live = list(call.rows if live is None else live)
        self.with_laws = with_laws or call.trace is not None or (tested and call.sampling)
        self.with_uniforms = tested and call.sampling
        self.limits = limits or [call.rules.room] * call.batch
        self.pause = pause or (lambda row, ids: False)
        self.chains = drafter.chains
        self.processors = processors or Processors(call.request.processors)
        self.resampled: list[tuple[int, int]] = []
        self.keep_states = keep_states
        self.with_hidden = drafter.taps or with_hidden
        self.pause_masked = pause_masked
        self.paused: list[int] = []
        self.masked: set[int] = set()
        self.target_states: dict[int, RowStates] = {}
        self.draft_states: dict[int, RowStates] = {}

    @property
    def running(self) -> bool:
        """Whether any row is still open."""
        return bool(self.live)

    def prefill(self, cached: Sequence[int]) -> None:
        """Feed what `target` lacks of the rows, of which it holds `cached` tokens each, and commit one plain token a
        row; a drafter that reads the target's states needs those of the whole prompt."""
        if self.drafter.taps:
            cached = [length - own for length, own in zip(*self._both_lengths(), strict=True)]
        block = self.read_prompts(cached)
        self.commit(block, self.plain(block))

    def read_prompts(self, cached: Sequence[int]) -> Block:
        """Feed what `target` lacks of the rows, of which it holds `cached` tokens each, once for all chains of a row;
        the block has no drafts."""
        lengths = self.call.lengths(self.live)
        back = max(length - held for length, held in zip(lengths, cached, strict=True))
        ids = self.call.canvas.read(self.live, back, 0)[:: self.chains]
        fed = self.target.forward(ids, lengths, keep=1, with_hidden=self.with_hidden)
        if self.chains > 1:
            self.expand()
            fed = Fed(fed.logits.repeat_interleave(self.chains, dim=0), fed.hidden)
        return self._score(fed, None)

    def expand(self) -> None:
        """Give every chain of a row its own copy of the target's cache."""
        self.target.cache.select([i for i in range(len(self.live)) for _ in range(self.chains)])

    def draft_and_score(self) -> Block:
        """γ draft forwards and one target forward over the drafted block."""
        canvas = self.call.canvas
        counts = self.drafter.plan(self.live, canvas, self._rooms())
        num_tokens = max(counts)
        draft = self.drafter.propose(canvas, self.live, counts) if num_tokens else None
        ends = [length + num_tokens for length in self.call.lengths(self.live) for _ in range(self.chains)]
        ids = canvas.read(self.live, 1, num_tokens)
        return self._score(self.target.forward(ids, ends, num_tokens + 1, self.with_hidden), draft)

    def _rooms(self) -> list[int]:
        """For each live row, how many new tokens it may still get."""
        return [self.limits[row] - self.call.canvas.generated[row] for row in self.live]

    def _score(self, fed: Fed, draft: Draft | None) -> Block:
        call, width = self.call, fed.logits.shape[1]
        raw = fed.logits.to(device=call.device, dtype=torch.float32).view(len(self.live), self.chains, width, -1)
        kept = raw.clone() if call.logits.wanted else None
        texts = None
        if self.processors.wants_text:
            texts = Prefixes(call.canvas, self.live, *(() if draft is None else (draft.ids, draft.valid)))
        scores = self.processors(raw, call.canvas.shown, self.live, call.canvas.widths(self.live), texts)
        # The index of the maximum costs several times the maximum.
        peak, choices = (scores.amax(dim=-1), None) if call.sampling else scores.max(dim=-1)
        log_p = functional.log_softmax(scores, dim=-1) if self.with_laws else None
        drawn = self.with_uniforms and draft is not None
        uniforms = call.randomness.uniforms(*scores.shape[:2], width - 1) if drawn else None
        return Block(list(self.live), draft, scores, kept, log_p, choices, uniforms, faults(peak), fed.hidden)

    def plain(self, block: Block) -> Acceptance:
        """The decision for a block without drafts: one token from the target."""
        none = torch.zeros(len(self.live), dtype=torch.long, device=self.call.device)
        if block.choices is not None:
            return Acceptance(none, none + BONUS, None, block.choices[:, 0, 0])
        assert block.log_p is not None
        return Acceptance(none, none + BONUS, block.log_p[:, 0, 0].exp())

    def commit(self, block: Block, decision: Acceptance) -> Decided:
        """Append what was decided, cut rows where they end, and let rows that end or pause leave the batch.

        A row that the accepted tokens fill to its limit gets no other token behind them.
        """
        decided = self._read(block, decision)
        kept = self._cut(block, decided)
        self._book(block, decision, decided, kept)
        self._retire([ids[:count] for ids, count in zip(decided.tokens, kept, strict=True)])
        return decided

    def _read(self, block: Block, decision: Acceptance) -> Decided:
        """The next tokens are drawn, the one host read brings what was decided, and the canvas shows the new ids."""
        canvas = self.call.canvas
        decided, found, draft_broken = read_decision(block, self.drawn(decision), self._rooms())
        bad = any(found) if not self.pause_masked else BROKEN in found
        check_laws(bad + 2 * draft_broken, self.call.request, self.call.role)
        self.masked.update(row for row, masked in zip(self.live, decided.masked, strict=True) if masked)
        width = block.scores.shape[2]
        padded = [ids + [canvas.pad] * (width - len(ids)) for ids in decided.tokens]
        canvas.write(self.live, 0, torch.tensor(padded, device=self.call.device).unsqueeze(1))
        return decided

    def drawn(self, decision: Acceptance) -> Acceptance:
        """`decision` with the token of each row that comes after what is accepted, drawn if it has not been yet."""
        if decision.token is not None:
            return decision
        assert decision.law is not None
        token, lawless = self.call.randomness.draw(decision.law)
        return decision._replace(law=None, token=token, lawless=lawless)

    def _cut(self, block: Block, decided: Decided) -> list[int]:
        """Mark rows that have ended, by what the caller's criteria see; returns how many new tokens each row keeps."""
        call, canvas, live = self.call, self.call.canvas, self.live
        starts, counts = [canvas.generated[row] for row in live], [len(ids) for ids in decided.tokens]
        for columns, values in ((call.scores, block.scores), (call.logits, block.logits)):
            if columns.wanted and values is not None:
                columns.put(values[range(len(live)), decided.chains], live, starts, counts)
        ends = call.rules.cut(
            decided.tokens,
            live,
            canvas.widths(live),
            lambda at: canvas.shown[:, 0, :at],
        )
        kept = []
        for row, start, count, end in zip(live, starts, counts, ends, strict=True):
            kept.append(count if end is None or not call.rows_end_alone else end)
            if end is not None or start + kept[-1] == call.rules.room:
                call.end(row, start + (end or kept[-1]))
        return kept

    def _book(self, block: Block, decision: Acceptance, decided: Decided, kept: Sequence[int]) -> None:
        """Count what became of the block, and go on with what is kept of it: text, caches, and the drafter's notes."""
        call, canvas, live = self.call, self.call.canvas, self.live
        starts = [canvas.generated[row] for row in live]
        self._show(block, decided)
        if call.trace is not None:
            call.trace.block(block, decision, live, starts, decided)
        self._count(block.draft, decided, kept)
        for i, row in enumerate(live):
            ids = decided.tokens[i]
            if kept[i] < len(ids):
                call.clear(row, starts[i] + kept[i], starts[i] + len(ids))
            elif decided.outcomes[i] == RESAMPLED:
                self.resampled.append((row, starts[i] + kept[i] - 1))
            call.substitute(row, ids[: kept[i]], self.drafter.own_vocabulary)
            canvas.hold(row, starts[i] + kept[i])
            call.stats.rows[row].cut += len(ids) - kept[i]
            call.stats.rows[row].emitted += kept[i]
            self.drafter.learn(row, ids[: kept[i]])
        self._align(decided.chains, block.scores.shape[2] - 1)
        self.target.settle([length - 1 for length in call.lengths(live) for _ in range(self.chains)])
        self.drafter.commit(canvas.lengths(live))

    def _both_lengths(self) -> tuple[list[int], list[int]]:
        """Tokens of the live rows, with and without those before the caller's ids."""
        return self.call.lengths(self.live), self.call.canvas.lengths(self.live)

    def _show(self, block: Block, decided: Decided) -> None:
        """Show a drafter that reads the target's states those of the committed chains; call before rows hold more."""
        if not self.drafter.taps or block.hidden is None:
            return
        width, drafted = block.hidden.shape[1], block.scores.shape[2] - 1
        chains = 1 if len(block.hidden) == len(self.live) else self.chains
        places = [i * chains + (chain if chains > 1 else 0) for i, chain in enumerate(decided.chains)]
        states = block.hidden if chains == 1 else block.hidden[places]
        self.drafter.see(states, [length + drafted - width for length in self.call.canvas.lengths(self.live)])

    def _count(self, draft: Draft | None, decided: Decided, kept: Sequence[int]) -> None:
        for i, row in enumerate(self.live):
            drafted, accepted, outcome = draft.counts[i] if draft is not None else 0, decided.accepted[i], None
            if accepted < len(decided.tokens[i]):
                outcome = OUTCOMES[decided.outcomes[i]]
            self.call.count(row, kept[i], drafted, accepted, outcome)
            if drafted:
                self.drafter.observe(i, drafted, accepted)

    def _align(self, chains: list[int], num_drafted: int) -> None:
        """Give every chain of a row the cache of the chain that was committed."""
        if self.chains == 1 or num_drafted == 0:
            return
        rows = [i for i in range(len(chains) * self.chains) if i % self.chains != chains[i // self.chains]]
        sources = [row - row % self.chains + chains[row // self.chains] for row in rows]
        low = min(self.call.canvas.lengths(self.live)) - num_drafted - 2
        for cache in (self.target.cache, *self.drafter.caches):
            cache.copy_rows(sources, rows, max(low, 0), cache.planned.end)

    def _retire(self, news: Sequence[list[int]]) -> None:
        """Stream what is settled; rows that ended, or pause after their `news`, leave both models, their states kept
        if they are wanted later."""
        generated = self.call.canvas.generated
        pausing = [
            row in self.masked or self.pause(row, ids) or generated[row] >= self.limits[row]
            for row, ids in zip(self.live, news, strict=True)
        ]
        lengths = self.call.lengths(self.live)  # before a verdict of the caller's criteria cuts them
        leaving = self.call.settle(self.live)
        paused = [i for i, pauses in enumerate(pausing) if pauses and i not in leaving]
        self.paused += [self.live[i] for i in paused]
        if not leaving and not paused:
            return
        staying = [i for i in range(len(self.live)) if i not in leaving and i not in paused]
        if self.keep_states:
            for i in sorted(leaving + paused):
                row = self.live[i]
                self.target_states[row] = self.target.cache.rows(i * self.chains, lengths[i] - 1)
                self.draft_states[row] = self.drafter.states(i)
        if self.call.keep_cache:
            for i in leaving + paused if self.call.rules.custom else leaving:  # they may end one that pauses
                self.call.keep(self.live[i], self.target.cache.rows(i * self.chains, lengths[i] - 1))
        self.keep(staying)

    def keep(self, staying: list[int]) -> None:
        """Go on with the rows at the places `staying` of `live`; the others leave both models."""
        self.live = [self.live[i] for i in staying]
        if staying:
            self.target.cache.select([i * self.chains + chain for i in staying for chain in range(self.chains)])
            self.drafter.select(staying)

    def output(self, returned: ReturnedRows | None = None) -> tuple[Any, DecodingStats]:
        """What `generate` returns, see [`CallState.output`], and the statistics with the forwards of both models."""
        output, stats = self.call.output(self.target, self.drafter.decoder, returned)
        warn_of_low_acceptance(stats, self.call.request)
        return output, stats


def read_decision(block: Block, decision: Acceptance, rooms: Sequence[int]) -> tuple[Decided, list[int], bool]:
    """Bring what was decided to the host.

    Args:
        decision: with the tokens behind the accepted ones.
        rooms: for each row, the most tokens it may get.

    Returns:
        What was decided; for each row what is wrong with the target's scores up to there, see [`processors.faults`];
        and whether the draft is broken.
    """
    token, width = decision.token, block.scores.shape[2]
    assert token is not None
    lawless = torch.zeros_like(token) if decision.lawless is None else decision.lawless
    draft_broken, drafted = token.new_zeros(()), token.new_zeros(len(token), 0)
    if block.draft is not None:
        draft_broken, drafted = block.draft.broken, block.draft.ids.flatten(1)
    columns = decision.num_accepted, decision.outcome, decision.lead, lawless, draft_broken, token, drafted
    *head, flaws = read_columns(len(rooms), *columns, block.faults.flatten(1))
    decided, found = Decided([], head[1], head[2], [], []), []
    for count, _, chain, flagged, _, next_id, ids, own, room in zip(*head, flaws, rooms, strict=True):
        own = own[chain * width :][: count + 1]
        first = next((place for place, fault in enumerate(own) if fault), None)
        found.append(BROKEN * flagged if first is None else own[first])
        decided.masked.append(found[-1] == MASKED)
        count, ids = count if first is None else first, ids[chain * (width - 1) :]
        decided.accepted.append(count)
        decided.tokens.append([*ids[:count], *([next_id] if first is None else [])][:room])
    return decided, found, bool(head[4][0])


def read_columns(rows: int, *columns: torch.Tensor) -> list[list[Any]]:
    """Bring integers of `rows` rows to the host, together. A round does this once; only the caller's own criteria may
    read more.

    Args:
        columns: (rows, width) each, (rows,), or () for one that all rows share.

    Returns:
        For each column what every row has of it: a list where it has a width, else an int.
    """
    parts = [column.long().expand(rows) if column.dim() == 0 else column.long() for column in columns]
    parts = [part.unsqueeze(1) if part.dim() == 1 else part for part in parts]
    values, found, first = share(torch.cat(parts, dim=1)).tolist(), [], 0
    for column, part in zip(columns, parts, strict=True):
        cut = slice(first, first + part.shape[1])
        found.append([row[cut] if column.dim() == 2 else row[first] for row in values])
        first = cut.stop
    return found
