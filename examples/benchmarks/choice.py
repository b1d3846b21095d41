"""`"auto"` against every fixed γ and plain decoding, and block against token verification, for the page on benchmarks.

Run it as `python -m examples.benchmarks.choice --out docs/bench --page docs/benchmarks.md`; it goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import LosslessConfig, load_draft
from hf_semspec.bench import SIZES, ControlledPair, Size, controlled_pair
from hf_semspec.bench.command import quiet
from hf_semspec.bench.results import with_interval, write_json
from hf_semspec.bench.subject import PROMPTS
from hf_semspec.evaluation.report import markdown_table
from hf_semspec.evaluation.statistics import bootstrap
from hf_semspec.tools.loading import encode
from hf_semspec.tools.machine import describe
from hf_semspec.tools.models import NAME, load_smollm2

from . import ways
from .marks import origin, write_between
from .timing import Contender, interleave, median_ratio

FILE, MARK = "choice.json", "choice"
COMMAND = "OMP_NUM_THREADS=1 python -m examples.benchmarks.choice --out docs/bench --page docs/benchmarks.md"
SMALL, SMALLEST = SIZES["0.7M"], Size(layers=1, hidden=64, intermediate=64, heads=2)
LAB = Path(__file__).parents[1] / "arithmetic_lab"
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run measures.

    Args:
        target, draft (`Size`), vocab (`int`): the controlled pairs.
        agreements (`tuple[float, ...]`): shares of tokens on which the drafts are right.
        tokens (`dict[int, int]`): by batch, the tokens decoded of each row.
        lengths (`tuple[int, ...]`): the fixed γ.
        stock (`tuple[int, ...]`): those of transformers' assisted generation, at batch 1.
        repeats (`int`): timed turns.
        temperatures (`tuple[float, ...]`): of the lab.
        layers (`int`): of SmolLM2 that draft for all of it; 0 leaves it out.
        prompts, rule_tokens, rule_length (`int`): of the comparison of the two rules: how many, their new tokens, γ.
    """

    target: Size = SIZES["98M"]
    draft: Size = SIZES["1.5M"]
    vocab: int = 8192
    agreements: tuple[float, ...] = (0.5, 0.7, 0.9)
    tokens: dict[int, int] = field(default_factory=lambda: {1: 96, 4: 64, 8: 48})
    lengths: tuple[int, ...] = (1, 2, 4, 6, 8)
    stock: tuple[int, ...] = (3, 5)
    repeats: int = 3
    temperatures: tuple[float, ...] = (0.7, 1.0)
    layers: int = 26
    prompts: int = 40
    rule_tokens: int = 64
    rule_length: int = 4


FULL = Plan()
# Minutes become seconds; the numbers mean nothing.
QUICK = Plan(
    target=SMALL,
    draft=SMALLEST,
    vocab=512,
    agreements=(0.7,),
    tokens={1: 12, 2: 8},
    lengths=(1, 4),
    stock=(3,),
    repeats=2,
    temperatures=(1.0,),
    layers=0,
    prompts=3,
    rule_tokens=12,
)


def measure_cell(pair: ControlledPair, batch: int, plan: Plan, report: Report) -> dict[str, Any]:
    """All ways in turns on one batch of the pair, greedily: tokens a second, and `"auto"` over the others."""
    model, draft, ids, tokens = pair.model, pair.draft, pair.prompts(batch, 16), plan.tokens[batch]
    plain = ways.plain(model, ids, tokens)
    fixed = {
        length: ways.scheme(f"γ={length}", model, draft, ids, tokens, LosslessConfig(num_draft_tokens=length))
        for length in plan.lengths
    }
    auto = ways.scheme("auto", model, draft, ids, tokens, LosslessConfig(num_draft_tokens="auto"))
    stock = [ways.stock_assisted(model, draft, ids, tokens, length) for length in plan.stock if batch == 1]
    contenders = [plain, *fixed.values(), auto, *stock]
    for one in (plain, auto):  # which loads what all run, and measures costs
        report(f"{one.name}: warm-up")
        one.run()
    interleave(contenders, plan.repeats, warmup=0, report=report)
    best = min(fixed.values(), key=lambda one: statistics.median(one.seconds))
    rows = {one.name: batch * tokens / statistics.median(one.seconds) for one in contenders}
    found: dict[str, Any] = {"tokens_per_second": rows, "seconds": {one.name: one.seconds for one in contenders}}
    found |= {"best": best.name, "rounds": auto.result.stats.auto["rounds"], "off": auto.result.stats.auto["off"]}
    found["over_best"], found["over_plain"] = (_ratio(other, auto) for other in (best, plain))
    if stock:
        found["over_stock"] = _ratio(min(stock, key=lambda one: statistics.median(one.seconds)), auto)
    texts = [ways.sequences(one) for one in (auto, *fixed.values())]
    found["same"] = all(torch.equal(text, ways.sequences(plain)) for text in texts)
    return found


def _ratio(theirs: Contender, ours: Contender) -> dict[str, Any]:
    """How many times as fast ours is, the median over the turns, and over them the least and the most."""
    turns = [a / b for a, b in zip(theirs.seconds, ours.seconds, strict=True)]
    return {"value": median_ratio(theirs.seconds, ours.seconds), "interval": [min(turns), max(turns)]}


def pairs_of(plan: Plan) -> dict[str, Callable[[], tuple[Any, Any, list[torch.Tensor], float]]]:
    """By name, how target, draft, prompts and temperature of a comparison of the two rules are made."""

    def lab(temperature: float) -> tuple[Any, Any, list[torch.Tensor], float]:
        models = [
            AutoModelForCausalLM.from_pretrained(LAB / name, dtype=torch.float32).eval()
            for name in ("target", "draft")
        ]
        tokenizer = AutoTokenizer.from_pretrained(LAB / "target")
        lines = (LAB / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[: plan.prompts]
        return *models, [encode(tokenizer, json.loads(line)["prompt"]) for line in lines], temperature  # type: ignore

    def controlled(agreement: float) -> tuple[Any, Any, list[torch.Tensor], float]:
        pair = controlled_pair(agreement, target_size=SMALL, draft_size=SMALLEST, vocab=512)
        return pair.model, pair.draft, list(pair.prompts(plan.prompts, 16).split(1)), 1.0

    def smollm2(layers: int) -> tuple[Any, Any, list[torch.Tensor], float]:
        model, tokenizer = load_smollm2()
        prompts = [encode(tokenizer, text) for text in PROMPTS[: min(plan.prompts, 6)]]
        return model, load_draft(model, layers=layers), prompts, 1.0

    found: dict[str, Any] = {f"lab, temperature {one:g}": partial(lab, one) for one in plan.temperatures}
    found["controlled, agreement 0.7"] = partial(controlled, 0.7)
    if plan.layers:
        found[f"{NAME}, drafted by {plan.layers} of its layers"] = partial(smollm2, plan.layers)
    return found


def measure_rules(name: str, plan: Plan, report: Report) -> dict[str, Any]:
    """Block over token verification: tokens a target pass and speed, with bootstrap intervals over prompts."""
    model, draft, prompts, temperature = pairs_of(plan)[name]()
    mode = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    counts: dict[str, list[list[float]]] = {"block": [], "token": []}
    for number, ids in enumerate(prompts):
        report(f"{name}, prompt {number + 1} of {len(prompts)}")
        for rule, values in counts.items():
            config = LosslessConfig(num_draft_tokens=plan.rule_length, verification=rule)  # type: ignore[arg-type]
            way = ways.scheme(rule, model, draft, ids, plan.rule_tokens, config, mode)
            torch.manual_seed(number)
            began = time.perf_counter()
            stats = way.run().stats
            values.append([stats.emitted, stats.target_forwards, time.perf_counter() - began])
    return {
        "prompts": len(prompts),
        "tokens_a_forward": {rule: _total(values, 0) / _total(values, 1) for rule, values in counts.items()},
        "tokens": _gain(counts, 1),
        "speed": _gain(counts, 2),
    }


def _total(values: Sequence[Sequence[float]], column: int) -> float:
    return sum(value[column] for value in values)


def _gain(counts: dict[str, list[list[float]]], column: int) -> dict[str, Any]:
    """Tokens for each unit of `column`, block over token; the interval is of the mean of the logs over prompts."""
    logs = [
        torch.tensor(block[0] / block[column] * token[column] / token[0]).log().item()
        for block, token in zip(counts["block"], counts["token"], strict=True)
    ]
    interval = bootstrap(logs)
    bounds = None if interval is None else [torch.tensor(end).exp().item() for end in interval]
    return {"value": torch.tensor(statistics.mean(logs)).exp().item(), "interval": bounds}


def run(plan: Plan, path: Path, command: str, report: Report, minutes: float | None = None) -> dict[str, Any]:
    """Measure what the result at `path` lacks, and write it after each cell; none is begun after `minutes`."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not result:
        result = {"meta": describe(command), "cells": {}, "rules": {}}
    began = time.monotonic()

    def is_late() -> bool:
        return minutes is not None and time.monotonic() - began > 60 * minutes

    for agreement in plan.agreements:
        names = {batch: f"agreement {agreement:g}, batch {batch}" for batch in plan.tokens}
        if is_late() or all(name in result["cells"] for name in names.values()):
            continue
        report(f"building the pair that agrees on {agreement:g}")
        pair = controlled_pair(agreement, target_size=plan.target, draft_size=plan.draft, vocab=plan.vocab)
        for batch, name in names.items():
            if name not in result["cells"] and not is_late():
                result["cells"][name] = measure_cell(pair, batch, plan, report)
                write_json(path, result)
    for name in pairs_of(plan):
        if name not in result["rules"] and not is_late():
            result["rules"][name] = measure_rules(name, plan, report)
            write_json(path, result)
    return result


def markdown(result: dict[str, Any] | None) -> str:
    """The section of the page; without a result it says how one is made."""
    if result is None:
        return f"Not yet measured: `{COMMAND}`."
    parts = [origin(result["meta"])]
    if result["cells"]:
        first = next(iter(result["cells"].values()))
        names = [name for name in first["tokens_per_second"] if not name.startswith("HF")]
        header = ["", *names, "auto over the best fixed", "over plain", "over HF assisted, tuned", "off"]
        rows = [
            [
                name + ("" if cell["same"] else " (!)"),
                *(f"{cell['tokens_per_second'][each]:.1f}" for each in names),
                *(with_interval(cell.get(ratio)) for ratio in ("over_best", "over_plain", "over_stock")),
                "yes" if cell["off"] else "",
            ]
            for name, cell in result["cells"].items()
        ]
        note = (
            "Tokens a second, greedily; ratios are medians over the turns, with the least and the most; off: drafting "
            "was off at the end. (!): another text than plain decoding's."
        )
        parts.append(f"{note}\n\n{markdown_table(header, rows)}")
    if result["rules"]:
        header = [
            "temperature",
            "prompts",
            "token rule, tokens a target pass",
            "block rule",
            "block over token",
            "speed",
        ]
        rows = [
            [
                name,
                str(lab["prompts"]),
                *(f"{lab['tokens_a_forward'][rule]:.2f}" for rule in ("token", "block")),
                *(with_interval(lab[ratio]) for ratio in ("tokens", "speed")),
            ]
            for name, lab in result["rules"].items()
        ]
        note = (
            "Sampled from the whole law; the controlled pairs are small ones, whose speed says little. Ratios are "
            "means over prompts, with 95 % bootstrap intervals."
        )
        parts.append(f"{note}\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m examples.benchmarks.choice`."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.choice", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"where {FILE} is")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables into this page, between its marks")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no cell later than this")
    parser.add_argument("--quick", action="store_true", help="tiny models; shows that all runs, no real numbers")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    path = arguments.out / FILE
    if not arguments.only_page:
        arguments.out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "examples.benchmarks.choice", *given])
        with quiet():
            plan = QUICK if arguments.quick else FULL
            run(plan, path, command, lambda text: print(text, file=sys.stderr, flush=True), arguments.minutes)
    if arguments.page is not None:
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        write_between(markdown(result), arguments.page, MARK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
