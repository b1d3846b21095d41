"""From logits to processed scores and draws: the caller's processors with the history plain `generate` would show,
and one seeded generator a call."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process

from .prefixes import Prefixes, asks_for_text
from .ranks import share_value

# Warpers that look at the scores alone: they may be applied to all positions of a block at once.
_HISTORYLESS_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
HISTORYLESS = tuple(getattr(logits_process, name) for name in _HISTORYLESS_NAMES if hasattr(logits_process, name))

# Those that `generate` puts after the temperature.
WARPERS = tuple(kind for kind in HISTORYLESS if kind.__name__.endswith("LogitsWarper"))


# What may be wrong with a row of scores: every id is masked out, or it holds nan or +inf.
MASKED, BROKEN = 1, 2


def faults(peak: torch.Tensor) -> torch.Tensor:
    """What is wrong with rows of scores whose highest is `peak` (...): `MASKED`, `BROKEN`, or 0 where it is a law."""
    return (peak == -torch.inf).long() + BROKEN * ~(peak < torch.inf)


class CallRandomness:
    """The random numbers of one call: a generator on `device`, seeded by one draw from torch's global CPU generator.

    Under tensor parallelism every rank takes rank 0's seed, so that all make the same draws.
    """

    def __init__(self, device: torch.device) -> None:
        seed = share_value(int(torch.randint(2**63 - 1, ())))
        self.device = device
        # In float32 a cumulative sum over a vocabulary would round small probabilities away.
        self.exact = torch.float32 if device.type == "mps" else torch.float64
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self._second: torch.Generator | None = None

    @property
    def second(self) -> torch.Generator:
        """A generator derived from the call's seed that leaves the first one's sequence untouched."""
        if self._second is None:
            self._second = torch.Generator(self.device).manual_seed((self.seed * 6364136223846793005 + 1) % (2**63))
        return self._second

    def uniforms(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.device, dtype=dtype)

    def coins(self, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) of the second generator, for controls that leave the other draws as they are."""
        return torch.rand(shape, generator=self.second, device=self.device)

    def draw(self, law: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One id from each row of `law` (rows, vocabulary), probabilities that need not be normalised.

        It inverts the cumulative sum, with one number a row: a number for each id, as `torch.multinomial` takes them,
        costs many times the rest.

        Returns:
            ids (rows,) int64, and (rows,) bool, True where the row was no law (nan, or no mass): its id means nothing.
        """
        cumulative = law.cumsum(dim=-1, dtype=self.exact)
        mass = cumulative[:, -1:]
        points = self.uniforms(len(law), 1, dtype=self.exact) * mass
        ids = torch.searchsorted(cumulative, points, right=True).clamp_(max=law.shape[-1] - 1)
        return ids.squeeze(-1), ~(mass > 0).squeeze(-1)


class Processors:
    """The caller's logits processors, applied at any position of ragged blocks.

    Args:
        processors: in order, each a function of `(input_ids, scores)`.
        canvas: (batch, chains, width) token ids as plain `generate` would show them; read at call time.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self.processors = list(processors)
        self.wants_text = any(asks_for_text(processor) for processor in self.processors)

    def __call__(
        self,
        scores: torch.Tensor,
        shown: torch.Tensor,
        live: Sequence[int],
        lengths: Sequence[int],
        prefixes: Prefixes | None = None,
    ) -> torch.Tensor:
        """Process `scores` (rows, chains, positions, vocabulary), which may be overwritten.

        Args:
            shown: (batch, chains, >= longest history) ids in the caller's rows and layout.
            live: for each row of `scores`, its row in `shown`.
            lengths: for each row, the columns of `shown` that precede its first position.
            prefixes: which of these texts are real, needed where the processors `wants_text`; all by default.
        """
        if prefixes is not None:
            return prefixes.ask([(p, type(p) in HISTORYLESS) for p in self.processors], scores, shown, live, lengths)
        for processor in self.processors:
            if type(processor) in HISTORYLESS:
                flat = scores.reshape(-1, scores.shape[-1])
                scores = processor(shown[:, 0, : lengths[0]], flat).view(scores.shape)
            else:
                scores = self._with_history(processor, scores, shown, live, lengths)
        return scores

    def copies(self) -> "Processors":
        """Copies for the draft side, so that no processor sees the calls of both; one that cannot be copied and has
        passed [`stateful.check_processors`] is a function of what it is shown, and serves both."""
        copied = []
        for processor in self.processors:
            try:
                copied.append(copy.deepcopy(processor))
            except Exception:
                copied.append(processor)
        return Processors(copied)

    @staticmethod
    def _with_history(
        processor: Any, scores: torch.Tensor, shown: torch.Tensor, live: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Call `processor` once for each chain and distinct history length; only the rows at that length are read
        back."""
        batch, positions = shown.shape[0], scores.shape[2]
        result = torch.empty_like(scores)
        present = sorted({length + t for length in lengths for t in range(positions)})
        together = len(live) == batch and len(set(lengths)) == 1
        for chain in range(scores.shape[1]):
            for length in present:
                history = shown[:, chain, :length].clone()  # the callable may keep it
                if together:
                    position = length - lengths[0]
                    result[:, chain, position] = processor(history, scores[:, chain, position].clone())
                    continue
                at = [i for i, own in enumerate(lengths) if 0 <= length - own < positions]
                where = (at, chain, [length - lengths[i] for i in at])
                full = scores.new_zeros((batch, scores.shape[-1]))
                full[[live[i] for i in at]] = scores[where]
                result[where] = processor(history, full)[[live[i] for i in at]].to(result.dtype)
        return result


class BlockProcessors(Processors):
    """Processors that are shown a population in blocks of the rows that `generate` prepared for them.

    Of N particles of each of B prompts, particle c·k + i of prompt b stands in row b·k + i of block c; the last block
    is filled up with the last particle.

    Args:
        processors: as [`Processors`].
        rows (`int`): k, the rows that `generate` prepared for each prompt, `num_return_sequences`.
    """

    def __init__(self, processors: Sequence[Any], rows: int) -> None:
        super().__init__(processors)
        self.rows = rows

    def __call__(
        self,
        scores: torch.Tensor,
        shown: torch.Tensor,
        live: Sequence[int],
        lengths: Sequence[int],
        prefixes: Prefixes | None = None,
    ) -> torch.Tensor:
        """Process `scores` (prompts, particles, positions, vocabulary); see [`Processors`]."""
        if self.rows == 1 or all(type(processor) in HISTORYLESS for processor in self.processors):
            return super().__call__(scores, shown, live, lengths, prefixes)
        k, particles = self.rows, scores.shape[1]
        processed = super().__call__(
            in_blocks(scores, k),
            in_blocks(shown, k),
            [row * k + i for row in live for i in range(k)],
            [length for length in lengths for _ in range(k)],
            None if prefixes is None else prefixes.in_blocks(k, in_blocks(prefixes.ids, k)),
        )
        return from_blocks(processed, k)[:, :particles]


def in_blocks(values: torch.Tensor, rows: int) -> torch.Tensor:
    """(prompts, N, ...) as (prompts * rows, ⌈N / rows⌉, ...): see [`BlockProcessors`]."""
    prompts, particles = values.shape[:2]
    blocks = -(-particles // rows)
    index = torch.arange(blocks * rows, device=values.device).clamp(max=particles - 1)
    split = values[:, index].view(prompts, blocks, rows, *values.shape[2:])
    return split.transpose(1, 2).reshape(prompts * rows, blocks, *values.shape[2:])


def from_blocks(values: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of [`in_blocks`], the filling included: (prompts, ⌈N / rows⌉ * rows, ...)."""
    split = values.reshape(-1, rows, *values.shape[1:]).transpose(1, 2)  # (prompts, blocks, rows, ...)
    return split.flatten(1, 2)


def with_temperature(processors: Sequence[Any], temperature: float | None) -> list[Any]:
    """`processors` with this temperature in place of their own; as they are if it is `None`."""
    if temperature is None:
        return list(processors)
    others = [p for p in processors if type(p) is not logits_process.TemperatureLogitsWarper]
    place = next((i for i, p in enumerate(others) if type(p) in WARPERS), len(others))
    return [*others[:place], logits_process.TemperatureLogitsWarper(temperature), *others[place:]]
