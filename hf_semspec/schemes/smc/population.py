"""The particles of one call of `smc`, from prefill to output.

The N particles of a prompt are N chains of its row: they advance in step, whatever they hold. A finished one keeps its
slot and its weight, and its tokens past its end are padding that counts for nothing. Particles are moved with their
caches, and a prompt whose particles are all finished leaves the batch.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...common.warn_once import warn_once
from ...engine.call import CallState
from ...engine.gamma import FixedLength
from ...engine.misfits import check_laws, describe_model
from ...engine.outputs import DecodingStats
from ...engine.processors import BlockProcessors, with_temperature
from ...engine.request import Block, Request
from ...engine.rounds import Speculation, read_columns
from .ancestry import Lineage, Returns, Round
from .drafts import ParticleGenerator
from .ends import Ends, Judged, Scored
from .recorder import ParticleRecorder
from .weights import Resampling, draw, log_mean_weight, log_normaliser, select, shared_prefix

UNEVEN_ROUNDS, UNEVEN_SHARE = 5, 0.1


class Found(NamedTuple):
    """What a round reads on the host, one entry a live prompt.

    Args:
        broken: bits of the models that gave no law, the same for all.
        collapsed, resampled: whether the block was dropped, and whether particles were moved.
        died: particles whose weight vanished.
        settled: new tokens that all particles share.
        ancestors, lengths, finished: of each slot where its particle comes from, its new tokens, and whether it ended.
    """

    broken: list[int]
    collapsed: list[int]
    resampled: list[int]
    died: list[int]
    settled: list[int]
    ancestors: list[list[int]]
    lengths: list[list[int]]
    finished: list[list[int]]


class Particles:
    """The particles of a call. Tensors of state have one row for each live prompt."""

    def __init__(self, request: Request) -> None:
        scheme = request.scheme
        self.request = request
        self.number: int = scheme.num_particles
        self.power: float = scheme.power
        self.copies: int = request.generation_config.num_return_sequences
        self.call = call = CallState(_one_a_prompt(request, self.copies), self.number)
        self.canvas = call.canvas
        target = call.target()
        processors = BlockProcessors(request.processors, self.copies)
        own = with_temperature(processors.copies().processors, scheme.draft_temperature)
        self.drafter = ParticleGenerator(
            request.draft,
            call.vocabulary,
            BlockProcessors(own, self.copies),
            call.randomness,
            FixedLength(scheme.num_draft_tokens),
            batch=call.batch,
            chains=self.number,
            max_length=call.longest,
            device=call.device,
            shared_start=self.power == 1,
            static=scheme.compile_draft,
        )
        self.rounds = Speculation(call, target, self.drafter, tested=False, processors=processors)
        self.ends = Ends(call, self.copies)
        self.log_weights = torch.zeros(call.batch, self.number, dtype=torch.float64, device=call.device)
        self.log_evidence = self.log_weights[:, 0]
        self.new_tokens = torch.zeros_like(self.log_weights, dtype=torch.long)
        self.finished = torch.zeros_like(self.log_weights, dtype=torch.bool)
        self.lineage = Lineage(call.batch, self.number)
        self.returns = Returns(self.lineage, self.canvas)
        self.trace = ParticleRecorder(self.lineage) if request.trace else None

    @property
    def live(self) -> list[int]:
        """The prompts that are still open."""
        return self.rounds.live

    @property
    def running(self) -> bool:
        """Whether any prompt is still open."""
        return self.rounds.running

    def prefill(self) -> None:
        """Read every prompt once, expand it to its particles, and draw the first token x0 from the target.

        With α = 1 the particles share it and it carries no weight; else each draws its own from p^α, whose normaliser
        starts the log-evidence.
        """
        scored = self._scored(self.rounds.read_prompts(self.call.inputs.cached))
        log_normalisers = log_normaliser(scored.last, self.power)
        self.log_evidence = log_normalisers[:, 0]
        self.log_weights = self.log_weights.masked_fill(log_normalisers == -torch.inf, -torch.inf)
        shared = 1 if self.power == 1 else self.number
        first, _ = draw(scored.last[:, :shared], scored.uniforms[:, :shared], self.power)
        self.commit(self.judge(scored, first.expand(-1, self.number)))

    def draft_and_score(self) -> Scored:
        """γ draft forwards and one target forward over [x0, d_1..d_γ] of all particles."""
        if self.rounds.processors.wants_text:
            idle = torch.zeros(self.call.batch, self.number, dtype=torch.bool, device=self.call.device)
            idle[self.live] = self.finished | (self.log_weights == -torch.inf)
            self.canvas.idle = idle
        return self._scored(self.rounds.draft_and_score())

    def _scored(self, block: Block) -> Scored:
        return Scored.of(block, self.call.randomness.uniforms(len(self.live), self.number, dtype=torch.float64))

    def judge(self, scored: Scored, bonus: torch.Tensor) -> Judged:
        """Cut each particle at its first EOS, stopping criterion or the length limit; the bonus ends its block."""
        return self.ends.judge(scored, bonus, self.live, self.finished, self.log_weights)

    def revive(self, judged: Judged, increments: torch.Tensor) -> Judged:
        """Weigh the particles by the block's `increments` (live, N), and drop it where no weight is left; see
        [`Ends.revive`]."""
        revived = self.ends.revive(judged, self.log_weights + increments, self.finished, self.power)
        self.log_evidence = self.log_evidence.masked_fill(revived.collapsed, -torch.inf)
        return revived

    def open_prompts(self, judged: Judged) -> torch.Tensor:
        """Which prompts go on after the block, (live,) bool."""
        generated = [
            self.canvas.generated[row] + count + 1 for row, count in zip(self.live, judged.scored.counts, strict=True)
        ]
        room = torch.tensor([self.call.rules.room > length for length in generated], device=self.call.device)
        return room & ~judged.ended.all(dim=-1)

    def commit(self, judged: Judged, resampling: Resampling | None = None) -> None:
        """Append the block to every particle, move the particles to where they were resampled, and let prompts leave
        whose particles are all finished."""
        ancestors = torch.arange(self.number, device=self.call.device).expand_as(judged.kept)
        ess, resampled = None, torch.zeros_like(judged.collapsed)
        if resampling is not None:
            ancestors, self.log_weights, self.log_evidence, ess, resampled = resampling
        self.canvas.write(self.live, 0, judged.tokens)
        self.new_tokens = (self.new_tokens + judged.kept).gather(1, ancestors)
        self.finished = judged.ended.gather(1, ancestors)
        found = self._read(judged, ancestors, resampled)
        self._book(judged, found, ess)
        self._copy(found.ancestors, judged.scored.ids.shape[-1])
        self._advance(found)
        self._retire(found)

    def _read(self, judged: Judged, ancestors: torch.Tensor, resampled: torch.Tensor) -> Found:
        """The round's one host read; the caller's own criteria read once more where a block was dropped."""
        broken, settled = judged.broken(self.log_weights), self._settled(judged, ancestors)
        flags = broken, judged.collapsed, resampled, judged.died, settled
        found = Found(*read_columns(len(self.live), *flags, ancestors, self.new_tokens, self.finished))
        check_laws(found.broken[0], self.request)
        if any(found.collapsed) and self.call.rules.early:
            self.finished = self.finished | self.ends.stops_revived(judged, self.live, self.finished)
            found = found._replace(finished=read_columns(len(self.live), self.finished)[0])
        return found

    def _settled(self, judged: Judged, ancestors: torch.Tensor) -> torch.Tensor:
        """New tokens that all particles of a prompt share once they are moved, (live,); only for a streamer and
        criteria of the caller's own."""
        if self.call.stream.streamer is None and not self.call.rules.custom:
            return torch.zeros_like(judged.collapsed)
        width = max(self.canvas.widths(self.live)) + judged.tokens.shape[-1]
        texts = self.canvas.shown[self.live, :, self.canvas.prompt_width : width]
        return shared_prefix(texts.gather(1, ancestors.unsqueeze(-1).expand_as(texts)))

    def _book(self, judged: Judged, found: Found, ess: torch.Tensor | None) -> None:
        """Keep what the round did, for the lineages, the statistics and the trace."""
        counts, block, stats = judged.scored.counts, judged.scored.block, self.call.stats
        entry = Round(
            live=list(self.live),
            starts=[self.canvas.generated[row] for row in self.live],
            drafted=counts,
            committed=[1 if gone else count + 1 for gone, count in zip(found.collapsed, counts, strict=True)],
            collapsed=[bool(gone) for gone in found.collapsed],
            resampled=[bool(moved) for moved in found.resampled],
            ancestors=found.ancestors,
            ess=ess,
            scores=block.scores if self.call.scores.wanted else None,
            logits=block.logits,
        )
        self.lineage.add(entry)
        if self.trace is not None:
            self.trace.block(judged)
        stats.collapses += sum(found.collapsed)
        stats.resamplings += sum(found.resampled)
        stats.dead_particles += sum(found.died)

    def _copy(self, sources: list[list[int]], num_drafted: int) -> None:
        """Move text and both caches of resampled particles: only slots whose ancestor is another, only past the
        prompt that all share."""
        moves = [
            (i, source, slot) for i, row in enumerate(sources) for slot, source in enumerate(row) if source != slot
        ]
        if not moves:
            return
        width = max(self.canvas.widths(self.live)) + num_drafted + 1
        rows, froms, slots = [self.live[i] for i, _, _ in moves], [m[1] for m in moves], [m[2] for m in moves]
        self.canvas.copy_chains(rows, froms, slots, width)
        lengths = self.call.lengths(self.live)
        spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for i, source, slot in moves:
            prompt, first = self.canvas.prompt_lengths[self.live[i]], i * self.number
            offset = self.call.offsets[self.live[i]]
            for model, start, end in (
                (0, offset + prompt, lengths[i] + num_drafted),
                (1, prompt, self.drafter.filled[i]),
            ):
                spans.setdefault((model, start, end), []).append((first + source, first + slot))
        caches = self.rounds.target.cache, self.drafter.decoder.cache
        for (model, start, end), pairs in spans.items():
            caches[model].copy_rows([source for source, _ in pairs], [row for _, row in pairs], start, end)

    def _advance(self, found: Found) -> None:
        for i, row in enumerate(self.live):
            self.canvas.hold(row, self.canvas.generated[row] + self.lineage.rounds[-1].committed[i])
        self.returns.grow(self.live, found.lengths)
        self.drafter.commit(self.canvas.lengths(self.live))

    def _retire(self, found: Found) -> None:
        """Stream what is settled; prompts whose particles are all finished leave both models."""
        generated, room = self.canvas.generated, self.call.rules.room
        leaving = [i for i, row in enumerate(self.live) if all(found.finished[i]) or generated[row] == room]
        if leaving:
            self._select(leaving)
        settled = {
            row: min(found.settled[i], *found.lengths[i]) for i, row in enumerate(self.live) if i not in leaving
        }
        if self.call.rules.custom:
            stopped = self._judge(settled)
            if stopped:
                self._select(stopped)
            leaving += stopped
        elif self.call.stream.streamer is not None and settled:
            width = self.canvas.prompt_width + min(settled.values())
            self.call.stream.advance(self.returns.rows(self.copies, width), width)
        if not leaving:
            return
        if self.call.keep_cache:
            self._keep_states(leaving)
        staying = [i for i in range(len(self.live)) if i not in leaving]
        self.rounds.keep(staying)
        if staying:
            index = torch.tensor(staying, device=self.call.device)
            self.log_weights, self.log_evidence = self.log_weights[index], self.log_evidence[index]
            self.finished, self.new_tokens = self.finished[index], self.new_tokens[index]

    def _judge(self, settled: dict[int, int]) -> list[int]:
        """Let the caller's own criteria judge what will be returned, as far as it is known; returns the places of the
        prompts that they have ended.

        Args:
            settled: of each prompt that is still open, the new tokens that its particles share.
        """
        returns, copies = self.returns, self.copies

        def until() -> int:
            known = [width for row, width in settled.items() if not returns.stopped(row, copies)]
            return min(known) if known else returns.longest(copies)

        places = [(row, slot, returns.lengths[row][slot]) for row, slot in returns.places(copies)]
        scores = self.lineage.columns("scores", self.call.scores.wanted, places)
        self.call.order.advance(until, lambda at: returns.rows(copies, at), scores.upto, returns.stop)
        return [i for i, row in enumerate(self.live) if row in settled and returns.stopped(row, copies)]

    def _select(self, leaving: list[int]) -> None:
        """Choose what is returned of the prompts that leave."""
        index = torch.tensor(leaving, device=self.call.device)
        weights = self.log_weights[index]
        uniforms = self.call.randomness.uniforms(len(leaving), 1 + self.copies)
        chosen = read_columns(len(leaving), select(weights, self.copies, self.request.scheme.select, uniforms))[0]
        evidence = self.log_evidence[index] + log_mean_weight(weights)
        self.returns.put([self.live[i] for i in leaving], chosen, weights, evidence)

    def _keep_states(self, leaving: list[int]) -> None:
        """Copy out what the returned cache needs of the particles to be returned."""
        for i in leaving:
            row, cache = self.live[i], self.rounds.target.cache
            before = self.call.offsets[row] + self.canvas.prompt_lengths[row] - 1
            for slot in self.returns.slots[row]:
                held = cache.rows(i * self.number + slot, before + self.returns.lengths[row][slot])
                self.returns.keep(row, slot, held)

    def output(self) -> tuple[Any, DecodingStats]:
        """What `generate` returns (the ids, or a `SemSpecOutput` with the particles), and the statistics."""
        returns, call = self.returns, self.call
        returns.count(call.stats, self.drafter.own_vocabulary)
        before = [length - 1 + offset for length, offset in zip(self.canvas.prompt_lengths, call.offsets, strict=True)]
        output, stats = self.rounds.output(returns.returned(call.scores.wanted, call.logits.wanted, before))
        self._warn_if_uneven()
        self._warn_if_weightless()
        if not isinstance(output, torch.Tensor):
            returns.attach(output)
            if self.trace is not None:
                settings, texts = self.request.settings, call.inputs.texts
                output.trace = self.trace.finish(settings, texts, returns.chosen, returns.log_weights)
        return output, stats

    def _warn_if_uneven(self) -> None:
        rounds = sum(entry.ess is not None for entry in self.lineage.rounds)
        spare = self.call.stats.mean_ess - 1
        if self.number > 1 and rounds >= UNEVEN_ROUNDS and spare < UNEVEN_SHARE * (self.number - 1):
            target, draft = (describe_model(model) for model in (self.request.model, self.request.draft))
            warn_once(
                f"of {self.number} particles hardly more than one kept its weight (stats.mean_ess): {draft} is too "
                f"far from {target} for blocks of {self.request.scheme.num_draft_tokens} tokens, and the output is "
                "far from the target's law; draft fewer tokens, take a closer draft, or use the scheme lossless",
                late=True,
            )

    def _warn_if_weightless(self) -> None:
        """One drawn by weight always has some."""
        weights = self.returns.log_weights.tolist()
        rows = [weights[prompt][slot] for prompt, slot, _ in self.returns.chosen]
        lost = sum(weight == -math.inf for weight in rows)
        if lost:
            warn_once(
                f"{lost} of the {len(rows)} rows that smc returns are of particles without weight: texts that the "
                f'target excludes (sequence_log_weights is -inf there). select="best" fills up with them where fewer '
                f"of the {self.number} particles have any: take more particles, return fewer, or draft fewer tokens"
            )


def _one_a_prompt(request: Request, copies: int) -> Request:
    """The call with one row a prompt, of the `copies` that `generate` made; particles are traced in their own way."""
    rows = len(request.input_ids)
    model_kwargs = {
        name: value[::copies] if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows else value
        for name, value in request.model_kwargs.items()
    }
    return replace(request, input_ids=request.input_ids[::copies], model_kwargs=model_kwargs, trace=False)
