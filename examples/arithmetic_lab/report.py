"""Measures the trained pair on the held-out problems: `python -m examples.arithmetic_lab.report`."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from .evaluate import judge_rates, right_answers
from .packing import Packer, Row
from .problems import HERE
from .rows import drafted_rows, right_row
from .task import check, corrupt, parse_question


def read_problems(path: Path, limit: int) -> list[Any]:
    """The first problems of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    return [parse_question(json.loads(line)["prompt"]) for line in lines]


def measure(target: Path, draft: Path, limit: int) -> dict[str, Any]:
    """Accuracy of both models, float32 and bfloat16, and the error rates of the verdicts.

    Args:
        target: The target's folder.
        draft: The draft's folder.
        limit: The number of held-out problems.
    """
    packer = Packer(AutoTokenizer.from_pretrained(target))
    problems = read_problems(HERE / "heldout.jsonl", limit)
    result: dict[str, Any] = {"problems": len(problems), "right": {}, "judge": {}}
    models = {}
    for role, folder in (("target", target), ("draft", draft)):
        model = models[role] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        entry: dict[str, Any] = {"parameters": model.num_parameters()}
        low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for name, writer in (("float32", model), ("bfloat16", low)):
            entry[name] = right_answers(writer, packer, problems)
        result["right"][role] = entry
    rng = random.Random("report")
    judged = {
        "corrupted": [Row(p, *corrupt(rng, p)) if index % 2 else right_row(p) for index, p in enumerate(problems)]
    }
    for temperature in (0.0, 0.7, 1.0):
        rows = drafted_rows(models["draft"], packer.tokenizer, problems, temperature, 0.25)
        judged[f"draft_temperature_{temperature}"] = rows
        hits = sum(check(row.text, row.problem.answer) for row in rows)
        result["right"]["draft"][f"written_temperature_{temperature}"] = hits / len(rows)
    for source, rows in judged.items():
        result["judge"][source] = judge_rates(models["target"], packer, rows)
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "draft")
    parser.add_argument("--limit", type=int, default=2400)
    parser.add_argument("--out", type=Path, default=HERE / "heldout.json")
    options = parser.parse_args()
    result = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    result |= measure(options.target, options.draft, options.limit)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
