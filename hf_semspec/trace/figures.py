"""Drawings of a trace as SVG: particle lineages, judged prefixes, entropies."""

import math
from collections.abc import Callable, Sequence
from html import escape

from . import Answer, Population, Row
from .text import Speller, spoken

STEP, ROW, LEFT, TOP = 26, 22, 74, 40
ESS_HEIGHT = 46
# What a page of two megabytes leaves for particles that can be visited one by one, and for what they gained.
MOST_NODES = 2500
SNIPPET = 6


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people: a true minus sign, and a word where it is not finite."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}".replace("-", "−")


def lineage(population: Population, speller: Speller, prompt: Sequence[int], threshold: float, name: str) -> str:
    """The particles of a prompt as a tree that grows to the right, with the rounds that resampled and the ESS below.

    Args:
        threshold: the `ess_threshold`, a share of N.
        name: prefix of the ids of its nodes, unique on the page.
    """
    rounds, number = population.rounds, len(population.log_weights)
    alive, chosen = _walk(population, range(number)), _walk(population, population.returned)
    width, bottom = LEFT + STEP * len(rounds) + 30, TOP + ROW * number
    height = bottom + ESS_HEIGHT + 44

    def x(column: int) -> int:
        return LEFT + STEP * column

    def y(slot: int) -> int:
        return TOP + ROW * slot

    parts = [
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="group" class="tree" '
        f'aria-label="Lineages of {number} particles over {len(rounds)} rounds; arrow keys visit them">'
    ]
    parts += [
        f'<text x="4" y="{y(slot) + 4}">{slot}{" ★" if slot in population.returned else ""}</text>'
        for slot in range(number)
    ]
    parts.append(f'<text x="4" y="{TOP - 22}">particle</text>')
    paths = _paths(population, alive, chosen)
    parts += [f'<path class="{kind}" d="{paths[kind]}"/>' for kind in ("dead", "alive", "chosen") if paths[kind]]
    every = max(math.ceil(len(rounds) / 40), 1) * (5 if len(rounds) > 12 else 1)
    for column, entry in enumerate(rounds):
        if entry.resampled:
            at = x(column) + STEP // 2
            parts.append(f'<path class="move" d="M{at} {TOP - 12}V{bottom - 8}"/>')
            parts.append(f'<text class="move" x="{at - 4}" y="{TOP - 16}">R</text>')
        if entry.collapsed:
            parts.append(f'<text class="move" x="{x(column) - 4}" y="{TOP - 16}">C</text>')
        if column % every == 0:
            parts.append(f'<text x="{x(column) - 4}" y="{height - 6}">{column}</text>')
    parts += _ess_bars(population, threshold, bottom, x)
    parts += _nodes(population, alive, chosen, speller, prompt, name, x, y)
    return "".join(parts) + "</svg>"


def _walk(population: Population, slots: Sequence[int]) -> list[set[int]]:
    """For each round, the slots whose content `slots` descend from."""
    steps, at = [], set(slots)
    for entry in reversed(population.rounds):
        at = {entry.ancestors[slot] for slot in at}
        steps.append(at)
    return steps[::-1]


def _paths(population: Population, alive: list[set[int]], chosen: list[set[int]]) -> dict[str, str]:
    """The edges by what became of them, straight runs drawn as one line."""
    paths: dict[str, list[str]] = {"dead": [], "alive": [], "chosen": []}
    number = len(population.log_weights)
    for slot in range(number):
        run = ""
        for column in range(1, len(population.rounds)):
            source = population.rounds[column - 1].ancestors[slot]
            kind = "chosen" if slot in chosen[column] else "alive" if slot in alive[column] else "dead"
            x0, x1, y0, y1 = LEFT + STEP * (column - 1), LEFT + STEP * column, TOP + ROW * source, TOP + ROW * slot
            if source != slot:
                half = (x0 + x1) // 2
                paths[kind].append(f"M{x0} {y0}C{half} {y0} {half} {y1} {x1} {y1}")
                run = ""
            elif run == kind and paths[kind][-1].startswith("H"):
                paths[kind][-1] = f"H{x1}"
            else:
                paths[kind] += [f"M{x0} {y0}", f"H{x1}"]
                run = kind
    return {kind: "".join(steps) for kind, steps in paths.items()}


def _ess_bars(population: Population, threshold: float, bottom: int, x: Callable[[int], int]) -> list[str]:
    number, base = len(population.log_weights), bottom + ESS_HEIGHT + 10
    parts = [f'<text x="4" y="{base - ESS_HEIGHT + 10}">ESS</text>', f'<text x="4" y="{base}">of {number}</text>']
    for column, entry in enumerate(population.rounds):
        if entry.ess is not None:
            tall = round(ESS_HEIGHT * entry.ess / number, 1)
            low = " low" if entry.resampled else ""
            parts.append(
                f'<rect class="ess{low}" x="{x(column) - 7}" y="{base - tall:g}" width="14" height="{tall:g}"/>'
            )
    line = round(base - ESS_HEIGHT * threshold, 1)
    end = x(len(population.rounds))
    return [*parts, f'<path class="limit" d="M{LEFT - 12} {line:g}H{end}"/>']


def _nodes(
    population: Population,
    alive: list[set[int]],
    chosen: list[set[int]],
    speller: Speller,
    prompt: Sequence[int],
    name: str,
    x: Callable[[int], int],
    y: Callable[[int], int],
) -> list[str]:
    rounds, number = population.rounds, len(population.log_weights)
    most = max(MOST_NODES // max(len(rounds), 1), 2)
    parts: list[str] = []
    for column, entry in enumerate(rounds):
        shares = _shares(entry.log_weights or [0.0] * number)
        heaviest = sorted(range(number), key=lambda slot: (slot in chosen[column], shares[slot]), reverse=True)[:most]
        copies = [entry.ancestors.count(slot) for slot in range(number)]
        for slot in sorted(heaviest):
            kind = "c" if slot in chosen[column] else "a" if slot in alive[column] else "gone"
            facts = [f"Round {column}, particle {slot}"]
            if entry.log_weights is not None and entry.ess is not None:
                facts.append(f"log weight: {figure(entry.log_weights[slot])}")
                facts.append(f"share: {100 * shares[slot]:.1f} %")
                facts.append(f"ESS: {entry.ess:.2f} of {number}")
            if entry.resampled:
                facts.append(f"resampled: {copies[slot]} {'copy' if copies[slot] == 1 else 'copies'}")
            if entry.collapsed:
                facts.append("collapsed: all weights vanished, one token each from the target")
            facts.append(f"in the returned text: {'yes' if kind == 'c' else 'no'}")
            ids = entry.tokens[slot]
            more = "…" if len(ids) > SNIPPET else ""
            facts.append(f"text: {spoken(speller.text(ids[:SNIPPET]))}{more}" if ids else "text: had ended before")
            radius = 2.2 + 5 * math.sqrt(shares[slot]) if entry.log_weights is not None else 3
            parts.append(
                f'<circle cx="{x(column)}" cy="{y(slot)}" r="{radius:.1f}" class="{kind}" '
                f'id="{name}-{column}-{slot}" tabindex="{-1 if parts else 0}" role="img" '
                f'aria-label="{escape("; ".join(facts))}"/>'
            )
    return parts


def _shares(log_weights: Sequence[float]) -> list[float]:
    peak = max(log_weights)
    weights = [math.exp(value - peak) if peak > -math.inf else 1.0 for value in log_weights]
    return [weight / sum(weights) for weight in weights]


def verdicts(answer: Answer, valid: float, accepted: float) -> str:
    """The confidence in each judged prefix of an answer over its tokens, with both thresholds and the kept part.

    Args:
        valid, accepted: the `prefix_threshold` and the `accept_threshold`.
    """
    width, height, left, top = 900, 150, 40, 16
    longest = max(answer.written, 1)

    def x(length: int) -> float:
        return round(left + (width - left - 20) * length / longest, 1)

    def y(confidence: float) -> float:
        return round(top + height * (1 - confidence), 1)

    parts = [
        f'<svg width="{width}" height="{height + top + 34}" viewBox="0 0 {width} {height + top + 34}" role="img" '
        f'aria-label="Confidence in {len(answer.prefixes)} judged prefixes of an answer of {answer.written} tokens, '
        f'of which {answer.kept} were kept; the table below has the numbers">',
        f'<path class="axis" d="M{left} {top}V{top + height}H{width - 20}"/>',
        f'<text x="10" y="{top + 5}">1.0</text><text x="10" y="{top + height + 4}">0.0</text>',
        f'<text x="{left}" y="{top + height + 28}">tokens of the answer</text>',
        f'<text x="{x(longest) - 14}" y="{top + height + 16}">{longest}</text>',
    ]
    if valid <= 1:
        parts.append(f'<path class="limit" d="M{left} {y(valid)}H{width - 20}"/>')
        parts.append(f'<text x="{left + 4}" y="{y(valid) - 4}">prefix threshold {valid:g}</text>')
    at = x(answer.kept)
    parts.append(f'<path class="keep" d="M{at} {top}V{top + height}"/>')
    side = f'x="{at - 4}" text-anchor="end"' if answer.kept > longest / 2 else f'x="{at + 4}"'
    parts.append(f'<text class="keep" {side} y="{top + height - 6}">kept {answer.kept}</text>')
    seen = [one for one in answer.prefixes if not math.isnan(one.confidence)]
    points = " ".join(f"{x(one.length)},{y(one.confidence)}" for one in seen)
    parts.append(f'<polyline class="hp" points="{points}"/>')
    for one in seen:
        full = one is answer.prefixes[-1]
        good = one.confidence >= (accepted if full else valid)
        mark = "yes" if good else "no"
        shape = f'cx="{x(one.length)}" cy="{y(one.confidence)}" r="{6 if full else 4}"'
        parts.append(f'<circle {shape} class="{mark}"/>')
    return "".join(parts) + "</svg>"


def entropies(row: Row, target: float | None, draft: float | None) -> str:
    """H(p) and H(q) at every tested position of a row, with the thresholds and the places that triggered."""
    tested = {
        event.position: event
        for event in row.events
        if event.kind in ("accepted", "rejected", "triggered") and event.position < row.length
    }
    places = sorted(tested)
    if not places or all(math.isnan(tested[place].draft_entropy) for place in places):
        return ""
    top, height, left = 20, 130, 40
    step = 12 if row.length < 120 else 6 if row.length < 400 else 3
    width = left + step * row.length + 30
    most = max([1.0, *(max(tested[at].target_entropy, tested[at].draft_entropy) for at in places)])

    def x(place: int) -> int:
        return left + step * place

    def y(value: float) -> float:
        return round(top + height * (1 - min(value / most, 1)), 1)

    parts = [
        f'<svg width="{width}" height="{top + height + 26}" viewBox="0 0 {width} {top + height + 26}" role="img" '
        f'aria-label="Entropies of target and draft at {len(places)} tested positions; the table has the numbers">',
        f'<path class="axis" d="M{left} {top}V{top + height}H{width - 10}"/>',
        f'<text x="6" y="{top + 5}">{most:.1f}</text><text x="6" y="{top + height}">0 nats</text>',
    ]
    for limit, name in ((target, "hp"), (draft, "hq")):
        if limit is not None and limit <= most:
            parts.append(f'<path class="{name}" stroke-width="1" d="M{left} {y(limit)}H{width - 10}" opacity=".55"/>')
    for name, field in (("hp", "target_entropy"), ("hq", "draft_entropy")):
        points = " ".join(f"{x(at)},{y(getattr(tested[at], field))}" for at in places)
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    for at in places:
        if tested[at].kind == "triggered":
            here = y(tested[at].target_entropy)
            parts.append(f'<path class="hit" d="M{x(at)} {here - 3}l-5 -9h10z"/>')
    every = max(10, 10 * round(60 / step / 10))
    parts += [f'<text x="{x(at)}" y="{top + height + 15}">{at}</text>' for at in range(0, row.length, every)]
    parts.append(f'<text class="hp" x="{left + 8}" y="12">━ H(p), target</text>')
    parts.append(f'<text class="hq" x="{left + 110}" y="12">┅ H(q), draft</text>')
    parts.append(f'<text x="{left + 205}" y="12">▼ trigger; flat lines: thresholds</text>')
    return "".join(parts) + "</svg>"
