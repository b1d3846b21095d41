"""From records to numbers: one row for each contender."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..schemes.table import SCHEMES
from .contenders import ASSISTED, TARGET, Contender, reference_of
from .journal import Record
from .statistics import bootstrap, mcnemar, share_interval, wilson

Outcomes = dict[int, dict[int, bool]]  # example -> seed -> right


def summarize(
    records: Sequence[Record], contenders: Sequence[Contender], temperature: float | None, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One JSON-safe row for each contender; contenders without a finished batch are left out."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_name[record["contender"]].append(record)
    target = by_name[reference_of(contenders).name]
    rows = []
    for contender in contenders:
        own = by_name[contender.name]
        if not own:
            continue
        outcomes = _outcomes(own)
        row: dict[str, Any] = {
            "name": contender.name,
            "kind": contender.kind,
            "options": contender.resolved(temperature),
            **_accuracy(outcomes),
        }
        if own is not target:
            row["difference"] = difference(outcomes, _outcomes(target), seeds)
        row |= _speed(own, target)
        row |= {name: value for name, value in _figures(contender, own).items() if value is not None}
        rows.append(row)
    return rows


def _outcomes(records: Sequence[Record]) -> Outcomes:
    outcomes: Outcomes = defaultdict(dict)
    for record in records:
        for prompt, correct in zip(record["prompts"], record["correct"], strict=True):
            outcomes[prompt][record["seed"]] = correct
    return outcomes


def _accuracy(outcomes: Outcomes) -> dict[str, Any]:
    means = [_mean(list(outcome.values())) for outcome in outcomes.values()]
    samples = sum(len(outcome) for outcome in outcomes.values())
    right = sum(sum(outcome.values()) for outcome in outcomes.values())
    interval, method = share_interval(means, max(len(outcome) for outcome in outcomes.values()))
    return {
        "prompts": len(outcomes),
        "samples": samples,
        "right": right,
        "accuracy": _mean(means),
        "interval": list(interval),
        "interval_method": method,
        "wilson": list(wilson(right, samples)),
    }


def difference(ours: Outcomes, target: Outcomes, seeds: Sequence[int]) -> dict[str, Any] | None:
    """Ours less the target's, in pairs of one prompt and one seed; what does not draw counts for every seed.

    Returns:
        `value`, and `interval` (bootstrap over prompts of the prompts' mean differences; `None` if no prompt differs);
        `better` and `worse`, the pairs in which only ours or only the target is right; McNemar's `p_value` on all
        pairs; `pairs` and `prompts`. `None` without a common prompt.
    """
    better = worse = pairs = 0
    means = []
    for prompt in sorted(ours.keys() & target.keys()):
        differences = []
        # If neither draws, both have the first seed alone: one pair.
        for seed in seeds if len(ours[prompt]) + len(target[prompt]) > 2 else seeds[:1]:
            a, b = _of_seed(ours[prompt], seed, seeds), _of_seed(target[prompt], seed, seeds)
            if a is not None and b is not None:
                differences.append(a - b)
                better, worse = better + (a and not b), worse + (b and not a)
        pairs += len(differences)
        if differences:
            means.append(_mean(differences))
    if not means:
        return None
    interval = bootstrap(means)
    return {
        "value": _mean(means),
        "interval": None if interval is None else list(interval),
        "better": int(better),
        "worse": int(worse),
        "p_value": mcnemar(int(better), int(worse)),
        "pairs": pairs,
        "prompts": len(means),
    }


def _of_seed(outcome: dict[int, bool], seed: int, seeds: Sequence[int]) -> bool | None:
    """The outcome under `seed`, or the only one of a contender that ran under the first seed alone."""
    return outcome.get(seed, outcome.get(seeds[0]) if len(outcome) == 1 else None)


def _speed(own: Sequence[Record], target: Sequence[Record]) -> dict[str, Any]:
    """Tokens a second, and its ratio to the target's: the median over batches that both decoded in one turn."""
    import numpy

    turns = {(record["seed"], record["batch"], record["session"]): record for record in target}
    speeds, times = [], []
    for record in own:
        other = turns.get((record["seed"], record["batch"], record["session"]))
        if other is not None:
            speeds.append(_tokens_per_second(record) / _tokens_per_second(other))
            times.append(other["seconds"] / record["seconds"])
    tokens, seconds = sum(sum(record["new_tokens"]) for record in own), sum(record["seconds"] for record in own)
    interval = bootstrap(speeds, numpy.median)
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "seconds_per_answer": seconds / sum(len(record["prompts"]) for record in own),
        "speed_ratio": statistics.median(speeds) if speeds else None,
        "speed_interval": None if interval is None else list(interval),
        "answer_ratio": statistics.median(times) if times else None,
        "turns": len(speeds),
    }


def _tokens_per_second(record: Record) -> float:
    return float(sum(record["new_tokens"]) / record["seconds"])


def _figures(contender: Contender, records: Sequence[Record]) -> dict[str, float | None]:
    """What a scheme's own counts say, only what means something for it."""
    totals: dict[str, float] = defaultdict(float)
    for record in records:
        for name, value in record["figures"].items():
            totals[name] += value
        size, tokens = len(record["prompts"]), sum(record["new_tokens"])
        # Assisted generation decodes the rows of a batch one after the other: its calls are a row's.
        totals["calls"] += record["figures"].get("target_forwards", 0) * (1 if contender.kind == ASSISTED else size)
        totals["new_tokens"] += tokens
    kind, known = contender.kind, totals.keys()
    token_level = kind in SCHEMES and SCHEMES[kind].rounds is not None
    return {
        "target_forwards_per_token": _ratio(totals["calls"], totals["new_tokens"]),
        "target_tokens_per_token": _ratio(totals["target_tokens"], totals["new_tokens"]),
        "acceptance_rate": _ratio(totals["accepted"], totals["tested"]) if token_level else None,
        "trigger_rate": _ratio(totals["triggered"], totals["accepted"] + totals["triggered"])
        if kind == "easd"
        else None,
        "ess": _ratio(totals["ess"], totals["ess_count"]) if "ess_count" in known else None,
        "resamplings": totals["resamplings"] if kind == "smc" else None,
        "collapses": totals["collapses"] if kind == "smc" else None,
        "full_accept_rate": _ratio(totals["full_accepts"], totals["answers"]),
        "kept_fraction": _ratio(totals["kept"], totals["written"]),
        "segment_acceptance_rate": _ratio(totals["accepted_segments"], totals["segments"]),
        **{f"{name}_share": _share(totals, name) for name in ("target", "draft", "other") if kind != TARGET},
    }


def _share(totals: dict[str, float], name: str) -> float | None:
    """The share of a scheme's own time that went into target, draft or neither."""
    spent = sum(totals.get(f"{part}_seconds", 0.0) for part in ("target", "draft", "other"))
    return _ratio(totals.get(f"{name}_seconds", 0.0), spent) if spent else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
