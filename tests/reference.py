"""Slow, literal transcriptions of the algorithms, one row at a time in plain Python: the other side of comparisons.

Laws are lists of floats. p is the target's law, q the draft's; p has one position more than the draft has tokens.
A decision is `(num_accepted, outcome, law)` when sampling and `(num_accepted, outcome, token)` when greedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

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


def log_sum(values: Sequence[float]) -> float:
    """log Σ exp."""
    peak = max(values)
    return peak if peak == -math.inf else peak + math.log(math.fsum(math.exp(v - peak) for v in values))


def share(log_weights: Sequence[float]) -> Law:
    """W = softmax(log_w)."""
    return [math.exp(w - log_sum(log_weights)) for w in log_weights]


def effective_sample_size(log_weights: Sequence[float]) -> float:
    return 1 / math.fsum(w * w for w in share(log_weights))


def invert(point: float, law: Law) -> int:
    """The cell of `law` that holds `point` of [0, 1)."""
    last = max(i for i, w in enumerate(law) if w > 0)
    for i in range(last):
        if point < math.fsum(law[: i + 1]):
            return i
    return last


def resampling_points(law: Law, method: str, uniforms: Sequence[float]) -> tuple[list[int], Law, list[float]]:
    """Sure counts, the law that the rest is drawn from, and the points it is drawn at."""
    number = len(law)
    if method == "systematic":
        return [0] * number, law, [(uniforms[0] + k) / number for k in range(number)]
    if method == "stratified":
        return [0] * number, law, [(uniforms[k] + k) / number for k in range(number)]
    if method == "multinomial":
        return [0] * number, law, list(uniforms)
    sure = [math.floor(number * w) for w in law]
    missing = number - sum(sure)
    rest = [(number * w - s) / missing for w, s in zip(law, sure, strict=True)] if missing else law
    return sure, rest, list(uniforms[:missing])


def resampling_counts(law: Law, method: str, uniforms: Sequence[float]) -> list[int]:
    counts, rest, points = resampling_points(law, method, uniforms)
    for point in points:
        counts[invert(point, rest)] += 1
    return counts


def survivors_first(counts: Sequence[int]) -> list[int]:
    """Survivors stay in their slot; only dead slots are overwritten, in order, by the spare copies in order."""
    spare = [i for i, count in enumerate(counts) for _ in range(count - 1)]
    return [i if count else spare.pop(0) for i, count in enumerate(counts)]


Text = list[int]
SMCRound = tuple[list[list[int]], list[int], list[float]]


def smc(
    first: list[int],
    rounds: Sequence[SMCRound],
    log_p: Callable[[Text], list[float]],
    log_q: Callable[[Text], list[float]],
    *,
    room: int,
    eos: set[int],
    threshold: float = 0.5,
    method: str = "systematic",
    alpha: float = 1.0,
    log_z: float = 0.0,
) -> tuple[list[Text], list[float], float, list[float], list[list[int]]]:
    """The algorithm box for one prompt: every draw is given, every law asked for by its whole text.

    Args:
        first: x0 of each particle.
        rounds: for each, the drafted ids and the bonus of each particle, and the uniforms of the resampling.
        log_p, log_q: the laws after a text of new tokens.
        room: the most new tokens.

    Returns:
        texts, log-weights, log-evidence, ESS of each round, ancestors of each round.
    """
    number = len(first)
    texts, log_w, ess, ancestors = [[x] for x in first], [0.0] * number, [], []

    def finished(text: Text) -> bool:
        return text[-1] in eos or len(text) == room

    for drafts, bonus, uniforms in rounds:
        for n in range(number):
            if finished(texts[n]):
                continue
            for d in drafts[n]:
                log_w[n] += alpha * log_p(texts[n])[d] - log_q(texts[n])[d]
                texts[n].append(d)
                if finished(texts[n]):
                    break
            else:
                log_w[n] += log_sum([alpha * z for z in log_p(texts[n])])
                texts[n].append(bonus[n])
        ess.append(effective_sample_size(log_w))
        ancestors.append(list(range(number)))
        if number >= 2 and ess[-1] < threshold * number * (1 - 1e-6) and not all(map(finished, texts)):
            log_z += log_sum(log_w) - math.log(number)
            ancestors[-1] = survivors_first(resampling_counts(share(log_w), method, uniforms))
            texts = [list(texts[a]) for a in ancestors[-1]]
            log_w = [0.0] * number
    return texts, log_w, log_z + log_sum(log_w) - math.log(number), ess, ancestors


def packed(
    starts: Sequence[int],
    lengths: Sequence[int],
    copies: Sequence[Sequence[int]],
    sizes: Sequence[int],
    window: int | None,
) -> tuple[list[list[int]], list[list[list[bool]]]]:
    """Positions, and for each query whether it sees each key, of packed blocks [text ; copy ; copy ; ...].

    A key is one of the row's text, of a copy, or nothing that anybody but itself sees. A window counts positions.
    """
    text = max(length - start for start, length in zip(starts, lengths, strict=True))
    width, end = text + sum(sizes), max(starts) + text + sum(sizes)
    every_position, every_visible = [], []
    for start, length, prefixes in zip(starts, lengths, copies, strict=True):
        # What stands in each column: (copy or None for text, position), or None.
        tokens: list[tuple[int | None, int] | None] = [(None, n) for n in range(start)]
        tokens += [(None, n) if n < length else None for n in range(start, start + text)]
        for i, (prefix, size) in enumerate(zip(prefixes, sizes, strict=True)):
            tokens += [(i, prefix + j) if prefix >= 0 else None for j in range(size)]
        tokens += [None] * (end - len(tokens))
        visible = []
        for query in range(start, start + width):
            row = []
            for key in range(end):
                row.append(key == query or _packed_sees(tokens[query], tokens[key], prefixes, window))
            visible.append(row)
        every_visible.append(visible)
        every_position.append([token[1] if token else 0 for token in tokens[start : start + width]])
    return every_position, every_visible


def _packed_sees(
    query: tuple[int | None, int] | None,
    key: tuple[int | None, int] | None,
    prefixes: Sequence[int],
    window: int | None,
) -> bool:
    if query is None or key is None:
        return False
    (asker, at), (owner, there) = query, key
    if owner is not None and owner != asker:
        return False  # another copy
    if owner is None and asker is not None and there >= prefixes[asker]:
        return False  # text behind the prefix
    return there <= at and (window is None or at - there < window)
