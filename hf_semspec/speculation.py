"""The state of one call of a token-level scheme: draft a block, score it with one target pass, commit what the scheme
decides."""

import time
from typing import Any

import torch
from torch.nn import functional

from .acceptance import BONUS, RESAMPLED, Acceptance
from .cache import RowStates, text_config
from .calls import Block, Request
from .canvas import Canvas
from .checks import SAMPLING_SETTINGS
from .decoder import CachedModel, compute_device
from .drafting import ChainGenerator, Draft, DraftLength
from .drafts import weight_bytes
from .inputs import read_inputs
from .notices import warn_once
from .outputs import DecodingStats, RowStats
from .results import Columns, build_cache, build_output
from .sampling import CallRandomness, Processors
from .stopping import SettledStream, StopRules

OUTCOMES = ("bonus", "residual", "resampled")
LOW_ACCEPTANCE, LOW_ACCEPTANCE_TESTED = 0.1, 20


class Speculation:
    """One call, from prefill to output. Rows that end leave the batch of both models.

    Args:
        request: the call.
        with_laws (`bool`): keep p and q of every drafted position also when greedy.
    """

    def __init__(self, request: Request, with_laws: bool = False) -> None:
        self.began = time.perf_counter()
        self.request = request
        model, config = request.model, request.generation_config
        self.device = compute_device(model)
        self.inputs = inputs = read_inputs(model, request.input_ids, request.model_kwargs, config)
        self.randomness = CallRandomness(self.device, (getattr(model, "_tp_size", None) or 1) > 1)
        self.sampling = bool(config.do_sample)
        self.with_laws = with_laws or self.sampling
        self.chains: int = request.scheme.num_chains
        batch, width = inputs.ids.shape
        self.live = list(range(batch))
        self.rules = StopRules(request.criteria, width, config.max_length)
        self.stream = SettledStream(request.streamer, width)
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.canvas = Canvas(inputs.ids, inputs.mask, self.chains, pad, min(self.rules.room, 1024) + 64)
        self.target = CachedModel(model, batch, inputs.visible.shape[1] + self.rules.room - 2)
        if inputs.cache is not None and any(inputs.cached):
            self.target.cache.adopt(inputs.cache, inputs.visible[:, : inputs.cache.get_seq_length()])
        self.processors = Processors(request.processors)
        self.drafter = ChainGenerator(
            request.draft,
            int(text_config(model).vocab_size),
            self.processors.copies(),
            self.randomness if self.sampling else None,
            DraftLength(
                request.scheme.num_draft_tokens,
                lambda: weight_bytes(request.draft) / weight_bytes(model),
            ),
            batch=batch,
            chains=self.chains,
            max_length=width + self.rules.room,
            with_laws=self.with_laws,
            device=self.device,
        )
        wanted = bool(config.return_dict_in_generate)
        self.scores = Columns(batch, wanted and bool(config.output_scores))
        self.logits = Columns(batch, wanted and bool(config.output_logits))
        self.keep_cache = (wanted and config.use_cache is not False) or inputs.fills_cache
        self.row_states: list[RowStates] = [[] for _ in range(batch)]
        self.hits: dict[int, int] = {}
        self.resampled: list[tuple[int, int]] = []
        self.stats = DecodingStats(request.scheme.name, [RowStats() for _ in range(batch)])
        self.stats.sampling = {name: getattr(config, name, None) for name in SAMPLING_SETTINGS}

    @property
    def running(self) -> bool:
        """Whether any row is still open."""
        return bool(self.live)

    def prefill(self) -> None:
        """Feed what the caller's cache lacks of the prompts and commit one plain token a row."""
        lengths = self._target_lengths()
        back = max(length - cached for length, cached in zip(lengths, self.inputs.cached, strict=True))
        logits = self.target.feed(self.canvas.read(self.live, back, 0)[:: self.chains], lengths, keep=1)
        if self.chains > 1:
            self.target.cache.select([row for row in self.live for _ in range(self.chains)])
            logits = logits.repeat_interleave(self.chains, dim=0)
        block = self._score(logits, None)
        self.commit(block, self.plain(block))

    def draft_and_score(self) -> Block:
        """γ draft forwards and one target forward over the drafted block."""
        rooms = [self.rules.room - self.canvas.generated[row] for row in self.live]
        counts = self.drafter.plan(self.live, self.canvas, rooms)
        num_tokens = max(counts)
        draft = self.drafter.propose(self.canvas, self.live, counts) if num_tokens else None
        ends = [length + num_tokens for length in self._target_lengths() for _ in range(self.chains)]
        return self._score(self.target.feed(self.canvas.read(self.live, 1, num_tokens), ends, num_tokens + 1), draft)

    def _target_lengths(self) -> list[int]:
        offsets = self.inputs.offsets
        return [length + offsets[row] for row, length in zip(self.live, self.canvas.lengths(self.live), strict=True)]

    def _score(self, logits: torch.Tensor, draft: Draft | None) -> Block:
        width = logits.shape[1]
        raw = logits.to(device=self.device, dtype=torch.float32).view(len(self.live), self.chains, width, -1)
        kept = raw.clone() if self.logits.wanted else None
        scores = self.processors(raw, self.canvas.shown, self.live, self.canvas.widths(self.live))
        peak, choices = scores.max(dim=-1)
        log_p = functional.log_softmax(scores, dim=-1) if self.with_laws else None
        uniforms = (
            self.randomness.uniforms(*scores.shape[:2], width - 1) if self.sampling and draft is not None else None
        )
        broken = ~(peak > -torch.inf).all()
        return Block(draft, scores, kept, log_p, None if self.sampling else choices, uniforms, broken)

    def plain(self, block: Block) -> Acceptance:
        """The decision for a block without drafts: one token from the target."""
        none = torch.zeros(len(self.live), dtype=torch.long, device=self.device)
        if block.choices is not None:
            return Acceptance(none, none + BONUS, None, block.choices[:, 0, 0], none)
        assert block.log_p is not None
        return Acceptance(none, none + BONUS, block.log_p[:, 0, 0].exp(), None, none)

    def commit(self, block: Block, decision: Acceptance) -> None:
        """Append what was decided, cut rows where they end, and let ended rows leave the batch."""
        accepted, outcomes, chains, tokens = self._read(block, decision)
        starts, widths = [self.canvas.generated[row] for row in self.live], self.canvas.widths(self.live)
        counts = [min(n + 1, self.rules.room - start) for n, start in zip(accepted, starts, strict=True)]
        for columns, values in ((self.scores, block.scores), (self.logits, block.logits)):
            if columns.wanted and values is not None:
                chosen = values[range(len(self.live)), chains]
                columns.put(chosen, self.live, starts, counts)
        news = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        prompt = self.canvas.prompt_width
        ends = self.rules.cut(
            news,
            self.live,
            widths,
            lambda at: self.canvas.shown[:, 0, :at].clone(),
            lambda at: self.scores.upto(at - prompt),
        )
        self._count(block.draft, accepted, outcomes)
        for i, row in enumerate(self.live):
            end = ends[i]
            kept = counts[i] if end is None or not self.rules.has_eos else end
            if end is not None or starts[i] + kept == self.rules.room:
                self.hits.setdefault(row, starts[i] + (end or kept))
            if kept <= accepted[i]:
                self._clear(row, starts[i] + kept, starts[i] + accepted[i] + 1)
            elif outcomes[i] == RESAMPLED:
                self.resampled.append((row, starts[i] + kept - 1))
            self.canvas.generated[row] += kept
            self.stats.rows[row].cut += accepted[i] + 1 - kept
            self.stats.rows[row].emitted += kept
            self.stats.substituted_tokens += sum(token >= self.drafter.own_vocabulary for token in news[i][:kept])
        self._align(chains, widths, block.scores.shape[2] - 1)
        self.drafter.commit(self.canvas.lengths(self.live))
        self._retire()

    def _read(self, block: Block, decision: Acceptance) -> tuple[list[int], list[int], list[int], list[list[int]]]:
        """The round's one host read: accepted counts, outcomes, chains and committed ids, which go onto the canvas."""
        token, broken = decision.token, block.broken
        if token is None:
            assert decision.law is not None
            token, _ = self.randomness.draw(decision.law)
        if block.draft is not None:
            broken = broken + 2 * block.draft.broken
        head = (decision.num_accepted, decision.outcome, decision.chain, broken.expand_as(token), token)
        values = torch.stack(head, dim=1)
        if block.draft is not None:
            values = torch.cat((values, block.draft.ids.flatten(1)), dim=1)
        rows = read_on_host(values)
        self._check_broken(rows[0][3])
        width = block.scores.shape[2]
        committed = []
        for accepted, _, chain, _, next_id, *drafted in rows:
            first = chain * (width - 1)
            committed.append([*drafted[first : first + accepted], next_id])
        padded = [ids + [self.canvas.pad] * (width - len(ids)) for ids in committed]
        self.canvas.write(self.live, 0, torch.tensor(padded, device=self.device).unsqueeze(1))
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], committed

    def _check_broken(self, broken: int) -> None:
        for bit, role, model in ((1, "target", self.request.model), (2, "draft", self.request.draft)):
            if broken & bit:
                raise ValueError(
                    f"the {role} model {_name(model)} gave logits without a law (nan, or every id masked out): check "
                    "its weights, its quantization and the logits processors"
                )

    def _clear(self, row: int, start: int, stop: int) -> None:
        """Forget the tokens of `row` in columns [start, stop) of new text."""
        prompt = self.canvas.prompt_width
        self.canvas.shown[row, :, prompt + start : prompt + stop] = self.canvas.pad
        self.scores.clear(row, start)
        self.logits.clear(row, start)

    def _count(self, draft: Draft | None, accepted: list[int], outcomes: list[int]) -> None:
        for i, row in enumerate(self.live):
            drafted = draft.counts[i] if draft is not None else 0
            if drafted == 0:
                self.stats.rows[row].plain += 1
                continue
            self.stats.rows[row].count_round(drafted, accepted[i], OUTCOMES[outcomes[i]])
            self.drafter.length.observe(accepted[i], accepted[i] + (outcomes[i] != BONUS))

    def _align(self, chains: list[int], widths: list[int], num_drafted: int) -> None:
        """Give every chain of a row the cache of the chain that was committed."""
        if self.chains == 1 or num_drafted == 0:
            return
        source = [i * self.chains + chain for i, chain in enumerate(chains) for _ in range(self.chains)]
        lengths = self.canvas.lengths(self.live)
        low = min(lengths) - num_drafted - 2
        index = torch.tensor(source, device=self.device)
        for cache in (self.target.cache, self.drafter.decoder.cache):
            cache.copy_rows(index, max(low, 0), cache.end)

    def _retire(self) -> None:
        """Stream what is settled; rows that ended leave both models, their states kept if the cache is to be
        returned."""
        generated = self.canvas.generated
        final = max(self.hits.values()) if len(self.hits) == len(generated) else None
        if self.rules.has_eos:
            leaving = [i for i, row in enumerate(self.live) if row in self.hits]
            open_rows = [row for row in self.live if row not in self.hits]
            settled = min((generated[row] for row in open_rows), default=max(generated))
        else:
            goal = self.rules.room if final is None else final
            leaving = [i for i, row in enumerate(self.live) if generated[row] >= goal]
            settled = min(*generated, goal)
        self.stream.advance(self.canvas.shown[:, 0], self.canvas.prompt_width + settled)
        if not leaving:
            return
        staying = [i for i in range(len(self.live)) if i not in leaving]
        if self.keep_cache:
            self._keep_states(leaving, staying)
        self.live = [self.live[i] for i in staying]
        if staying:
            self.target.cache.select([i * self.chains + chain for i in staying for chain in range(self.chains)])
            self.drafter.select(staying)

    def _keep_states(self, leaving: list[int], staying: list[int]) -> None:
        """Copy out what the returned cache needs of the rows that leave.

        In a batch a shorter row's last token is in plain `generate`'s cache too, so it is fed once.
        """
        lengths = self._target_lengths()
        shorter = any(self.canvas.generated[row] < max(self.canvas.generated) for row in self.live)
        ragged = self.rules.has_eos and (bool(staying) or shorter)
        if ragged:
            ends = [length for length in lengths for _ in range(self.chains)]
            self.target.feed(self.canvas.read(self.live, 1, 0), ends, keep=1)
        for i in leaving:
            self.row_states[self.live[i]] = self.target.cache.rows(i * self.chains, lengths[i] - (not ragged))

    def output(self) -> tuple[Any, DecodingStats]:
        """What `generate` returns (the ids, or a `SemSpecOutput` if `return_dict_in_generate`), and the statistics."""
        config, generated = self.request.generation_config, self.canvas.generated
        width = max(self.hits.values())
        for row, count in enumerate(generated):
            surplus = max(count - width, 0)
            generated[row] -= surplus
            self.stats.rows[row].cut += surplus
            self.stats.rows[row].emitted -= surplus
        sequences = self.canvas.shown[:, 0, : self.canvas.prompt_width + width].to(
            self.request.input_ids.device, copy=True
        )
        cache = None
        if self.keep_cache:
            cache = build_cache(self.request.model, self.row_states, self.inputs.visible, generated, self.inputs.cache)
        self.stream.end()
        self._close_stats()
        if not config.return_dict_in_generate:
            return sequences, self.stats
        return build_output(sequences, self.scores.upto(width), self.logits.upto(width), cache, self.stats), self.stats

    def _close_stats(self) -> None:
        stats, target, draft = self.stats, self.target, self.drafter.decoder
        stats.target_forwards, stats.target_tokens, stats.target_seconds = (
            target.forwards,
            target.tokens,
            target.seconds,
        )
        stats.draft_forwards, stats.draft_tokens, stats.draft_seconds = draft.forwards, draft.tokens, draft.seconds
        stats.total_seconds = time.perf_counter() - self.began
        if stats.tested >= LOW_ACCEPTANCE_TESTED and stats.acceptance_rate < LOW_ACCEPTANCE:
            warn_once(
                f"fewer than {LOW_ACCEPTANCE:.0%} of the tokens drafted by {_name(self.request.draft)} were accepted "
                f"by {_name(self.request.model)}: the output is right but nothing is gained; check that both were "
                "trained on the same tokenizer and chat template, and that quantization has not broken the draft"
            )


def read_on_host(values: torch.Tensor) -> list[list[int]]:
    """Bring a small integer tensor to the host. A round does this once; only the caller's own criteria may read
    more."""
    rows: list[list[int]] = values.tolist()
    return rows


def _name(model: Any) -> str:
    path = getattr(model.config, "_name_or_path", "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__
