"""Runs the lab's comparisons: `python -m examples.arithmetic_lab.results --out docs/results [NAME ...]`.

Each run is one `hf-semspec eval` (its command is in its results.json); a run that was interrupted goes on where it
stopped. Thresholds come from `calibration.jsonl`, never from the problems that are measured.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import PARSEConfig, SemSpecConfig, calibrate_easd, calibrate_parse, record_stats
from hf_semspec.cli import main as hf_semspec
from hf_semspec.evaluation.plots import plot_heat_maps

from .equal_cost import equal_cost
from .problems import HERE

LINE = 9  # tokens of one step
ASKED = 'judge_prompt="?",full_judge_prompt="?",labels=["Y","N"]'
PERCENTILES, OVERLAPS = (75, 90, 95, 98), (0.4, 0.6, 0.8, 1.0)
SAMPLED = ["--temperature", "0.7", "--seeds", "0", "1", "2"]
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}


def calibrate(out: Path, limit: int) -> dict[str, Any]:
    """Thresholds of both schemes on problems that are not measured, kept in `calibration.json`."""
    file = out / "calibration.json"
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    target, draft, tokenizer = load_pair()
    problems = calibration_problems(limit)
    chats = [[{"role": "user", "content": problem["prompt"]}] for problem in problems]
    config = PARSEConfig(segment_tokens=LINE, judge_prompt="?", full_judge_prompt="?", labels=("Y", "N"))
    parse = calibrate_parse(
        target,
        draft,
        chats,
        [problem["answer"] for problem in problems],
        check=lambda text, answer: text.rpartition("#")[2].strip() == answer,
        config=config,
        tokenizer=tokenizer,
        max_new_tokens=104,
    )
    parse.plot(out / "reliability.png")
    easd = calibrate_easd(target, draft, chats, tokenizer=tokenizer, max_new_tokens=104)
    thresholds = {
        percentile: {
            "target_entropy_threshold": float(easd.target_entropies.quantile(percentile / 100)),
            "draft_entropy_threshold": float(easd.draft_entropies.quantile(percentile / 100)),
        }
        for percentile in PERCENTILES
    }
    found = {"parse": parse.report, "easd": thresholds, "easd_report": easd.report}
    modes: dict[str, Any] = {"greedy": (chats, {"do_sample": False}), "sampled": (3 * chats, SAMPLING)}
    rates = {
        mode: trigger_rate(target, draft, tokenizer, several, **thresholds[90], **sampling)
        for mode, (several, sampling) in modes.items()
    }
    found["trigger_rate"] = rates["greedy"]
    found["coin_rates"] = {
        mode: rates[mode] / effect_of_coins(target, draft, tokenizer, several, **sampling)
        for mode, (several, sampling) in modes.items()
    }
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def load_pair() -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(HERE / role, dtype=torch.float32).eval() for role in ("target", "draft")
    )
    return target, draft, AutoTokenizer.from_pretrained(HERE / "target", padding_side="left")


def calibration_problems(limit: int) -> list[dict[str, str]]:
    """The first problems of those that are not measured."""
    lines = (HERE / "calibration.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    return [json.loads(line) for line in lines]


def recorded(target: Any, draft: Any, tokenizer: Any, chats: list[Any], config: Any) -> list[Any]:
    """The statistics of the calls that answer `chats`, fifty at a time, from seed 0."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    torch.manual_seed(0)
    with record_stats() as calls:
        for first in range(0, len(texts), 50):
            part = texts[first : first + 50]
            inputs = tokenizer(part, add_special_tokens=False, padding=True, return_tensors="pt")
            target.generate(**inputs, assistant_model=draft, generation_config=config, tokenizer=tokenizer)
    return calls


def trigger_rate(target: Any, draft: Any, tokenizer: Any, chats: list[Any], **fields: Any) -> float:
    """How often easd triggers on the calibration problems."""
    config = SemSpecConfig("easd", **fields, max_new_tokens=104)
    calls = recorded(target, draft, tokenizer, chats, config)
    triggered = sum(call.triggered for call in calls)
    return float(triggered / (triggered + sum(call.accepted for call in calls)))


def effect_of_coins(target: Any, draft: Any, tokenizer: Any, chats: list[Any], **sampling: Any) -> float:
    """The share of easd's random triggers that take effect: none does where the target gives nothing else any mass."""
    asked = 0.05
    return trigger_rate(target, draft, tokenizer, chats, trigger="random", trigger_rate=asked, **sampling) / asked


def easd(found: dict[str, Any], percentile: int, **fields: Any) -> str:
    """An easd contender with the thresholds of one percentile."""
    report = found["easd"][str(percentile)]
    names = ("target_entropy_threshold", "draft_entropy_threshold")
    options = {name: report[name] for name in names} | {"overlap_threshold": 0.8, "num_draft_tokens": 5} | fields
    return "easd:" + ",".join(f"{name}={value}" for name, value in options.items())


def parse(found: dict[str, Any], **fields: Any) -> str:
    """A parse contender with the calibrated thresholds."""
    thresholds = found["parse"]["thresholds"]
    options = {
        "segment_tokens": LINE,
        "accept_threshold": thresholds["full"],
        "prefix_threshold": thresholds["prefix"],
    } | fields
    return f"parse:{ASKED}," + ",".join(f"{name}={value}" for name, value in options.items())


def semantic(**fields: Any) -> str:
    """A semantic contender whose segments are lines."""
    options = {"segment_stop": '"\\n"', "max_segment_tokens": 12, "think_end": "null"} | fields
    return "semantic:" + ",".join(f"{name}={value}" for name, value in options.items())


def segment_rates(out: Path, limit: int) -> dict[str, float]:
    """The share of segments that the probe lets stand on the calibration problems, greedily and at temperature 0.7,
    the rate of the random control; kept in `semantic.json`."""
    file = out / "semantic.json"
    if not file.exists():
        target, draft, tokenizer = load_pair()
        chats = [[{"role": "user", "content": problem["prompt"]}] for problem in calibration_problems(limit)]
        rates = {}
        for name, sampling in (("greedy", {"do_sample": False}), ("sampled", SAMPLING)):
            config = SemSpecConfig(
                "semantic",
                probe=str(HERE / "probes" / "cross"),
                segment_stop="\n",
                max_segment_tokens=12,
                think_end=None,
                max_new_tokens=104,
                **sampling,
            )
            calls = recorded(target, draft, tokenizer, chats, config)
            rates[name] = sum(call.accepted_segments for call in calls) / sum(call.segments for call in calls)
        file.write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def semantic_runs(rates: dict[str, float]) -> dict[str, list[str]]:
    """The arguments of the runs of `semantic` and its controls, by their names."""
    cross, own = (_shown(f"probes/{labels}") for labels in ("cross", "own"))
    found = {}
    for name, mode, rate in (
        ("semantic", ["--limit", "300"], "greedy"),
        ("semantic_sampled", ["--limit", "300", *SAMPLED[:2]], "sampled"),
        ("semantic_one_by_one", ["--limit", "100", "--batch-size", "1"], "greedy"),
    ):
        contenders = [
            f"cross={semantic(probe=cross)}",
            f"cross_draft_first={semantic(probe=cross, first_segment='draft')}",
            f"cross_lossless={semantic(probe=cross, revise_with='lossless')}",
            f"own={semantic(probe=own)}",
            f"likelihood={semantic(scorer='likelihood')}",
            f"top_2={semantic(scorer='none', top_k_accept=2)}",
            f"random={semantic(scorer='random', accept_rate=round(rates[rate], 4))}",
            f"always={semantic(scorer='random', accept_rate=1)}",
        ]
        if rate == "sampled":
            contenders += [
                f"cross_exact={semantic(probe=cross, residual='exact')}",
                f"sequence_exact={semantic(scorer='sequence', residual='exact')}",
            ]
        found[name] = [*mode, "--schemes", "target,draft,lossless", *contenders]
    return found


def runs(found: dict[str, Any]) -> dict[str, list[str]]:
    """The arguments of every run but those of `semantic`, by its name."""
    both = [
        "target,draft,lossless",
        "multi_draft=lossless:num_chains=4",
        f"easd_exclude={easd(found, 90)}",
        f"easd_plain={easd(found, 90, penalty=1)}",
        f"easd_random=easd:trigger=random,trigger_rate={found['trigger_rate']}",
        *(f"parse_{rule}={parse(found, boundary=rule)}" for rule in ("first_fail", "longest", "cascade", "random")),
    ]
    particles = [f"smc_{n}=smc:num_particles={n}" for n in (1, 4, 8, 16)]
    best = [f"smc_{n}_best=smc:num_particles={n},select=best" for n in (4, 8, 16)]
    best_of = ["best_of_4=best_of:n=4", "best_of_8=best_of:n=8"]
    vote, majority = "smc_8_vote=smc:num_particles=8,vote=majority", "majority_4=majority:n=4"
    stock = [f"stock_{weight}=assisted:assistant_ensemble_weight={weight}" for weight in (0.5, 0.7, 0.9)]
    coupled = [
        f"p{percentile}_{overlap}={easd(found, percentile, overlap_threshold=overlap)}"
        for percentile in PERCENTILES
        for overlap in OVERLAPS
    ]
    control = {
        mode: [f"easd_exclude={easd(found, 90)}", f"easd_random=easd:trigger=random,trigger_rate={rate}"]
        for mode, rate in found["coin_rates"].items()
    }
    files = [word for name in ("fly", "cactus") for word in ("--scheme-file", _shown(f"../schemes/{name}.py"))]
    own = [
        *("--limit", "500", "--schemes", "target,lossless,lossless_12=lossless:num_draft_tokens=12"),
        *(f"easd_exclude={easd(found, 90)}", "fly,fly_open=fly:threshold=0,fly_strict=fly:threshold=0.6"),
        *("fly_short=fly:window=2", "cactus_0.1=cactus:delta=0.1,cactus_1=cactus:delta=1"),
    ]
    return {
        "own_schemes": [*files, *own],
        "own_schemes_sampled": [*files, *SAMPLED, *own],
        "easd_control": ["--limit", "1000", "--schemes", *control["greedy"]],
        "easd_control_sampled": ["--limit", "1000", *SAMPLED, "--schemes", *control["sampled"]],
        "greedy": ["--limit", "1000", "--schemes", *both],
        "one_by_one_sampled": [
            *("--limit", "100", "--batch-size", "1", "--temperature", "0.7", "--schemes", "target,draft,lossless"),
            *("multi_draft=lossless:num_chains=4", f"parse_first_fail={parse(found)}"),
            *(*particles, *best, vote, *best_of, majority),
        ],
        "sampled": ["--limit", "1000", *SAMPLED, "--schemes", *both],
        "particles": ["--limit", "1000", *SAMPLED, "--schemes", "lossless", *particles, *best],
        "one_by_one": ["--limit", "100", "--batch-size", "1", "--schemes", *both, *stock],
        "rivals": ["--limit", "1000", *SAMPLED, "--schemes", "best_of_2=best_of:n=2", *best_of],
        "votes": ["--limit", "1000", *SAMPLED, "--schemes", vote, "majority_2=majority:n=2", majority],
        "stock": ["--limit", "1000", "--schemes", "lossless", *stock],
        "stock_sampled": ["--limit", "1000", *SAMPLED, "--schemes", "lossless", *stock],
        "grid_easd": ["--limit", "300", "--schemes", *coupled],
        "grid_parse": [
            *("--limit", "300", "--grid"),
            parse(found, accept_threshold="0.5|0.9|0.99|2", prefix_threshold="0.3|0.7|0.9|0.99"),
            "--grid",
            "segments=" + parse(found, segment_tokens="9|18|27|36"),
        ],
        "grid_smc": [
            *("--limit", "200", "--temperature", "0.7", "--grid"),
            "smc:num_particles=1|4|8|16,num_draft_tokens=4|8,ess_threshold=0|0.5|1",
        ],
    }


def run(name: str, arguments: list[str], out: Path) -> None:
    """One `hf-semspec eval` into `out / name`."""
    common = [
        *("eval", "--model", _shown("target"), "--draft", _shown("draft"), "--dtype", "float32", "--device", "cpu"),
        *("--task", "jsonl", "--path", _shown("heldout.jsonl"), "--extract", r"#(\d\d)", "--max-new-tokens", "104"),
    ]
    size = [] if "--batch-size" in arguments else ["--batch-size", "50"]
    code = hf_semspec([*common, *size, *arguments, "--out", str(out / name)])
    if code:
        raise SystemExit(code)


def _shown(name: str) -> str:
    """A file of the lab as the command names it."""
    return os.path.relpath(HERE / name)


def heat_map_of_easd(out: Path) -> None:
    """The coupled thresholds as a heat map: percentile by overlap."""
    report = json.loads((out / "grid_easd" / "results.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["contenders"]}
    cells = [
        {"values": [str(percentile), str(overlap)], **rows[f"p{percentile}_{overlap}"]}
        for percentile in PERCENTILES
        for overlap in OVERLAPS
    ]
    axes = {"percentile": [str(p) for p in PERCENTILES], "overlap_threshold": [str(o) for o in OVERLAPS]}
    table = {"name": "easd", "kind": "easd", "fixed": {}, "axes": axes, "target": rows["target"]["accuracy"]}
    plot_heat_maps({**table, "cells": cells}, out / "grid_easd" / "easd.png")


def fill(page: Path, out: Path) -> None:
    """Put the tables of the runs in `out` between the marks `<!-- NAME -->` and `<!-- /NAME -->` of `page`."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- (\w+) -->", text):
        if name == "equal_cost":
            found = equal_cost(out)
        else:
            lines = (out / name / "results.md").read_text(encoding="utf-8").splitlines()
            found = [line for line in lines if line.startswith("|")]
        before, rest = text.split(f"<!-- {name} -->")
        _, after = rest.split(f"<!-- /{name} -->")
        text = f"{before}<!-- {name} -->\n" + "\n".join(found) + f"\n<!-- /{name} -->{after}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    """Calibrate, then run what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--calibrate-on", type=int, default=300, metavar="N", help="problems (default 300)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="run nothing, put the tables into this page")
    arguments = parser.parse_args()
    if arguments.page:
        fill(arguments.page, arguments.out)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = calibrate(arguments.out, arguments.calibrate_on)
    every = runs(found)
    if not arguments.names or any(name.startswith("semantic") for name in arguments.names):
        every |= semantic_runs(segment_rates(arguments.out, arguments.calibrate_on))
    for name in arguments.names or every:
        run(name, every[name], arguments.out)
        if name == "grid_easd":
            heat_map_of_easd(arguments.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
