"""Trains the probes of `semantic` for the lab's pair: `python -m examples.arithmetic_lab.probes`.

A segment is a line, and lines mean the same if they are equal. The probes are trained for temperature 0.7, on problems
of `calibration.jsonl` that no threshold is calibrated on.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_semspec import SemanticConfig, train_semantic_probe

from .problems import HERE

FIRST = 300  # thresholds of the other schemes come from the problems before
SEGMENTS = SemanticConfig(segment_stop="\n", max_segment_tokens=12, think_end=None)
SAMPLING = GenerationConfig(do_sample=True, temperature=0.7, top_k=0, top_p=1.0)


def main() -> None:
    """Train for both kinds of labels, from the same continuations, and print what held-out prompts say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/probes"), metavar="DIR", help="keeps the continuations")
    parser.add_argument("--problems", type=int, default=200, metavar="N", help="problems (default 200)")
    parser.add_argument("--prefixes", type=int, default=4, metavar="N", help="prefixes a problem (default 4)")
    parser.add_argument("--continuations", type=int, default=20, metavar="M", help="a prefix and model (default 20)")
    parser.add_argument("--out", type=Path, default=HERE / "probes", metavar="DIR")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(HERE / role, dtype=torch.float32).eval() for role in ("target", "draft")
    )
    lines = (HERE / "calibration.jsonl").read_text(encoding="utf-8").splitlines()[FIRST:]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines[: arguments.problems]]
    for labels in ("cross", "own"):
        began = time.perf_counter()
        probe = train_semantic_probe(
            target,
            draft,
            chats,
            num_continuations=arguments.continuations,
            max_prefixes=arguments.prefixes,
            labels=labels,
            config=SEGMENTS,
            generation_config=SAMPLING,
            tokenizer=tokenizer,
            max_new_tokens=104,
            folder=arguments.work,
        )
        probe.description["models"] = {role: f"arithmetic lab, {role}" for role in ("target", "draft")}
        probe.save_pretrained(arguments.out / labels)
        report = {name: value for name, value in probe.report.items() if name != "reliability"}
        print(labels, f"{time.perf_counter() - began:.0f} s", json.dumps(report))
        try:
            probe.plot(arguments.out / f"{labels}.png")
        except ImportError:
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
