"""The goals for `lossless` and `easd`, measured in one process: loop overhead, batch 1, batch 8, extra rejections."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_semspec import EASDConfig, LosslessConfig
from hf_semspec.bench import SIZES, ControlledPair, Size, controlled_pair
from hf_semspec.bench.costs import forward_seconds
from hf_semspec.bench.pairs import random_llama
from hf_semspec.bench.progress import Progress, silent
from hf_semspec.bench.rivals import TUNED_LENGTHS
from hf_semspec.tools.machine import describe

from . import ways
from .particles import measure_smc
from .timing import Contender, interleave, median_ratio, threads


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures and how often.

    Args:
        target, draft (`Size`): shapes of the controlled pair.
        vocab (`int`): its vocabulary.
        agreement (`float`): share of tokens on which the draft is right.
        prompt, new_tokens (`int`): tokens of a prompt, tokens decoded.
        overhead_tokens (`int`): tokens that the small Llama decodes.
        lengths (`tuple[int, ...]`): the draft lengths γ that both sides are tuned over.
        repeats, overhead_repeats (`int`): timed turns, for the pair and for the small Llama.
        batch (`int`): rows of the batched run.
        trigger_rate (`float`): share of passed tokens that `easd` is to reject.
        particles, particle_lengths (`tuple[int, ...]`): N and γ of `smc`, and of `lossless` with N chains beside it.
    """

    target: Size = SIZES["98M"]
    draft: Size = SIZES["1.5M"]
    vocab: int = 8192
    agreement: float = 0.65
    prompt: int = 16
    new_tokens: int = 96
    lengths: tuple[int, ...] = TUNED_LENGTHS
    repeats: int = 3
    overhead_tokens: int = 120
    overhead_repeats: int = 15
    batch: int = 8
    trigger_rate: float = 0.02
    particles: tuple[int, ...] = (1, 2, 4, 8)
    particle_lengths: tuple[int, ...] = (4, 8, 16)


FULL = Plan()
# Minutes become seconds; the numbers mean nothing and only show that every part runs.
QUICK = Plan(
    target=SIZES["0.7M"],
    draft=Size(layers=1, hidden=64, intermediate=64, heads=2),
    vocab=512,
    new_tokens=24,
    lengths=(2, 4),
    repeats=1,
    overhead_repeats=2,
    batch=2,
    particles=(1, 4),
    particle_lengths=(4,),
)
OVERHEAD_LENGTH = 4


def run_goals(plan: Plan = FULL, *, command: str = "", report: Progress = silent) -> dict[str, Any]:
    """Measure every goal and return one JSON-safe dict: `meta`, the sections, and `goals`.

    Args:
        plan (`Plan`): what to measure; [`FULL`] takes about eight minutes on two cores.
        command (`str`): stored as the command that made the result.
        report (`Callable[[str], None]`): told what runs next.
    """
    report("building the pair")
    pair = controlled_pair(plan.agreement, target_size=plan.target, draft_size=plan.draft, vocab=plan.vocab)
    result: dict[str, Any] = {"meta": describe(command)}
    result["pair"] = _describe_pair(pair, plan)
    result["overhead"] = measure_overhead(plan, report)
    result["batch1"] = measure_single(pair, plan, report)
    result["batch"] = measure_batch(pair, plan, result["batch1"]["best"]["stock"], report)
    result["easd"] = measure_easd(pair, plan, result["batch1"]["best"]["ours"], report)
    report("particles")
    result["smc"] = measure_smc(
        pair,
        particles=plan.particles,
        lengths=plan.particle_lengths,
        tuned_lengths=plan.lengths,
        prompt=plan.prompt,
        new_tokens=plan.new_tokens,
        repeats=plan.repeats,
        report=report,
    )
    result["goals"] = goals(result)
    return result


def measure_overhead(plan: Plan = FULL, report: Progress = silent) -> dict[str, Any]:
    """CPU time a token over plain greedy decoding, a small Llama drafting for itself: the cost of the loops."""
    model, draft = (random_llama(SIZES["0.7M"], vocab=1000) for _ in range(2))
    ids = torch.randint(1000, (1, plan.prompt), generator=torch.Generator().manual_seed(0))
    config = LosslessConfig(num_draft_tokens=OVERHEAD_LENGTH)
    contenders = [
        ways.plain(model, ids, plan.overhead_tokens),
        ways.stock_assisted(model, draft, ids, plan.overhead_tokens, OVERHEAD_LENGTH),
        ways.scheme("lossless", model, draft, ids, plan.overhead_tokens, config),
    ]
    with threads(1):
        interleave(contenders, plan.overhead_repeats, warmup=2, report=report)
    base = contenders[0].cpu_seconds
    rows = _rows(contenders, plan.overhead_tokens)
    for row, contender in zip(rows, contenders, strict=True):
        row["cpu_over_plain"] = median_ratio(contender.cpu_seconds, base)
    return {"num_draft_tokens": OVERHEAD_LENGTH, "rows": rows}


def measure_single(pair: ControlledPair, plan: Plan = FULL, report: Progress = silent) -> dict[str, Any]:
    """Batch 1: plain, stock assisted tuned and at its defaults, `lossless` at the same lengths and `"auto"`."""
    model, draft, ids, tokens = pair.model, pair.draft, pair.prompts(1, plan.prompt), plan.new_tokens
    plain = ways.plain(model, ids, tokens)
    stock = {n: ways.stock_assisted(model, draft, ids, tokens, n) for n in plan.lengths}
    default = ways.stock_assisted(model, draft, ids, tokens, None)
    ours = {
        n: ways.scheme(f"lossless γ={n}", model, draft, ids, tokens, LosslessConfig(num_draft_tokens=n))
        for n in plan.lengths
    }
    auto = ways.scheme("lossless γ=auto", model, draft, ids, tokens, LosslessConfig(num_draft_tokens="auto"))
    contenders = [plain, *stock.values(), default, *ours.values(), auto]
    interleave(contenders, plan.repeats, report=report)

    costs = measure_costs(pair, plan, batch=1, report=report)
    best_stock, best_ours = _fastest(stock), _fastest(ours)
    text = ways.sequences(plain)[0, plan.prompt - 1 :]
    rows = _rows(contenders, tokens)
    bounds = {n: bound(pair, text, n, costs) for n in plan.lengths}
    for row, contender in zip(rows, contenders, strict=True):
        row["over_plain"] = median_ratio(plain.seconds, contender.seconds)
    chosen = ours[best_ours]
    return {
        "rows": rows,
        "costs": costs,
        "bounds": {str(n): value for n, value in bounds.items()},
        "best": {"stock": best_stock, "ours": best_ours},
        "over_tuned": median_ratio(stock[best_stock].seconds, chosen.seconds),
        "over_default": median_ratio(default.seconds, chosen.seconds),
        "auto_over_tuned": median_ratio(stock[best_stock].seconds, auto.seconds),
        "of_bound": _decoding_ratio(plain, chosen, costs["prefill"]) / bounds[best_ours],
    }


def measure_batch(
    pair: ControlledPair, plan: Plan, num_draft_tokens: int, report: Progress = silent
) -> dict[str, Any]:
    """A batch of ours against stock assisted generation, tuned to `num_draft_tokens`, one row after the other."""
    model, draft, ids = pair.model, pair.draft, pair.prompts(plan.batch, plan.prompt)
    tokens = max(plan.new_tokens * 2 // 3, 8)
    plain = ways.plain(model, ids, tokens)
    stock = ways.stock_assisted(model, draft, ids, tokens, num_draft_tokens)
    ours = {
        n: ways.scheme(f"lossless γ={n}", model, draft, ids, tokens, LosslessConfig(num_draft_tokens=n))
        for n in plan.lengths[:3]
    }
    contenders = [plain, stock, *ours.values()]
    interleave(contenders, plan.repeats, report=report)
    best = _fastest(ours)
    rows = _rows(contenders, tokens * plan.batch)
    for row, contender in zip(rows, contenders, strict=True):
        row["over_plain"] = median_ratio(plain.seconds, contender.seconds)
    return {
        "batch": plan.batch,
        "rows": rows,
        "best": best,
        "over_stock": median_ratio(stock.seconds, ours[best].seconds),
    }


def measure_easd(pair: ControlledPair, plan: Plan, num_draft_tokens: int, report: Progress = silent) -> dict[str, Any]:
    """`easd` against `lossless` at one γ, over four prompts: thresholds at infinity, entropy rule, random triggers."""
    model, draft, tokens = pair.model, pair.draft, plan.new_tokens
    prompts = pair.prompts(4, plan.prompt, seed=1)
    threshold = _entropy_quantile(pair, plan, 1 - plan.trigger_rate)
    infinite = float("inf")
    configs: dict[str, LosslessConfig | EASDConfig] = {
        "lossless": LosslessConfig(num_draft_tokens=num_draft_tokens),
        "easd, thresholds inf": EASDConfig(
            num_draft_tokens=num_draft_tokens,
            target_entropy_threshold=infinite,
            draft_entropy_threshold=infinite,
        ),
        "easd, entropy": EASDConfig(
            num_draft_tokens=num_draft_tokens,
            target_entropy_threshold=threshold,
            draft_entropy_threshold=0.0,
            overlap_threshold=0.0,
        ),
        "easd, random": EASDConfig(
            num_draft_tokens=num_draft_tokens, trigger="random", trigger_rate=plan.trigger_rate
        ),
    }
    contenders = [
        _over_prompts(name, [ways.scheme(name, model, draft, row[None], tokens, config) for row in prompts])
        for name, config in configs.items()
    ]
    interleave(contenders, plan.repeats, report=report)
    base = contenders[0]
    a = _stat(base, "accepted") / _stat(base, "tested")
    rows = _rows(contenders, tokens * len(prompts))
    for row, contender in zip(rows, contenders, strict=True):
        passed = _stat(contender, "accepted") + _stat(contender, "triggered")
        rate = _stat(contender, "triggered") / passed if passed else 0.0
        row["trigger_rate"] = rate
        row["over_lossless"] = median_ratio(base.seconds, contender.seconds)
        row["law_leaves"] = _tokens_a_round(a * (1 - rate), num_draft_tokens) / _tokens_a_round(a, num_draft_tokens)
    return {"num_draft_tokens": num_draft_tokens, "acceptance": a, "target_entropy_threshold": threshold, "rows": rows}


def measure_costs(pair: ControlledPair, plan: Plan, *, batch: int, report: Progress = silent) -> dict[str, Any]:
    """Seconds of a target pass over 1 token, `c[n]` relative to it, and `rho`, the draft's one-token pass."""
    widths = sorted({1, *(n + 1 for n in plan.lengths)})
    passes: dict[str, tuple[PreTrainedModel, int]] = {str(n): (pair.model, n) for n in widths}
    passes["prefill"] = (pair.model, plan.prompt)
    passes["draft"] = (pair.draft, 1)
    context = plan.prompt + plan.new_tokens // 2
    seconds = forward_seconds(passes, batch=batch, context=context, repeats=3 * plan.repeats + 2, report=report)
    one = seconds["1"]
    return {
        "seconds": one,
        "c": {str(n): seconds[str(n)] / one for n in widths},
        "rho": seconds["draft"] / one,
        "prefill": seconds["prefill"],
    }


def bound(pair: ControlledPair, text: torch.Tensor, num_draft_tokens: int, costs: dict[str, Any]) -> float:
    """E[tokens] / (c(γ+1) + γρ): the speed-up over plain decoding if nothing but the forwards took time.

    E[tokens] is that of ideal greedy rounds on this very text `(1 + new_tokens,)`, the prompt's last token first.
    """
    tokens = (len(text) - 2) / pair.ideal_rounds(text, num_draft_tokens)
    cost: float = costs["c"][str(num_draft_tokens + 1)] + num_draft_tokens * costs["rho"]
    return tokens / cost


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of the result's sections as entries `what`, `value`, `goal`, `met`."""
    overhead = {row["name"]: row for row in result["overhead"]["rows"]}["lossless"]
    single, batch = result["batch1"], result["batch"]
    entries: list[tuple[str, float, str, float]] = [
        ("CPU time a token over plain greedy decoding", overhead["cpu_over_plain"], "<=", 0.90),
        ("lossless over HF assisted, tuned, batch 1", single["over_tuned"], ">=", 1.0),
        ("lossless over HF assisted at its defaults, batch 1", single["over_default"], ">=", 1.4),
        ("lossless, share of its bound", single["of_bound"], ">=", 0.95),
        (f"batch {batch['batch']} over HF assisted one by one", batch["over_stock"], ">=", 3.0),
    ]
    for row in result["easd"]["rows"][1:]:
        entries.append((f"{row['name']}: over lossless", row["over_lossless"], ">=", 0.95))
        share = row["over_lossless"] / row["law_leaves"]
        entries.append((f"{row['name']}: share of what the law leaves", share, ">=", 0.97))
    smc = result["smc"]["goal"]
    entries += [
        (f"{smc['name']}, share of its bound", smc["of_bound"], ">=", 0.9),
        (f"{smc['name']} over plain sampling", smc["over_plain"], ">=", 2.0),
        (f"{smc['name']} over HF assisted, tuned", smc["over_tuned"], ">=", 1.5),
    ]
    return [
        {
            "what": what,
            "value": value,
            "goal": f"{sign} {limit:.2f}",
            "met": value <= limit if sign == "<=" else value >= limit,
        }
        for what, value, sign, limit in entries
    ]


def _describe_pair(pair: ControlledPair, plan: Plan) -> dict[str, Any]:
    measured = pair.measure(pair.prompts(2, min(256, plan.vocab), seed=2))
    sizes = {
        name: sum(p.numel() for p in model.parameters())
        for name, model in (("target", pair.model), ("draft", pair.draft))
    }
    return {"parameters": sizes, "agreement": plan.agreement, "measured": measured.to_dict(), "prompt": plan.prompt}


@torch.no_grad()
def _entropy_quantile(pair: ControlledPair, plan: Plan, quantile: float) -> float:
    """The quantile of the target's entropy (nats) over tokens on which the draft agrees."""
    text = pair.prompts(1, min(1024, plan.vocab), seed=3)
    log_p = pair.model(text).logits[0].float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return float(entropy[pair.agrees[text[0]]].quantile(quantile))


def _over_prompts(name: str, parts: Sequence[Contender]) -> Contender:
    return Contender(name, lambda: [part.run() for part in parts])


def _results(contender: Contender) -> list[Any]:
    results = contender.result if isinstance(contender.result, list) else [contender.result]
    return [result for result in results if hasattr(result, "stats")]


def _stat(contender: Contender, name: str) -> float:
    return float(sum(getattr(result.stats, name) for result in _results(contender)))


def _rows(contenders: Sequence[Contender], tokens: int) -> list[dict[str, Any]]:
    rows = []
    reference = None if isinstance(contenders[0].result, list) else ways.sequences(contenders[0])
    for contender in contenders:
        seconds = statistics.median(contender.seconds)
        row: dict[str, Any] = {
            "name": contender.name,
            "seconds": seconds,
            "spread": [min(contender.seconds), max(contender.seconds)],
            "cpu_seconds": statistics.median(contender.cpu_seconds),
            "tokens_per_second": tokens / seconds,
        }
        if reference is not None:
            row["same_tokens"] = float((ways.sequences(contender) == reference).float().mean())
        if _results(contender):
            tested, rounds = _stat(contender, "tested"), _stat(contender, "rounds")
            row["target_forwards"] = int(_stat(contender, "target_forwards"))
            row["acceptance_rate"] = _stat(contender, "accepted") / tested if tested else None
            row["tokens_a_round"] = _stat(contender, "emitted") / rounds if rounds else None
        rows.append(row)
    return rows


def _fastest(contenders: dict[int, Contender]) -> int:
    return min(contenders, key=lambda n: statistics.median(contenders[n].seconds))


def _decoding_ratio(plain: Contender, ours: Contender, prefill: float) -> float:
    """Speed-up over plain decoding once the prompt has been read, which both do once."""
    return median_ratio([s - prefill for s in plain.seconds], [s - prefill for s in ours.seconds])


def _tokens_a_round(a: float, num_draft_tokens: int) -> float:
    return sum(a**t for t in range(num_draft_tokens + 1))
