"""Where every particle came from: the rounds of a call, and what a returned particle shows of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...engine.cache import RowStates
from ...engine.outputs import DecodingStats, RowStats, SemSpecOutput
from ...engine.results import Columns, ReturnedRows
from ...engine.row_states import at_most
from ...engine.tokens import Canvas

Chosen = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Round:
    """What one target forward committed.

    Args:
        live: the prompts that took part.
        starts: for each, its new tokens before the round.
        drafted: for each, γ; 0 where only one token was drawn from the target.
        committed: for each, the tokens that its open particles gained.
        collapsed, resampled: for each, whether its block was dropped, and whether its particles were resampled.
        ancestors: for each, the slot each slot was copied from at the end of the round.
        ess: (live,) float64, before resampling; `None` for the first token, which carries no weight.
        scores, logits: (live, N, γ+1, vocabulary) by the slots of before the copying; `None` if not wanted.
    """

    live: list[int]
    starts: list[int]
    drafted: list[int]
    committed: list[int]
    collapsed: list[bool]
    resampled: list[bool]
    ancestors: list[list[int]]
    ess: torch.Tensor | None
    scores: torch.Tensor | None
    logits: torch.Tensor | None


class Lineage:
    """The rounds of a call of `prompts` prompts with `particles` particles each."""

    def __init__(self, prompts: int, particles: int) -> None:
        self.prompts = prompts
        self.particles = particles
        self.rounds: list[Round] = []

    def add(self, entry: Round) -> None:
        """Take the round that was just committed."""
        self.rounds.append(entry)

    def part(self, prompt: int) -> Iterator[tuple[int, int]]:
        """The rounds that `prompt` took part in, last first: number of the round, row in it."""
        for number in reversed(range(len(self.rounds))):
            if prompt in self.rounds[number].live:
                yield number, self.rounds[number].live.index(prompt)

    def trace(self, prompt: int, slot: int) -> Iterator[tuple[Round, int, int]]:
        """The rounds of what stands in `slot` of `prompt` at the end, last first: round, row in it, slot in it."""
        for number, row in self.part(prompt):
            entry = self.rounds[number]
            slot = entry.ancestors[row][slot]
            yield entry, row, slot

    def columns(self, name: str, wanted: bool, chosen: Chosen) -> Columns:
        """`scores` or `logits` of the particles `chosen`, each (prompt, slot, new tokens), one row each; empty unless
        `wanted`."""
        columns = Columns(len(chosen), wanted)
        for place, (prompt, slot, length) in enumerate(chosen):
            for entry, row, at in self.trace(prompt, slot) if wanted else ():
                count = min(entry.committed[row], length - entry.starts[row])
                if count > 0:
                    columns.put(getattr(entry, name)[row, at].unsqueeze(0), [place], [entry.starts[row]], [count])
        return columns

    def row_stats(self, prompt: int, slot: int, length: int) -> RowStats:
        """Counts of one particle with `length` new tokens: every drafted token is accepted, except that a collapse
        rejects a block at its first token."""
        stats = RowStats(emitted=length)
        for entry, row, _ in self.trace(prompt, slot):
            if entry.starts[row] >= length:
                continue
            drafted = entry.drafted[row]
            if drafted == 0:
                stats.plain += 1
            elif entry.collapsed[row]:
                stats.count_round(drafted, 0, "residual", 1)
            else:
                kept = min(drafted + 1, length - entry.starts[row])
                stats.count_round(drafted, drafted, "bonus", kept)
                stats.cut += drafted + 1 - kept
        return stats

    def ess(self) -> torch.Tensor:
        """(prompts, rounds) float64 on the CPU, nan after a prompt's end."""
        rounds = [entry for entry in self.rounds if entry.ess is not None]
        values = torch.full((self.prompts, len(rounds)), torch.nan, dtype=torch.float64)
        if rounds:
            flat = iter(torch.cat([entry.ess for entry in rounds if entry.ess is not None]).tolist())
            for column, entry in enumerate(rounds):
                for prompt in entry.live:
                    values[prompt, column] = next(flat)
        return values

    def ancestors(self) -> torch.Tensor:
        """(prompts, rounds, N) int64 on the CPU, the identity where nothing was copied."""
        rounds = [entry for entry in self.rounds if entry.ess is not None]
        slots = torch.arange(self.particles).repeat(self.prompts, len(rounds), 1)
        for column, entry in enumerate(rounds):
            for prompt, ancestors in zip(entry.live, entry.ancestors, strict=True):
                slots[prompt, column] = torch.tensor(ancestors)
        return slots


class Returns:
    """What a call has to return of every prompt, collected as prompts leave the batch.

    Args:
        lineage, canvas: where the particles come from, and their text.
    """

    def __init__(self, lineage: Lineage, canvas: Canvas) -> None:
        self.lineage, self.canvas = lineage, canvas
        shape, device = (lineage.prompts, lineage.particles), canvas.shown.device
        self.log_weights = torch.zeros(shape, dtype=torch.float64, device=device)
        self.log_evidence = torch.zeros(shape[:1], dtype=torch.float64, device=device)
        self.lengths = [[0] * lineage.particles for _ in range(lineage.prompts)]
        self.slots: dict[int, list[int]] = {}
        self.states: dict[tuple[int, int], RowStates] = {}
        self.stops: dict[int, int] = {}

    def stop(self, row: int, length: int) -> None:
        """The returned row `row`, counted over all prompts, ends at `length` new tokens unless it has ended before."""
        self.stops.setdefault(row, length)

    def stopped(self, prompt: int, copies: int) -> bool:
        """Whether all `copies` rows that are to be returned of `prompt` have been told to end."""
        return all(prompt * copies + i in self.stops for i in range(copies))

    def longest(self, copies: int) -> int:
        """The most new tokens of a row to be returned, once each is chosen or told to end."""
        known = dict(self.stops)
        for row, slots in self.slots.items():
            for i, slot in enumerate(slots, start=row * copies):
                known[i] = min(self.lengths[row][slot], self.stops.get(i, self.lengths[row][slot]))
        return max(known.values())

    def grow(self, prompts: list[int], lengths: list[list[int]]) -> None:
        """Take the new tokens that each particle of `prompts` has by now."""
        for prompt, own in zip(prompts, lengths, strict=True):
            self.lengths[prompt] = own

    def put(
        self, prompts: list[int], slots: list[list[int]], log_weights: torch.Tensor, log_evidence: torch.Tensor
    ) -> None:
        """Take the slots to be returned and the final weights of `prompts`."""
        self.slots.update(zip(prompts, slots, strict=True))
        self.log_weights[prompts], self.log_evidence[prompts] = log_weights, log_evidence

    def keep(self, prompt: int, slot: int, states: RowStates) -> None:
        """Take what a returned cache needs of a particle to be returned."""
        self.states[prompt, slot] = states

    @property
    def chosen(self) -> list[tuple[int, int, int]]:
        """(prompt, slot, new tokens) of every row to be returned so far, prompt by prompt; once all are chosen they
        are numbered as in `stop`."""
        rows = [(row, slot, self.lengths[row][slot]) for row in sorted(self.slots) for slot in self.slots[row]]
        return [(row, slot, min(own, self.stops.get(i, own))) for i, (row, slot, own) in enumerate(rows)]

    def places(self, copies: int) -> list[tuple[int, int]]:
        """(prompt, slot) of what stands for every row to be returned: of prompts that are open, any particle."""
        return [(row, slot) for row in range(len(self.lengths)) for slot in self.slots.get(row, [0] * copies)]

    def rows(self, copies: int, width: int) -> torch.Tensor:
        """(rows, width) columns of text as far as it is settled: of prompts that are open, any particle's."""
        places = self.places(copies)
        shown = self.canvas.shown[[row for row, _ in places], [slot for _, slot in places], :width]
        for row, length in self.stops.items():
            shown[row, self.canvas.prompt_width + length :] = self.canvas.pad
        return shown

    def count(self, stats: DecodingStats, own_vocabulary: int) -> None:
        """Fill in the figures of the returned rows; `own_vocabulary` is the draft's."""
        canvas = self.canvas
        stats.rows = [self.lineage.row_stats(*row) for row in self.chosen]
        ess = self.lineage.ess()
        if ess.numel():
            stats.mean_ess = float(ess.nanmean())
        for row, slot, length in self.chosen:
            text = canvas.shown[row, slot, canvas.prompt_width : canvas.prompt_width + length]
            stats.substituted_tokens += int((text >= own_vocabulary).sum())

    def returned(self, scores: bool, logits: bool, before: Sequence[int]) -> ReturnedRows:
        """The rows to be returned, with `scores` and `logits` if these are wanted; of each prompt the cache holds
        `before` tokens and all new ones but the last."""
        chosen, lineage = self.chosen, self.lineage
        prompts, slots, lengths = ([row[i] for row in chosen] for i in range(3))
        states = [at_most(self.states.get((row, slot), []), before[row] + length) for row, slot, length in chosen]
        columns = (lineage.columns(name, flag, chosen) for name, flag in (("scores", scores), ("logits", logits)))
        return ReturnedRows(prompts, slots, lengths, states, *columns)

    def attach(self, output: SemSpecOutput) -> None:
        """Put the particles, their weights and where they came from on `output`."""
        device, canvas, lineage = output.sequences.device, self.canvas, self.lineage
        longest = canvas.prompt_width + max(max(row) for row in self.lengths)
        output.particles = canvas.shown[:, :, :longest].to(device, copy=True)
        output.log_weights, output.log_evidence = self.log_weights.to(device), self.log_evidence.to(device)
        output.ess, output.ancestors = lineage.ess().to(device), lineage.ancestors().to(device)
        places = [row for row, _, _ in self.chosen], [slot for _, slot, _ in self.chosen]
        output.sequence_log_weights = output.log_weights[places]
