"""Toy laws over a few tokens: a target and a draft as tables over prefixes, small enough to enumerate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_semspec.engine.acceptance import Acceptance
from tests.reference import Branch, Law, branches

Prefix = tuple[int, ...]
Decide = Callable[[Tensor, Tensor, Tensor, Tensor], Acceptance]
Fall = Callable[[list[list[Law]], list[list[Law]], list[list[int]]], Iterator[Branch]]
KINDS = ("free", "free", "equal", "masked target", "masked draft", "certain", "disjoint")


def log(law: Any) -> Tensor:
    """Float64 log-probabilities; 0 gives -inf."""
    return torch.tensor(law, dtype=torch.float64).log()


def assert_exact(a: Tensor, b: Any) -> None:
    """Equality to 1e-9 in float64."""
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float64), rtol=0.0, atol=1e-9)


@dataclass
class Toy:
    """p and q of every prefix, drawn when first asked for; a function of the seed and the prefix only."""

    vocab: int
    seed: int = 0
    kinds: tuple[str, ...] = ("free",)
    laws: dict[Prefix, tuple[Law, Law, bool]] = field(default_factory=dict)

    def at(self, prefix: Prefix) -> tuple[Law, Law, bool]:
        """p, q and a coin, used as the trigger."""
        if prefix not in self.laws:
            rng = torch.Generator().manual_seed(hash((self.seed, prefix)) % 2**63)
            p, q = (torch.rand(2, self.vocab, generator=rng, dtype=torch.float64) + 0.02).pow(2)
            a, b = torch.randperm(self.vocab, generator=rng)[:2].tolist() if self.vocab > 1 else (0, 0)
            kind = self.kinds[int(torch.randint(len(self.kinds), (), generator=rng))]
            if kind == "equal":
                p = q
            elif kind == "masked target":
                p[b] = p[b] if a == b else 0
            elif kind == "masked draft":
                q[b] = q[b] if a == b else 0
            elif kind == "certain":
                p[torch.arange(self.vocab) != a] = 0
            elif kind == "disjoint" and a != b:
                p, q = torch.eye(self.vocab, dtype=torch.float64)[[a, b]]
            coin = bool(torch.rand((), generator=rng) < 0.5)
            self.laws[prefix] = ((p / p.sum()).tolist(), (q / q.sum()).tolist(), coin)
        return self.laws[prefix]

    def p(self, prefix: Prefix) -> Law:
        return self.at(prefix)[0]

    def q(self, prefix: Prefix) -> Law:
        return self.at(prefix)[1]

    def along(self, tokens: list[int]) -> tuple[list[Law], list[Law], list[bool]]:
        """p before every token and after the last; q and coin before every token."""
        prefixes = [tuple(tokens[:t]) for t in range(len(tokens) + 1)]
        return (
            [self.p(x) for x in prefixes],
            [self.q(x) for x in prefixes[:-1]],
            [self.at(x)[2] for x in prefixes[:-1]],
        )

    def draw(self, gamma: int, rng: torch.Generator, agreement: float = 0.0) -> list[int]:
        """A chain of the draft; with chance `agreement` a token is the target's likeliest instead."""
        tokens: list[int] = []
        for _ in range(gamma):
            p, q, _ = self.at(tuple(tokens))
            drawn = int(torch.multinomial(torch.tensor(q, dtype=torch.float64), 1, generator=rng))
            agrees = bool(torch.rand((), generator=rng) < agreement)
            tokens.append(p.index(max(p)) if agrees else drawn)
        return tokens

    def joint(self, length: int) -> Tensor:
        """The target's law of the first `length` tokens, `(V,)*length`."""
        law = torch.zeros((self.vocab,) * length, dtype=torch.float64)
        for text in itertools.product(range(self.vocab), repeat=length):
            law[text] = math.prod(self.p(text[:t])[y] for t, y in enumerate(text))
        return law


def committed(toy: Toy, decide: Decide, num_chains: int, gamma: int, fall: Fall = branches) -> Tensor:
    """Exact law of the first γ+1 tokens when one round is decided by `decide` and p writes the rest, `(V,)*(γ+1)`.

    Enumerates every set of drafted chains and every way its uniforms can `fall`.
    """
    weights, drafts, uniforms, p, q = [], [], [], [], []
    for flat in itertools.product(range(toy.vocab), repeat=num_chains * gamma):
        chains = [list(flat[i * gamma : (i + 1) * gamma]) for i in range(num_chains)]
        along = [toy.along(chain) for chain in chains]
        p_rows, q_rows = [laws[0] for laws in along], [laws[1] for laws in along]
        drawn = math.prod(
            q_row[t][y] for q_row, chain in zip(q_rows, chains, strict=True) for t, y in enumerate(chain)
        )
        if drawn == 0:
            continue
        for weight, fallen in fall(p_rows, q_rows, chains):
            weights.append(drawn * weight)
            drafts.append(chains)
            uniforms.append(fallen)
            p.append(p_rows)
            q.append(q_rows)
    decision = decide(
        torch.tensor(p, dtype=torch.float64).log(),
        torch.tensor(q, dtype=torch.float64).log(),
        torch.tensor(drafts),
        torch.tensor(uniforms, dtype=torch.float64),
    )
    assert decision.law is not None
    after: dict[Prefix, Tensor] = {}
    for weight, chains, n, i, law in zip(
        weights, drafts, decision.num_accepted.tolist(), decision.chain.tolist(), decision.law, strict=True
    ):
        prefix = tuple(chains[i][:n])
        after[prefix] = after.get(prefix, torch.zeros(toy.vocab, dtype=torch.float64)) + weight * law
    out = torch.zeros((toy.vocab,) * (gamma + 1), dtype=torch.float64)
    for text in itertools.product(range(toy.vocab), repeat=gamma + 1):
        for n in range(gamma + 1):
            if text[:n] in after:
                rest = math.prod(toy.p(text[:t])[text[t]] for t in range(n + 1, gamma + 1))
                out[text] += after[text[:n]][text[n]] * rest
    return out


def batch(
    toy: Toy, num_chains: int, gamma: int, *, rows: int, seed: int, agreement: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_p, log_q, drafts, uniforms and triggers of `rows` draws of the draft, each row with laws of its own."""
    rng = torch.Generator().manual_seed(seed)
    p, q, drafts, coins = [], [], [], []
    for row in range(rows):
        own = Toy(toy.vocab, toy.seed * 1000 + row, toy.kinds)
        chains = [own.draw(gamma, rng, agreement) for _ in range(num_chains)]
        along = [own.along(chain) for chain in chains]
        drafts.append(chains)
        p.append([laws[0] for laws in along])
        q.append([laws[1] for laws in along])
        coins.append([laws[2] for laws in along])
    uniforms = torch.rand(rows, num_chains, gamma, generator=rng, dtype=torch.float64)
    shape = (rows, num_chains, gamma)
    return log(p), log(q).view(*shape, -1), torch.tensor(drafts).view(shape), uniforms, torch.tensor(coins).view(shape)
