"""Slow, literal transcriptions of the algorithms, one row at a time in plain Python: the other side of comparisons.

Laws are lists of floats. p is the target's law, q the draft's; p has one position more than the draft has tokens.
A decision is `(num_accepted, outcome, law)` when sampling and `(num_accepted, outcome, token)` when greedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

BONUS, RESIDUAL, RESAMPLED = 0, 1, 2
EMPTY = 2.0**-52

Law = list[float]
Decision = tuple[int, int, Law]
GreedyDecision = tuple[int, int, int]


def normalised(weights: Sequence[float]) -> Law:
    total = math.fsum(weights)
    return [w / total for w in weights]


def residual(p: Law, q: Law) -> Law:
    """norm(max(p - q, 0)), and p where nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return normalised(left) if math.fsum(left) > EMPTY else p


def penalised(p: Law, token: int, penalty: float) -> Law | None:
    """r = p with r[token] *= penalty, renormalised; None where r has no mass."""
    r = [w * penalty if y == token else w for y, w in enumerate(p)]
    return normalised(r) if 1 - (1 - penalty) * p[token] > EMPTY else None


def acceptance(p: float, q: float) -> float:
    """min(1, p/q)."""
    return 1.0 if p >= q else p / q


def argmax(law: Law) -> int:
    return law.index(max(law))


def chain(
    p: list[Law],
    q: list[Law],
    drafts: list[int],
    uniforms: list[float],
    valid: list[bool] | None = None,
    triggers: list[bool] | None = None,
    penalty: float = 0.0,
) -> Decision:
    """Speculative sampling of one chain, and easd where `triggers` marks the uncertain agreements."""
    for t, token in enumerate(drafts):
        if valid is not None and not valid[t]:
            return t, BONUS, p[t]
        if not uniforms[t] < acceptance(p[t][token], q[t][token]):
            return t, RESIDUAL, residual(p[t], q[t])
        if triggers is not None and triggers[t]:
            r = penalised(p[t], token, penalty)
            if r is not None:
                return t, RESAMPLED, r
    return len(drafts), BONUS, p[len(drafts)]


def greedy_chain(
    p: list[Law],
    drafts: list[int],
    valid: list[bool] | None = None,
    triggers: list[bool] | None = None,
    penalty: float = 0.0,
) -> GreedyDecision:
    for t, token in enumerate(drafts):
        if valid is not None and not valid[t]:
            return t, BONUS, argmax(p[t])
        if token != argmax(p[t]):
            return t, RESIDUAL, argmax(p[t])
        if triggers is not None and triggers[t]:
            r = penalised(p[t], token, penalty)
            if r is not None:
                return t, RESAMPLED, token if r[token] == max(r) else argmax(r)
    return len(drafts), BONUS, argmax(p[len(drafts)])


def chains(
    p: list[list[Law]],
    q: list[list[Law]],
    drafts: list[list[int]],
    uniforms: list[list[float]],
    valid: list[list[bool]] | None = None,
    triggers: list[list[bool]] | None = None,
    penalty: float = 0.0,
) -> tuple[int, int, Law, list[int]]:
    """Exact multi-draft: also returns the chains that carry the committed prefix."""
    viable = list(range(len(drafts)))
    for t in range(len(drafts[0])):
        p_t, q_t = p[viable[0]][t], q[viable[0]][t]
        tested = [i for i in viable if valid is None or valid[i][t]]
        beta, accepted = p_t, None
        for i in tested:
            token = drafts[i][t]
            if uniforms[i][t] < acceptance(beta[token], q_t[token]):
                accepted = token
                break
            beta = residual(beta, q_t)
        if not tested:
            return t, BONUS, p_t, viable
        if accepted is None:
            return t, RESIDUAL, beta, viable
        if triggers is not None and triggers[viable[0]][t]:
            r = penalised(p_t, accepted, penalty)
            if r is not None:
                return t, RESAMPLED, r, viable
        viable = [i for i in tested if drafts[i][t] == accepted]
    return len(drafts[0]), BONUS, p[viable[0]][len(drafts[0])], viable


def greedy_chains(
    p: list[list[Law]],
    drafts: list[list[int]],
    valid: list[list[bool]] | None = None,
    triggers: list[list[bool]] | None = None,
    penalty: float = 0.0,
) -> tuple[int, int, int, list[int]]:
    viable = list(range(len(drafts)))
    for t in range(len(drafts[0])):
        p_t = p[viable[0]][t]
        best = argmax(p_t)
        tested = [i for i in viable if valid is None or valid[i][t]]
        if not tested:
            return t, BONUS, best, viable
        carriers = [i for i in tested if drafts[i][t] == best]
        if not carriers:
            return t, RESIDUAL, best, viable
        if triggers is not None and triggers[viable[0]][t]:
            r = penalised(p_t, best, penalty)
            if r is not None:
                return t, RESAMPLED, best if r[best] == max(r) else argmax(r), viable
        viable = carriers
    return len(drafts[0]), BONUS, argmax(p[viable[0]][len(drafts[0])]), viable


def block_survival(p: list[Law], q: list[Law], drafts: list[int]) -> list[float]:
    """p_0..p_γ of block verification (arXiv 2403.10444)."""
    survival = [1.0]
    for t, token in enumerate(drafts):
        survival.append(min(1.0, survival[-1] * p[t][token] / q[t][token]))
    return survival


def block_excess(p: Law, q: Law, scale: float) -> Law:
    """max(scale·p - q, 0), not normalised."""
    return [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def block_chances(p: list[Law], q: list[Law], drafts: list[int]) -> list[float]:
    """h_1..h_γ, 0/0 counting as 0."""
    survival, gamma = block_survival(p, q, drafts), len(drafts)
    chances = []
    for i in range(1, gamma):
        left = math.fsum(block_excess(p[i], q[i], survival[i]))
        chances.append(left / (left + 1 - survival[i]) if left > 0 else 0.0)
    return [*chances, survival[gamma]]


def block_chain(p: list[Law], q: list[Law], drafts: list[int], uniforms: list[float]) -> Decision:
    """Block verification of one chain."""
    gamma, chances = len(drafts), block_chances(p, q, drafts)
    kept = max((i + 1 for i in range(gamma) if uniforms[i] < chances[i]), default=0)
    if kept == gamma:
        return gamma, BONUS, p[gamma]
    left = block_excess(p[kept], q[kept], block_survival(p, q, drafts)[kept])
    return kept, RESIDUAL, normalised(left) if math.fsum(left) > EMPTY else p[kept]


def block_branches(p: list[list[Law]], q: list[list[Law]], drafts: list[list[int]]) -> Iterator[Branch]:
    """As [`branches`], for block verification of one chain: for each i, what keeps i tokens."""
    chances = block_chances(p[0], q[0], drafts[0])
    weight, uniforms = 1.0, [0.5] * len(chances)
    for i in range(len(chances) - 1, -1, -1):
        if chances[i] > 0:
            yield weight * chances[i], [[*uniforms[:i], chances[i] * (1 - 1e-12), *uniforms[i + 1 :]]]
        weight *= 1 - chances[i]
        uniforms[i] = min(chances[i] * (1 + 1e-12), 1.0)
        if weight == 0:
            return
    yield weight, [uniforms]


Branch = tuple[float, list[list[float]]]


def branches(p: list[list[Law]], q: list[list[Law]], drafts: list[list[int]]) -> Iterator[Branch]:
    """Every way the uniforms can fall for one set of drafted chains: its probability, and uniforms beside the ratios.

    Summing a decision over the branches, weighted, integrates it over the uniforms exactly, provided that the decision
    changes at the ratios and nowhere else.
    """
    gamma = len(drafts[0])

    def walk(
        t: int, viable: list[int], k: int, beta: Law, weight: float, uniforms: list[list[float]]
    ) -> Iterator[Branch]:
        if t == gamma or k == len(viable):
            yield weight, uniforms
            return
        i = viable[k]
        q_t, token = q[i][t], drafts[i][t]
        a = acceptance(beta[token], q_t[token])
        if a > 0:
            carriers = [j for j in viable if drafts[j][t] == token]
            below = _replaced(uniforms, i, t, a * (1 - 1e-12))
            yield from walk(t + 1, carriers, 0, p[i][t + 1], weight * a, below)
        if a < 1:
            above = _replaced(uniforms, i, t, a * (1 + 1e-12))
            yield from walk(t, viable, k + 1, residual(beta, q_t), weight * (1 - a), above)

    everyone = list(range(len(drafts)))
    yield from walk(0, everyone, 0, p[0][0], 1.0, [[0.5] * gamma for _ in everyone])


def _replaced(uniforms: list[list[float]], i: int, t: int, value: float) -> list[list[float]]:
    new = [list(row) for row in uniforms]
    new[i][t] = value
    return new


def entropy(law: Law) -> float:
    """Shannon entropy in nats; 0 log 0 = 0."""
    return -math.fsum(w * math.log(w) for w in law if w > 0)


def top(law: Law, n: int) -> set[int]:
    """TopN over the ids that have mass."""
    ids = [y for y, w in enumerate(law) if w > 0]
    return set(sorted(ids, key=lambda y: -law[y])[:n])


def overlap(p: Law, q: Law, n: int) -> float:
    """|TopN(p) ∩ TopN(q)| / min(N, |supp p|, |supp q|)."""
    supports = [sum(w > 0 for w in law) for law in (p, q)]
    return len(top(p, n) & top(q, n)) / min(n, *supports)


def uncertain_agreement(p: Law, q: Law, tau_p: float, tau_q: float, rho: float, n: int) -> bool:
    """The trigger of easd: both entropies high, the two top-N sets overlapping."""
    unc = entropy(q) >= tau_q and entropy(p) >= tau_p
    agr = overlap(p, q, n) >= rho
    return unc and agr
