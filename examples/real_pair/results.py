"""The schemes on a real pair and GSM8K: `python -m examples.real_pair.results --data FILE --out DIR RUN ...`.

Each run is one `hf-semspec eval` (its command is in its results.json). An interrupted one goes on where it stopped. A
higher `--limit` or `--level` adds to what is there. Thresholds come from the last problems of the file, which no run
reaches.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import calibrate_easd, calibrate_parse
from hf_semspec.calibration.parse import lowest_threshold, rates, reliability
from hf_semspec.cli import main as hf_semspec
from hf_semspec.evaluation.tasks import gsm8k
from hf_semspec.tools.wheels import located

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
NEW_TOKENS = 400
FALSE_ACCEPT, PERCENTILE = 0.1, 90
EASD_PROMPTS = 8
SCHEMES = Path(__file__).parent.parent / "schemes"


def load_pair() -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(located(name), dtype=torch.bfloat16).eval() for name in (TARGET, DRAFT)
    )
    return target, draft, AutoTokenizer.from_pretrained(located(TARGET), padding_side="left")


def calibrate(data: Path, out: Path, number: int) -> dict[str, Any]:
    """Thresholds of parse and easd from the last `number` problems, kept in `calibration.json`.

    What was judged of each problem is in `verdicts.jsonl`, so that an interruption loses one problem.
    """
    result, verdicts = out / "calibration.json", out / "verdicts.jsonl"
    if result.exists() and json.loads(result.read_text(encoding="utf-8"))["problems"] >= number:
        return dict(json.loads(result.read_text(encoding="utf-8")))
    task = gsm8k(data)
    examples = task.examples[-number:]
    lines = verdicts.read_text(encoding="utf-8").splitlines() if verdicts.exists() else []
    judged = {entry["prompt"]: entry for entry in map(json.loads, lines)}
    target, draft, tokenizer = load_pair()
    chats = [[{"role": "user", "content": task.template.replace("{prompt}", example.prompt)}] for example in examples]
    for example, chat in zip(examples, chats, strict=True):
        if example.prompt in judged:
            continue
        found = calibrate_parse(
            *(target, draft, [chat], [example.answer]),
            check=lambda text, answer: right_answer(task, text, answer),
            tokenizer=tokenizer,
            max_new_tokens=NEW_TOKENS,
            progress=False,
        )
        entry = judged[example.prompt] = {"prompt": example.prompt}
        for kind in ("full", "prefix"):
            entry[kind] = [found.confidences[kind].tolist(), found.right[kind].tolist()]
        with verdicts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{len(judged)} of {number}: {entry['full']}", file=sys.stderr, flush=True)
    report: dict[str, Any] = {"problems": number, "max_false_accept": FALSE_ACCEPT, "parse": {}}
    for kind, default in (("full", 0.9), ("prefix", 0.7)):
        entries = [judged[example.prompt][kind] for example in examples]
        confidences = torch.tensor([value for values, _ in entries for value in values], dtype=torch.float64)
        right = torch.tensor([mark for _, marks in entries for mark in marks], dtype=torch.bool)
        threshold = lowest_threshold(confidences, right, FALSE_ACCEPT, default)
        report["parse"][kind] = {
            "threshold": threshold,
            **rates(confidences, right, threshold),
            "reliability": reliability(confidences, right),
        }
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    together = dict(
        tokenizer(texts[:EASD_PROMPTS], add_special_tokens=False, padding=True, return_tensors="pt")
    )  # one batch: easd's entropies are those of every row
    easd = calibrate_easd(target, draft, [together], percentile=PERCENTILE, max_new_tokens=NEW_TOKENS, progress=False)
    report["easd"] = easd.report
    result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def right_answer(task: Any, text: str, answer: str) -> bool:
    """Whether `text` comes to `answer`."""
    found = task.extract(text)
    return found is not None and bool(task.check(found, answer))


def parse(found: dict[str, Any], **fields: Any) -> str:
    """A parse contender with the calibrated thresholds."""
    options = {
        "accept_threshold": round(found["parse"]["full"]["threshold"], 6),
        "prefix_threshold": round(found["parse"]["prefix"]["threshold"], 6),
    } | fields
    return "parse:" + ",".join(f"{name}={value}" for name, value in options.items())


def easd(found: dict[str, Any], **fields: Any) -> str:
    """An easd contender with the calibrated thresholds."""
    names = ("target_entropy_threshold", "draft_entropy_threshold")
    options = {name: round(found["easd"][name], 4) for name in names} | fields
    return "easd:" + ",".join(f"{name}={value}" for name, value in options.items())


def contenders(found: dict[str, Any]) -> dict[str, list[list[str]]]:
    """What each run decodes with, level after level: a level adds to those before."""
    rules = [f"parse_{rule}={parse(found, boundary=rule)}" for rule in ("longest", "cascade", "random")]
    return {
        "greedy": [
            ["target", "draft"],
            ["lossless"],
            [f"parse={parse(found)}", f"easd={easd(found)}"],
            [f"easd_plain={easd(found, penalty=1)}", *rules],
            ['likelihood=semantic:scorer=likelihood,segment_stop="\\n",think_end=null'],
        ],
        "sampled": [
            ["target", "draft", "smc_4=smc:num_particles=4"],
            ["lossless", "multi_draft=lossless:num_chains=4", f"parse={parse(found)}"],
            ["smc_8=smc:num_particles=8", "smc_4_short=smc:num_particles=4,num_draft_tokens=4"],
            ["best_of_4=best_of:n=4", "majority_4=majority:n=4"],
        ],
        "one_by_one": [["target", "draft", "lossless", f"parse={parse(found)}", f"easd={easd(found)}"]],
        "stock": [["target", *(f"stock_{w}=assisted:assistant_ensemble_weight={w}" for w in (0.5, 0.7, 0.9))]],
        "own_schemes": [["target", "fly", "cactus"]],
    }


OPTIONS: dict[str, list[str]] = {
    "greedy": ["--batch-size", "20"],
    "sampled": ["--batch-size", "10", "--temperature", "0.7"],
    "own_schemes": [
        *("--batch-size", "20"),
        *(word for name in ("fly", "cactus") for word in ("--scheme-file", str(SCHEMES / f"{name}.py"))),
    ],
}


def run(name: str, arguments: argparse.Namespace) -> None:
    """One `hf-semspec eval` into a folder of `--out`."""
    levels = contenders(calibrate(arguments.data, arguments.out, arguments.calibrate_on))[name]
    chosen = [word for level in levels[: arguments.level + 1] for word in level]
    code = hf_semspec(
        [
            *("eval", "--model", TARGET, "--draft", DRAFT, "--task", "gsm8k", "--path", str(arguments.data)),
            *("--device", "cpu", "--max-new-tokens", str(NEW_TOKENS), "--limit", str(arguments.limit)),
            *OPTIONS.get(name, []),
            *("--out", str(arguments.out / name), "--schemes", *chosen),
        ]
    )
    if code:
        raise SystemExit(code)


def main() -> None:
    """Calibrate, then run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.real_pair.results")
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"of {', '.join(OPTIONS)}, one_by_one, stock")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="GSM8K's test problems")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="the first N problems (default 200)")
    parser.add_argument("--level", type=int, default=9, metavar="L", help="contenders up to this level (default: all)")
    parser.add_argument("--calibrate-on", type=int, default=16, metavar="N", help="the last N problems (default 16)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    calibrate(arguments.data, arguments.out, arguments.calibrate_on)
    for name in arguments.names:
        run(name, arguments)


if __name__ == "__main__":
    main()
