"""The state of one call of `smc` up to a judged block: N particles for each prompt, drafted, scored and cut together.

The N particles of a prompt are N rows of both models and advance in step, whatever they hold; a finished one keeps
its slot and its weight, and its tokens past its end are padding that counts for nothing.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ...drafts.chain import DraftLength
from ...engine.cache import text_config
from ...engine.draft import Draft
from ...engine.inputs import read_inputs
from ...engine.model import CachedModel, compute_device
from ...engine.processors import BlockProcessors, CallRandomness, in_blocks, with_temperature
from ...engine.request import Request
from ...engine.rounds import read_on_host
from ...engine.stopping import ParticleStopRules
from ...engine.tokens import Canvas
from .drafts import ParticleGenerator
from .weights import draw, token_log_probs


@dataclass
class Block:
    """A scored block of the live prompts, and what a round makes of it.

    Args:
        ids: (rows, N, γ) drafted ids, γ = 0 where nothing could be drafted.
        counts, drafted: how many of the γ each row has room for, as ints and as (rows, 1) int64.
        log_q, log_p: (rows, N, γ) float64 of the drafted ids.
        last: (rows, N, vocabulary) processed scores after those, the bonus token's law.
        scores: (rows, N, γ+1, vocabulary) float32, the target's processed scores.
        logits: the same before the processors; `None` unless the caller wants them.
        uniforms: (rows, N) float64 in [0, 1) for the one token that is drawn from the target.
        drawn: (rows, N, γ+1) the drafted ids and the bonus, whatever their particle's end; like all below, set by the
            round.
        tokens: (rows, N, γ+1) what is committed of them, padding after a particle's end.
        kept: (rows, N) how many of them belong to its text; 0 if it was finished before.
        ended: (rows, N) whether it is finished.
        collapsed: (rows,) whether the drafted block was dropped.
        died: (rows,) particles whose weight vanished.
        log_weights: (rows, N), with the block's increments.
    """

    ids: torch.Tensor
    counts: list[int]
    drafted: torch.Tensor
    log_q: torch.Tensor
    log_p: torch.Tensor
    last: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor | None
    uniforms: torch.Tensor
    drawn: torch.Tensor = field(init=False)
    tokens: torch.Tensor = field(init=False)
    kept: torch.Tensor = field(init=False)
    ended: torch.Tensor = field(init=False)
    collapsed: torch.Tensor = field(init=False)
    died: torch.Tensor = field(init=False)
    log_weights: torch.Tensor = field(init=False)


class Particles:
    """The particles of a call, with what drafts, scores and cuts them. Tensors of state have one row for each live
    prompt."""

    def __init__(self, request: Request) -> None:
        self.began = time.perf_counter()
        self.request = request
        model, config, scheme = request.model, request.generation_config, request.scheme
        self.device = compute_device(model)
        self.copies: int = config.num_return_sequences
        self.inputs = inputs = read_inputs(
            model, request.input_ids[:: self.copies], _every(request, self.copies), config
        )
        self.randomness = CallRandomness(self.device, (getattr(model, "_tp_size", None) or 1) > 1)
        self.number: int = scheme.num_particles
        self.power: float = scheme.power
        wanted = bool(config.return_dict_in_generate)
        self.keep_scores = wanted and bool(config.output_scores)
        self.keep_logits = wanted and bool(config.output_logits)
        batch, width = inputs.ids.shape
        self.live = list(range(batch))
        self.rules = ParticleStopRules(request.criteria, width, config.max_length)
        self.eos = torch.tensor(sorted(self.rules.eos_ids), dtype=torch.long, device=self.device)
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.canvas = Canvas(inputs.ids, inputs.mask, self.number, pad, min(self.rules.room, 1024) + 64)
        self.target = CachedModel(model, batch, inputs.visible.shape[1] + self.rules.room - 2)
        if inputs.cache is not None and any(inputs.cached):
            self.target.cache.adopt(inputs.cache, inputs.visible[:, : inputs.cache.get_seq_length()])
        self.processors = BlockProcessors(request.processors, self.copies)
        own = with_temperature(self.processors.copies().processors, scheme.draft_temperature)
        self.drafter = ParticleGenerator(
            request.draft,
            int(text_config(model).vocab_size),
            BlockProcessors(own, self.copies),
            self.randomness,
            DraftLength(scheme.num_draft_tokens, lambda: 0.0),
            batch=batch,
            chains=self.number,
            max_length=width + self.rules.room,
            device=self.device,
            shared_start=self.power == 1,
            static=scheme.compile_draft,
        )
        self.log_weights = torch.zeros(batch, self.number, dtype=torch.float64, device=self.device)
        self.log_evidence = torch.zeros(batch, dtype=torch.float64, device=self.device)
        self.finished = torch.zeros(batch, self.number, dtype=torch.bool, device=self.device)
        self.new_tokens = torch.zeros(batch, self.number, dtype=torch.long, device=self.device)

    @property
    def running(self) -> bool:
        """Whether any prompt is still open."""
        return bool(self.live)

    def draft_and_score(self) -> Block:
        """γ draft forwards and one target forward over [x0, d_1..d_γ] of all particles."""
        rooms = [self.rules.room - self.canvas.generated[row] for row in self.live]
        counts = self.drafter.plan(self.live, self.canvas, rooms)
        num_tokens = max(counts)
        draft = self.drafter.propose(self.canvas, self.live, counts) if num_tokens else None
        ends = [length + num_tokens for length in self._target_lengths() for _ in range(self.number)]
        logits = self.target.feed(self.canvas.read(self.live, 1, num_tokens), ends, num_tokens + 1)
        return self._score(logits, draft, counts)

    def _target_lengths(self) -> list[int]:
        offsets = self.inputs.offsets
        return [length + offsets[row] for row, length in zip(self.live, self.canvas.lengths(self.live), strict=True)]

    def _score(self, logits: torch.Tensor, draft: Draft | None, counts: list[int]) -> Block:
        rows, width = len(self.live), logits.shape[1]
        raw = logits.to(device=self.device, dtype=torch.float32).view(rows, self.number, width, -1)
        unprocessed = raw.clone() if self.keep_logits else None
        scores = self.processors(raw, self.canvas.shown, self.live, self.canvas.widths(self.live))
        ids = self.new_tokens.new_zeros(rows, self.number, 0) if draft is None else draft.ids
        log_q = self.log_weights.new_zeros(ids.shape) if draft is None or draft.log_q is None else draft.log_q
        drafted = torch.tensor(counts, device=self.device)
        last = scores[torch.arange(rows, device=self.device), :, drafted]
        uniforms = self.randomness.uniforms(rows, self.number, dtype=torch.float64)
        log_p = token_log_probs(scores[:, :, :-1], ids)
        return Block(ids, counts, drafted.unsqueeze(1), log_q, log_p, last, scores, unprocessed, uniforms)

    def judge(self, block: Block, bonus: torch.Tensor) -> None:
        """Cut each particle at its first EOS, stopping criterion or the length limit; the bonus ends its block."""
        tokens, limit = functional.pad(block.ids, (0, 1)), block.drafted + 1
        places = torch.arange(tokens.shape[-1], device=self.device)
        tokens = torch.where(places == block.drafted.unsqueeze(-1), bonus.unsqueeze(-1), tokens)
        block.drawn = tokens
        ends = functional.pad(self._is_eos(tokens), (0, 1), value=True).long().argmax(dim=-1) + 1
        if self.rules.called:
            self.canvas.write(self.live, 0, self._padded(tokens, ends))
            ends = torch.minimum(ends, self._called(tokens, block.counts, self.finished))
        block.kept = torch.minimum(ends, limit).masked_fill(self.finished, 0)
        block.ended = (ends <= limit) | self.finished
        block.tokens = self._padded(tokens, block.kept)
        block.collapsed = block.died = torch.zeros_like(block.kept[:, 0])

    def open_prompts(self, block: Block) -> torch.Tensor:
        """Which prompts go on after the block, (live,) bool."""
        generated = [
            self.canvas.generated[row] + count + 1 for row, count in zip(self.live, block.counts, strict=True)
        ]
        room = torch.tensor([self.rules.room > length for length in generated], device=self.device)
        return room & ~block.ended.all(dim=-1)

    def _is_eos(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.unsqueeze(-1) == self.eos).any(dim=-1)

    def _padded(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[-1], device=self.device)
        return tokens.masked_fill(places >= kept.unsqueeze(-1), self.canvas.pad)

    def _called(self, tokens: torch.Tensor, counts: list[int], closed: torch.Tensor) -> torch.Tensor:
        """How many of the `tokens` each particle keeps by the caller's own criteria, (live, N), one more than there
        are if they do not end it; those `closed` are not asked.

        They run on the host, one token after the other, as plain `generate` calls them.
        """
        rows, skip = tokens.tolist(), closed.tolist()
        news, places, widths = [], [], []
        copies, batch = self.copies, self.canvas.shown.shape[0]
        for i, (row, width) in enumerate(zip(self.live, self.canvas.widths(self.live), strict=True)):
            for n in range(self.number):
                news.append([] if skip[i][n] else rows[i][n][: counts[i] + 1])
                places.append((n // copies * batch + row) * copies + n % copies)
                widths.append(width)
        ends = self.rules.cut(
            news, places, widths, lambda at: in_blocks(self.canvas.shown[:, :, :at], copies), lambda at: None
        )
        past = tokens.shape[-1] + 1
        return torch.tensor([past if end is None else end for end in ends], device=self.device).view(closed.shape)

    def revive(self, block: Block, log_weights: torch.Tensor) -> torch.Tensor:
        """Where every weight of a prompt vanished, drop its block: each open particle gets one token, drawn from its
        own first target row, and keeps the weight of before.

        Args:
            log_weights: (live, N), with the block's increments.

        Returns:
            (live, N), those to go on with.
        """
        gone = log_weights == -torch.inf
        block.died = (gone & (self.log_weights > -torch.inf)).sum(dim=-1)
        block.collapsed = gone.all(dim=-1)
        dropped = block.collapsed.unsqueeze(-1)
        law, single = block.scores[:, :, 0], (~self.finished).long()
        token, _ = draw(law, block.uniforms, self.power)
        tokens = functional.pad(token.unsqueeze(-1), (0, block.ids.shape[-1]))
        block.tokens = torch.where(dropped.unsqueeze(-1), self._padded(tokens, single), block.tokens)
        block.kept = torch.where(dropped, single, block.kept)
        block.ended = torch.where(dropped, self.finished | self._is_eos(token), block.ended)
        self.log_evidence = self.log_evidence.masked_fill(block.collapsed, -torch.inf)
        lawless = (law.amax(dim=-1) == -torch.inf) & ~self.finished
        block.log_weights = torch.where(dropped, self.log_weights.masked_fill(lawless, -torch.inf), log_weights)
        return block.log_weights

    def _judge_revived(self, block: Block) -> list[list[int]]:
        """Ask the caller's criteria about the tokens of dropped blocks too; who is finished then, (live, N)."""
        closed = self.finished | ~block.collapsed.unsqueeze(-1)
        self.finished = self.finished | (self._called(block.tokens[:, :, :1], [0] * len(self.live), closed) <= 1)
        return read_on_host(self.finished.long())

    def _broken(self, block: Block) -> torch.Tensor:
        """Bits of the models that gave no law where one was needed."""
        limit = torch.minimum(block.kept, block.drafted).unsqueeze(-1)
        counted = torch.arange(block.ids.shape[-1], device=self.device) < limit
        draft = (block.log_q.isnan() & counted).any()
        target = (block.log_p.isnan() & ~block.log_q.isnan() & counted).any()
        at_end = (block.last.isnan().any(dim=-1) & (block.kept > block.drafted)).any()
        nothing_left = (self.log_weights == -torch.inf).all(dim=-1).any()
        return (target | at_end | nothing_left).long() + 2 * draft.long()


def _every(request: Request, copies: int) -> dict[str, Any]:
    """The model's keyword arguments with one row a prompt, of the `copies` that `generate` made."""
    rows = len(request.input_ids)
    return {
        name: value[::copies] if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows else value
        for name, value in request.model_kwargs.items()
    }
