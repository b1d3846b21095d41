"""CPU time a token of this checkout over another one's: `python -m examples.benchmarks.before DIR`.

Two processes, one for each package, take turns, one thread each; a turn decodes every case once. The ratio is taken
turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "lossless greedy": ("lossless", 1, {}),
    "lossless sampled": ("lossless", 1, {"do_sample": True}),
    "lossless batch 8": ("lossless", 8, {}),
    "easd": ("easd", 1, {"do_sample": True}),
    "smc": ("smc", 1, {"num_particles": 4}),
}
TOKENS = 120


def decode_forever() -> None:
    """Answer each line of standard input with the CPU seconds a token of every case."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_semspec import SemSpecConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes, eos_token_id=None, bos_token_id=None)).eval()
    for _ in sys.stdin:
        found = {}
        for name, (scheme, batch, fields) in CASES.items():
            ids = torch.randint(1000, (batch, 8), generator=torch.Generator().manual_seed(1))
            config = SemSpecConfig(scheme, max_new_tokens=TOKENS, num_draft_tokens=4, pad_token_id=0, **fields)
            torch.manual_seed(0)
            began = time.process_time()
            model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=model, generation_config=config)
            found[name] = (time.process_time() - began) / TOKENS / batch
        print(json.dumps(found), flush=True)


def worker(checkout: Path) -> subprocess.Popen[str]:
    """A process that decodes with the package of `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    return subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def turn(process: subprocess.Popen[str]) -> dict[str, float]:
    """One turn of a worker."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the commit to compare with")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        decode_forever()
        return
    # Not for a worker, whose package may have none of these.
    import numpy

    from examples.benchmarks.timing import median_ratio
    from hf_semspec.evaluation.report import markdown_table
    from hf_semspec.evaluation.statistics import bootstrap

    workers = [worker(path.resolve()) for path in (Path(__file__).parents[2], arguments.before)]
    for process in workers:
        turn(process)  # warm up
    turns = [[turn(process) for process in workers] for _ in range(arguments.turns)]
    rows = []
    for name in CASES:
        ours, theirs = ([turn[place][name] for turn in turns] for place in (0, 1))
        interval = bootstrap([now / before for now, before in zip(ours, theirs, strict=True)], numpy.median)
        low, high = interval if interval is not None else (numpy.nan, numpy.nan)
        ratio = median_ratio(ours, theirs)
        rows.append([name, f"{1000 * numpy.median(ours):.2f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    print(markdown_table(["case", "ms a token", "over before", "95 %"], rows))
    for process in workers:
        process.kill()


if __name__ == "__main__":
    main()
