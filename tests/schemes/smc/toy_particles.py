"""Every run of a small population, enumerated: the laws of `tests.toy`, the mathematics of `smc.weights`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_semspec.schemes.smc import weights as particles
from tests.reference import normalised
from tests.schemes.smc import reference
from tests.toy import Prefix, Toy

EOS = 0
LOG_EMPTY = -math.inf


@dataclass(frozen=True)
class State:
    """One way a run can have gone so far."""

    weight: float
    texts: tuple[Prefix, ...]
    log_w: tuple[float, ...]
    log_z: float


@dataclass
class Population:
    """What to enumerate: `rounds` blocks of γ drafted tokens and a bonus, for `number` particles."""

    toy: Toy
    number: int
    gamma: int = 1
    rounds: int = 2
    threshold: float = 0.5
    method: str = "systematic"
    power: float = 1.0
    increments: Callable[..., Tensor] = particles.log_increments

    @property
    def room(self) -> int:
        return 1 + self.rounds * (self.gamma + 1)

    def finished(self, text: Prefix) -> bool:
        return text[-1] == EOS or len(text) == self.room

    def powered(self, prefix: Prefix) -> tuple[list[float], float]:
        """p^α, normalised, and log Σ p^α."""
        weights = [w**self.power if w else 0.0 for w in self.toy.p(prefix)]
        return normalised(weights), math.log(math.fsum(weights))

    def blocks(self, text: Prefix) -> Iterator[tuple[float, Prefix, list[float], list[float], float]]:
        """Every block of one particle: chance, tokens, log p, log q (nan past its end), weight of the bonus."""

        def walk(chance: float, new: Prefix, log_p: list[float], log_q: list[float]) -> Iterator[Any]:
            if self.finished(text + new):
                past = [math.nan] * (self.gamma - len(log_p))
                yield chance, new, log_p + past, log_q + past, math.nan
                return
            if len(new) == self.gamma:
                law, normaliser = self.powered(text + new)
                for b, w in enumerate(law):
                    if w:
                        yield chance * w, (*new, b), log_p, log_q, normaliser
                return
            p, q = self.toy.p(text + new), self.toy.q(text + new)
            for d in range(self.toy.vocab):
                if q[d]:
                    log = math.log(p[d]) if p[d] else LOG_EMPTY
                    yield from walk(chance * q[d], (*new, d), [*log_p, log], [*log_q, math.log(q[d])])

        return walk(1.0, (), [], [])

    def start(self) -> Iterator[State]:
        if self.power == 1:
            for x, w in enumerate(self.toy.p(())):
                if w:
                    yield State(w, ((x,),) * self.number, (0.0,) * self.number, 0.0)
            return
        law, normaliser = self.powered(())
        for firsts in itertools.product([x for x, w in enumerate(law) if w], repeat=self.number):
            yield State(
                math.prod(law[x] for x in firsts), tuple((x,) for x in firsts), (0.0,) * self.number, normaliser
            )

    def step(self, states: list[State]) -> list[State]:
        weights, texts, log_p, log_q, bonus, kept, before = [], [], [], [], [], [], []
        for state in states:
            for parts in itertools.product(*(list(self.blocks(text)) for text in state.texts)):
                weights.append(state.weight * math.prod(part[0] for part in parts))
                texts.append(tuple(text + part[1] for text, part in zip(state.texts, parts, strict=True)))
                log_p.append([part[2] for part in parts])
                log_q.append([part[3] for part in parts])
                bonus.append([part[4] for part in parts])
                kept.append([len(part[1]) for part in parts])
                before.append(state)
        shape = (len(weights), self.number, self.gamma)
        as_tensor = [torch.tensor(values, dtype=torch.float64) for values in (log_p, log_q, bonus)]
        increments = self.increments(
            as_tensor[0].view(shape), as_tensor[1].view(shape), as_tensor[2], torch.tensor(kept), self.power
        )
        log_w = torch.tensor([state.log_w for state in before], dtype=torch.float64) + increments
        log_z = torch.tensor([state.log_z for state in before], dtype=torch.float64)
        return list(self.resampled(weights, texts, log_w, log_z))

    def resampled(self, weights: list[float], texts: list[Any], log_w: Tensor, log_z: Tensor) -> Iterator[State]:
        places, chances, uniforms = [], [], []
        for i, row in enumerate(log_w.tolist()):
            if max(row) == LOG_EMPTY:
                continue  # a collapse: the evidence of such a run is 0
            for chance, fallen in fallings(reference.share(row), self.method):
                places.append(i)
                chances.append(chance)
                uniforms.append(fallen)
        ancestors, levelled, evidence, _, _ = particles.resample(
            log_w[places],
            log_z[places],
            self.threshold,
            self.method,
            torch.tensor(uniforms, dtype=torch.float64),
            torch.tensor([not all(map(self.finished, texts[i])) for i in places]),
        )
        for i, chance, sources, row, z in zip(
            places, chances, ancestors.tolist(), levelled.tolist(), evidence.tolist(), strict=True
        ):
            yield State(weights[i] * chance, tuple(texts[i][a] for a in sources), tuple(row), z)

    def runs(self) -> list[State]:
        states = list(self.start())
        for _ in range(self.rounds):
            done = [state for state in states if all(map(self.finished, state.texts))]
            going = [state for state in states if not all(map(self.finished, state.texts))]
            states = done + (self.step(going) if going else [])
        return states

    def evidence(self) -> float:
        """E[exp(log-evidence)]."""
        return math.fsum(
            state.weight * math.exp(state.log_z + reference.log_sum(state.log_w) - math.log(self.number))
            for state in self.runs()
        )

    def law(self) -> dict[Prefix, float]:
        """The law of the text that `select="sample"` returns."""
        law: dict[Prefix, float] = {}
        for state in self.runs():
            for text, w in zip(state.texts, reference.share(state.log_w), strict=True):
                law[text] = law.get(text, 0.0) + state.weight * w
        return law

    def target(self) -> dict[Prefix, float]:
        """p of every complete text."""
        law: dict[Prefix, float] = {}

        def walk(text: Prefix, weight: float) -> None:
            if text and self.finished(text):
                law[text] = weight
                return
            for y, w in enumerate(self.toy.p(text)):
                walk((*text, y), weight * w)

        walk((), 1.0)
        return law


def fallings(law: list[float], method: str) -> Iterator[tuple[float, list[float]]]:
    """Every way the uniforms of a resampling can fall: its chance, and uniforms that fall so."""
    number = len(law)
    _, rest, points = reference.resampling_points(law, method, [0.0] * number)
    edges = list(itertools.accumulate(rest))
    if method == "systematic":
        cuts = sorted({0.0, 1.0, *((number * edge) % 1.0 for edge in edges)})
        for low, high in itertools.pairwise(cuts):
            if high - low > 1e-12:
                yield high - low, [(low + high) / 2] * number
        return
    axes = []
    for k in range(number):
        low = k if method == "stratified" else 0
        scale = number if method == "stratified" else 1
        if method == "residual" and k >= len(points):
            axes.append([(1.0, 0.5)])
            continue
        cuts = sorted({0.0, 1.0, *(min(max(scale * edge - low, 0.0), 1.0) for edge in edges)})
        axes.append([(b - a, (a + b) / 2) for a, b in itertools.pairwise(cuts) if b - a > 1e-12])
    for parts in itertools.product(*axes):
        yield math.prod(part[0] for part in parts), [part[1] for part in parts]


def total_variation(a: dict[Prefix, float], b: dict[Prefix, float]) -> float:
    return 0.5 * math.fsum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b})
