"""Where particles end: what of a scored block belongs to the text of each, and what is left where no particle has
weight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ...engine.call import CallState
from ...engine.processors import BROKEN, in_blocks
from ...engine.request import Block
from .weights import draw, token_log_probs


@dataclass(frozen=True)
class Scored:
    """A scored block of the live prompts, with the numbers that particles are weighted by.

    Args:
        block: as the engine scored it.
        ids: (rows, N, γ) drafted ids, γ = 0 where nothing could be drafted.
        counts, drafted: how many of the γ each row has room for, as ints and as (rows, 1) int64.
        log_q, log_p: (rows, N, γ) float64 of the drafted ids.
        last: (rows, N, vocabulary) processed scores after those, the bonus token's law.
        uniforms: (rows, N) float64 in [0, 1) for the one token that is drawn from the target.
    """

    block: Block
    ids: torch.Tensor
    counts: list[int]
    drafted: torch.Tensor
    log_q: torch.Tensor
    log_p: torch.Tensor
    last: torch.Tensor
    uniforms: torch.Tensor

    @classmethod
    def of(cls, block: Block, uniforms: torch.Tensor) -> "Scored":
        """The numbers of `block`, whose draft holds the log q of its ids alone."""
        scores, draft, rows = block.scores, block.draft, len(uniforms)
        ids = torch.zeros(*uniforms.shape, 0, dtype=torch.long, device=scores.device) if draft is None else draft.ids
        log_q = uniforms.new_zeros(ids.shape) if draft is None or draft.log_q is None else draft.log_q
        counts = [0] * rows if draft is None else draft.counts
        drafted = torch.tensor(counts, device=scores.device)
        last = scores[torch.arange(rows, device=scores.device), :, drafted]
        log_p = token_log_probs(scores[:, :, :-1], ids)
        return cls(block, ids, counts, drafted.unsqueeze(1), log_q, log_p, last, uniforms)


@dataclass(frozen=True)
class Judged:
    """What a round makes of a block.

    Args:
        scored: the block.
        drawn: (rows, N, γ+1) the drafted ids and the bonus, whatever their particle's end.
        tokens: (rows, N, γ+1) what is committed of them, padding after a particle's end.
        kept: (rows, N) how many of them belong to its text; 0 if it was finished before.
        ended: (rows, N) whether it is finished.
        collapsed: (rows,) whether the drafted block was dropped.
        died: (rows,) particles whose weight vanished.
        log_weights: (rows, N), with the block's increments once it is weighted.
    """

    scored: Scored
    drawn: torch.Tensor
    tokens: torch.Tensor
    kept: torch.Tensor
    ended: torch.Tensor
    collapsed: torch.Tensor
    died: torch.Tensor
    log_weights: torch.Tensor

    def broken(self, log_weights: torch.Tensor) -> torch.Tensor:
        """Bits of the models that gave no law where one was needed, (); `log_weights` are what the round left."""
        scored, kept = self.scored, self.kept
        flaws = scored.block.faults == BROKEN  # (rows, N, γ+1)
        counted = torch.arange(flaws.shape[-1], device=kept.device) < kept.unsqueeze(-1)
        drafted = counted[..., :-1] & (
            torch.arange(flaws.shape[-1] - 1, device=kept.device) < scored.drafted.unsqueeze(-1)
        )
        draft = (scored.log_q.isnan() & drafted).any()
        nothing_left = (log_weights == -torch.inf).all(dim=-1).any()
        return ((flaws & counted).any() | nothing_left).long() + 2 * draft.long()


class Ends:
    """Where the particles of a call end: at an EOS, a stopping criterion of the caller's or the length limit.

    Args:
        call: the call.
        copies (`int`): rows that `generate` prepared for each prompt; criteria see particles in such blocks.
    """

    def __init__(self, call: CallState, copies: int) -> None:
        self.call = call
        self.copies = copies
        self.eos = torch.tensor(sorted(call.rules.eos_ids), dtype=torch.long, device=call.device)

    def judge(
        self,
        scored: Scored,
        bonus: torch.Tensor,
        live: Sequence[int],
        finished: torch.Tensor,
        log_weights: torch.Tensor,
    ) -> Judged:
        """Cut each particle of the prompts `live` where it ends first; `bonus` (live, N) ends its block."""
        limit = scored.drafted + 1
        drawn = functional.pad(scored.ids, (0, 1))
        places = torch.arange(drawn.shape[-1], device=drawn.device)
        drawn = torch.where(places == scored.drafted.unsqueeze(-1), bonus.unsqueeze(-1), drawn)
        ends = functional.pad(self._is_eos(drawn), (0, 1), value=True).long().argmax(dim=-1) + 1
        if self.call.rules.early:
            self.call.canvas.write(live, 0, self._padded(drawn, ends))
            ends = torch.minimum(ends, self._called(drawn, scored.counts, live, finished))
        kept = torch.minimum(ends, limit).masked_fill(finished, 0)
        none = torch.zeros_like(kept[:, 0])
        ended = (ends <= limit) | finished
        return Judged(scored, drawn, self._padded(drawn, kept), kept, ended, none, none, log_weights)

    def revive(self, judged: Judged, log_weights: torch.Tensor, finished: torch.Tensor, power: float) -> Judged:
        """Where every weight of a prompt vanished, drop its block: each open particle gets one token, drawn from its
        own first target row, and keeps the weight of before.

        Args:
            judged: with the weights of before.
            log_weights: (live, N), with the block's increments.
            finished: (live, N), which were before.
        """
        scored, before, gone = judged.scored, judged.log_weights, log_weights == -torch.inf
        collapsed = gone.all(dim=-1)
        dropped = collapsed.unsqueeze(-1)
        law, single = scored.block.scores[:, :, 0], (~finished).long()
        token, _ = draw(law, scored.uniforms, power)
        tokens = self._padded(functional.pad(token.unsqueeze(-1), (0, scored.ids.shape[-1])), single)
        lawless = (law.amax(dim=-1) == -torch.inf) & ~finished
        return replace(
            judged,
            tokens=torch.where(dropped.unsqueeze(-1), tokens, judged.tokens),
            kept=torch.where(dropped, single, judged.kept),
            ended=torch.where(dropped, finished | self._is_eos(token), judged.ended),
            collapsed=collapsed,
            died=(gone & (before > -torch.inf)).sum(dim=-1),
            log_weights=torch.where(dropped, before.masked_fill(lawless, -torch.inf), log_weights),
        )

    def stops_revived(self, judged: Judged, live: Sequence[int], finished: torch.Tensor) -> torch.Tensor:
        """Which particles the caller's criteria end at the one token that a dropped block left them, (live, N)."""
        closed = finished | ~judged.collapsed.unsqueeze(-1)
        return self._called(judged.tokens[:, :, :1], [0] * len(live), live, closed) <= 1

    def _is_eos(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.unsqueeze(-1) == self.eos).any(dim=-1)

    def _padded(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return tokens.masked_fill(places >= kept.unsqueeze(-1), self.call.canvas.pad)

    def _called(
        self, tokens: torch.Tensor, counts: list[int], live: Sequence[int], closed: torch.Tensor
    ) -> torch.Tensor:
        """How many of the `tokens` each particle keeps by the caller's own criteria, (live, N), one more than there
        are if they do not end it; those `closed` are not asked.

        They run on the host, one token after the other, as plain `generate` calls them.
        """
        rows, skip, canvas, copies = tokens.tolist(), closed.tolist(), self.call.canvas, self.copies
        news, places, widths = [], [], []
        for i, (row, width) in enumerate(zip(live, canvas.widths(live), strict=True)):
            for n, ids in enumerate(rows[i]):
                news.append([] if skip[i][n] else ids[: counts[i] + 1])
                places.append((n // copies * self.call.batch + row) * copies + n % copies)
                widths.append(width)
        ends = self.call.rules.cut(news, places, widths, lambda at: in_blocks(canvas.shown[:, :, :at], copies))
        past = tokens.shape[-1] + 1
        return torch.tensor([past if end is None else end for end in ends], device=tokens.device).view(closed.shape)
