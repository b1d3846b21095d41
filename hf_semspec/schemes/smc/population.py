"""The state of one call of `smc`, from prefill to output: particles are moved with their caches, and a prompt whose
particles are all finished leaves the batch."""

import time
from typing import Any

import torch

from ...common.fields import SAMPLING_SETTINGS
from ...common.warn_once import warn_once
from ...engine.outputs import DecodingStats
from ...engine.request import Request
from ...engine.rounds import check_laws, describe_model, read_on_host, warn_of_low_acceptance
from ...engine.stopping import SettledStream
from .ancestry import Lineage, Returns, Round
from .blocks import Block, Particles
from .recorder import ParticleRecorder
from .weights import draw, log_mean_weight, log_normaliser, select, shared_prefix

UNEVEN_ROUNDS, UNEVEN_SHARE = 5, 0.1
Resampling = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Population(Particles):
    """One call, from prefill to output."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        config = request.generation_config
        wanted = bool(config.return_dict_in_generate)
        self.keep_cache = (wanted and config.use_cache is not False) or self.inputs.fills_cache
        self.stream = SettledStream(request.streamer, self.canvas.prompt_width)
        self.lineage = Lineage(len(self.live), self.number)
        self.returns = Returns(self.log_weights.clone(), self.log_evidence.clone())
        self.stats = DecodingStats(request.scheme.name)
        self.stats.sampling = {name: getattr(config, name, None) for name in SAMPLING_SETTINGS}
        self.trace = ParticleRecorder(len(self.live)) if request.trace else None

    def prefill(self) -> None:
        """Read every prompt once, expand it to its particles, and draw the first token x0 from the target.

        With α = 1 the particles share it and it carries no weight; else each draws its own from p^α, whose normaliser
        starts the log-evidence.
        """
        lengths = self._target_lengths()
        back = max(length - cached for length, cached in zip(lengths, self.inputs.cached, strict=True))
        logits = self.target.feed(self.canvas.read(self.live, back, 0)[:: self.number], lengths, keep=1)
        if self.number > 1:
            self.target.cache.select([row for row in self.live for _ in range(self.number)])
            logits = logits.repeat_interleave(self.number, dim=0)
        block = self._score(logits, None, [0] * len(self.live))
        log_normalisers = log_normaliser(block.last, self.power)
        self.log_evidence = log_normalisers[:, 0]
        self.log_weights = self.log_weights.masked_fill(log_normalisers == -torch.inf, -torch.inf)
        shared = 1 if self.power == 1 else self.number
        first, _ = draw(block.last[:, :shared], block.uniforms[:, :shared], self.power)
        self.judge(block, first.expand(-1, self.number))
        self.commit(block)

    def commit(self, block: Block, resampling: Resampling | None = None) -> None:
        """Append the block to every particle, move the particles to where they were resampled, and let prompts leave
        whose particles are all finished."""
        ancestors = torch.arange(self.number, device=self.device).expand_as(block.kept)
        ess, resampled = None, torch.zeros_like(block.collapsed)
        if resampling is not None:
            ancestors, self.log_weights, self.log_evidence, ess, resampled = resampling
        self.canvas.write(self.live, 0, block.tokens)
        self.new_tokens = (self.new_tokens + block.kept).gather(1, ancestors)
        self.finished = block.ended.gather(1, ancestors)
        flags = (self._broken(block), block.collapsed, resampled, block.died, self._settled(block, ancestors))
        numbers = torch.stack([flag.long().expand(len(self.live)) for flag in flags], dim=1)
        rows = read_on_host(torch.cat((numbers, ancestors, self.new_tokens, self.finished.long()), dim=1))
        check_laws(rows[0][0], self.request)
        collapsed = [bool(row[1]) for row in rows]
        n = self.number
        sources, lengths = [row[5 : 5 + n] for row in rows], [row[5 + n : 5 + 2 * n] for row in rows]
        finished = [row[5 + 2 * n :] for row in rows]
        if any(collapsed) and self.rules.called:
            finished = self._judge_revived(block)
        entry = Round(
            live=list(self.live),
            starts=[self.canvas.generated[row] for row in self.live],
            drafted=block.counts,
            committed=[1 if gone else count + 1 for gone, count in zip(collapsed, block.counts, strict=True)],
            collapsed=collapsed,
            ancestors=sources,
            ess=ess,
            scores=block.scores if self.keep_scores else None,
            logits=block.logits,
        )
        self.lineage.rounds.append(entry)
        if self.trace is not None:
            moved = [bool(row[2]) for row in rows]
            self.trace.block(block, entry.live, entry.starts, collapsed, moved, sources, ess)
        self._copy(sources, block.ids.shape[-1])
        for i, row in enumerate(self.live):
            self.canvas.generated[row] += entry.committed[i]
            self.returns.lengths[row] = lengths[i]
        self.stats.collapses += sum(collapsed)
        self.stats.resamplings += sum(row[2] for row in rows)
        self.stats.dead_particles += sum(row[3] for row in rows)
        self.drafter.commit(self.canvas.lengths(self.live))
        self._retire(finished, [min(row[4], *own) for row, own in zip(rows, lengths, strict=True)])

    def _settled(self, block: Block, ancestors: torch.Tensor) -> torch.Tensor:
        """New tokens that all particles of a prompt share once they are moved, (live,); only for a streamer."""
        if self.stream.streamer is None:
            return torch.zeros_like(block.collapsed)
        width = max(self.canvas.widths(self.live)) + block.tokens.shape[-1]
        texts = self.canvas.shown[self.live, :, self.canvas.prompt_width : width]
        return shared_prefix(texts.gather(1, ancestors.unsqueeze(-1).expand_as(texts)))

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
        offsets, lengths = self.inputs.offsets, self.canvas.lengths(self.live)
        spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for i, source, slot in moves:
            prompt, offset, first = self.canvas.prompt_lengths[self.live[i]], offsets[self.live[i]], i * self.number
            for model, start, end in (
                (0, offset + prompt, offset + lengths[i] + num_drafted),
                (1, prompt, self.drafter.filled[i]),
            ):
                spans.setdefault((model, start, end), []).append((first + source, first + slot))
        caches = self.target.cache, self.drafter.decoder.cache
        for (model, start, end), pairs in spans.items():
            caches[model].copy_rows([source for source, _ in pairs], [row for _, row in pairs], start, end)

    def _retire(self, finished: list[list[int]], settled: list[int]) -> None:
        """Stream what is settled; prompts whose particles are all finished leave both models."""
        generated = self.canvas.generated
        leaving = [i for i, row in enumerate(self.live) if all(finished[i]) or generated[row] == self.rules.room]
        staying = [i for i in range(len(self.live)) if i not in leaving]
        if leaving:
            self._select(leaving)
            if self.keep_cache:
                self._keep_states(leaving, bool(staying))
        if self.stream.streamer is not None and staying:
            width = self.canvas.prompt_width + min(settled[i] for i in staying)
            self.stream.advance(self.returns.rows(self.canvas, self.copies), width)
        if not leaving:
            return
        self.live = [self.live[i] for i in staying]
        if staying:
            index = torch.tensor(staying, device=self.device)
            self.log_weights, self.log_evidence = self.log_weights[index], self.log_evidence[index]
            self.finished, self.new_tokens = self.finished[index], self.new_tokens[index]
            self.target.cache.select([i * self.number + n for i in staying for n in range(self.number)])
            self.drafter.select(staying)

    def _select(self, leaving: list[int]) -> None:
        """Choose what is returned of the prompts that leave."""
        index = torch.tensor(leaving, device=self.device)
        weights = self.log_weights[index]
        uniforms = self.randomness.uniforms(len(leaving), 1 + self.copies)
        chosen = read_on_host(select(weights, self.copies, self.request.scheme.select, uniforms))
        evidence = self.log_evidence[index] + log_mean_weight(weights)
        self.returns.put([self.live[i] for i in leaving], chosen, weights, evidence)

    def _keep_states(self, leaving: list[int], others: bool) -> None:
        """Copy out what the returned cache needs of the rows to be returned.

        In a batch a shorter row's last token is in plain `generate`'s cache too, so it is fed once.
        """
        offsets, lengths = self.inputs.offsets, self.returns.lengths
        ends = [
            offsets[row] + self.canvas.prompt_lengths[row] + length for row in self.live for length in lengths[row]
        ]
        fed = self.returns.ragged(others)
        if fed:
            self.target.feed(self.canvas.last_tokens(self.live, self.new_tokens).view(-1, 1), ends, keep=1)
        for i in leaving:
            row = self.live[i]
            for slot in self.returns.slots[row]:
                at = i * self.number + slot
                self.returns.states[row, slot] = self.target.cache.rows(at, ends[at] - (not fed))

    def output(self) -> tuple[Any, DecodingStats]:
        """What `generate` returns (the ids, or a `SemSpecOutput` if `return_dict_in_generate`), and the statistics."""
        stats, target, draft = self.stats, self.target, self.drafter.decoder
        self.returns.count(stats, self.lineage, self.canvas, self.drafter.own_vocabulary)
        output = self.returns.build(
            self.request, self.lineage, self.canvas, self.inputs, self.keep_cache, (self.keep_scores, self.keep_logits)
        )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.stream.advance(sequences, sequences.shape[1])
        self.stream.end()
        stats.target_forwards, stats.target_tokens = target.forwards, target.tokens
        stats.draft_forwards, stats.draft_tokens = draft.forwards, draft.tokens
        stats.target_seconds, stats.draft_seconds = target.seconds, draft.seconds
        stats.total_seconds = time.perf_counter() - self.began
        warn_of_low_acceptance(stats, self.request)
        self._warn_if_uneven()
        if not isinstance(output, torch.Tensor):
            output.stats = stats
            if self.trace is not None:
                returns, texts = self.returns, self.inputs.texts
                output.trace = self.trace.finish(self.request.settings, texts, returns.chosen, returns.log_weights)
        return output, stats

    def _warn_if_uneven(self) -> None:
        rounds = sum(entry.ess is not None for entry in self.lineage.rounds)
        spare = self.stats.mean_ess - 1
        if self.number > 1 and rounds >= UNEVEN_ROUNDS and spare < UNEVEN_SHARE * (self.number - 1):
            target, draft = (describe_model(model) for model in (self.request.model, self.request.draft))
            warn_once(
                f"of {self.number} particles hardly more than one kept its weight (stats.mean_ess): {draft} is too "
                f"far from {target} for blocks of {self.request.scheme.num_draft_tokens} tokens, and the output is "
                "far from the target's law; draft fewer tokens, take a closer draft, or use the scheme lossless"
            )
