"""Where greedy lossless text first leaves plain decoding's in half precision, and how near a tie the two tokens were.

`python -m examples.real_pair.rounding --data FILE --out DIR [--limit N] [--page FILE]`. Both models run in bfloat16,
as the text is written; the gap at each first difference is measured by the target in float32, on the text before it. A
gap far above what bfloat16 can round away would be a fault and no tie.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from examples.benchmarks.marks import origin, write_between
from hf_semspec import SemSpecConfig
from hf_semspec.evaluation.report import markdown_table
from hf_semspec.evaluation.tasks import gsm8k
from hf_semspec.tools.loading import encode
from hf_semspec.tools.machine import describe

from .results import NEW_TOKENS as RECORDED_TOKENS
from .results import load_pair

NEW_TOKENS = 220
NAME = "rounding"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two texts differ, `None` if they are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(target: Any, draft: Any, ids: torch.Tensor, gamma: int) -> dict[str, Any]:
    """The texts of plain decoding and of the exact scheme for one prompt `(1, length)`, and their first difference.

    At the difference: both tokens, and the text before it; the logits are added by [`add_gaps`].
    """
    common = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    mask = torch.ones_like(ids)
    plain = target.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**common))
    config = SemSpecConfig("lossless", num_draft_tokens=gamma, **common)
    ours = target.generate(ids, attention_mask=mask, assistant_model=draft, generation_config=config)
    width = ids.shape[1]
    texts = [row[0, width:].tolist() for row in (plain, ours)]
    place = first_difference(*texts)
    entry: dict[str, Any] = {"prompt": ids[0].tolist(), "tokens": [len(text) for text in texts], "differs_at": place}
    if place is not None and place < min(entry["tokens"]):
        before = plain[:, : width + place]
        pair = [text[place] for text in texts]
        entry |= {"before": before[0, width:].tolist(), "pair": pair}
    return entry


@torch.no_grad()
def logits_of(target: Any, ids: torch.Tensor, pair: Sequence[int]) -> dict[str, Any]:
    """The two tokens' logits after `ids`, their gap, and the ranks that they have, from one forward over all of it."""
    row = target(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    values = [float(row[token]) for token in pair]
    ranks = [int((row > row[token]).sum()) for token in pair]
    return {"logits": values, "gap": abs(values[0] - values[1]), "ranks": ranks}


def add_gaps(target: Any, entries: Sequence[dict[str, Any]], save: Callable[[], None]) -> None:
    """Give every difference the figures from the target as it is, then in float32, to which it is cast where it
    stands; `save` is called after each."""
    for kind in ("bfloat16", "float32"):
        left = [entry for entry in entries if "pair" in entry and kind not in entry]
        if left and kind == "float32":
            target.float()
        for entry in left:
            ids = torch.tensor([[*entry["prompt"], *entry["before"]]])
            entry[kind] = logits_of(target, ids, entry["pair"])
            save()


def from_records(folder: Path, tokenizer: Any, task: Any, name: str, limit: int) -> list[dict[str, Any]]:
    """The first differences between the target's texts and those of the contender `name` in a run of
    `hf-semspec eval`, of the first `limit` problems. The texts are encoded anew."""
    texts: dict[tuple[str, int], list[int]] = {}
    for part in sorted((folder / "parts").glob("*.jsonl")):
        for record in map(json.loads, part.read_text(encoding="utf-8").splitlines()):
            if record.get("contender") not in ("target", name):
                continue
            for prompt, text, length in zip(record["prompts"], record["texts"], record["new_tokens"], strict=True):
                ids = tokenizer(text, add_special_tokens=False).input_ids
                ended = [tokenizer.eos_token_id] * (length > len(ids))
                texts[record["contender"], prompt] = [*ids, *ended]
    entries = []
    for prompt in range(limit):
        pair = [texts.get((who, prompt)) for who in ("target", name)]
        if pair[0] is None or pair[1] is None:
            continue
        place = first_difference(*pair)
        entry: dict[str, Any] = {"prompt": encode(tokenizer, task.question(prompt))[0].tolist()}
        entry |= {"tokens": [len(text) for text in pair], "differs_at": place}
        if place is not None and place < min(entry["tokens"]):
            entry |= {"before": pair[0][:place], "pair": [text[place] for text in pair]}
        entries.append(entry)
    return entries


def markdown(result: dict[str, Any]) -> str:
    """The result as a page shows it."""
    entries = result["answers"]
    parted = [entry for entry in entries if entry["differs_at"] is not None]
    rows = [
        [
            str(index + 1),
            str(entry["differs_at"]),
            *(f"{entry[kind]['gap']:.3f}" for kind in ("bfloat16", "float32")),
            " and ".join(str(rank + 1) for rank in entry["float32"]["ranks"]),
            f"{max(abs(value) for value in entry['float32']['logits']):.1f}",
        ]
        for index, entry in enumerate(entries)
        if "float32" in entry
    ]
    head = ["answer", "first difference at token", "gap, bfloat16", "gap, float32", "ranks, float32", "logit"]
    gaps = sorted(entry["float32"]["gap"] for entry in entries if "float32" in entry)
    text = (
        f"{origin(result['meta'])}\n\n{len(parted)} of {len(entries)} answers of up to {result['new_tokens']} tokens "
        f"left plain decoding's, at γ = {result['gamma']}; {len(gaps)} of the differences have been looked at."
    )
    if gaps:
        rounded = max(entry["bfloat16"]["gap"] for entry in entries if "float32" in entry)
        text += (
            f" Their gaps in float32: median {gaps[len(gaps) // 2]:.3f}, largest {gaps[-1]:.3f}; in bfloat16 the "
            f"largest is {rounded:.3f}."
        )
    return text + ("\n\n" + markdown_table(head, rows) if rows else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the JSON after each answer, and the page if one is named; 0."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog=f"python -m examples.real_pair.{NAME}", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="GSM8K's test problems")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="answers (default 8)")
    parser.add_argument("--gamma", type=int, default=5, metavar="N", help="tokens drafted a round (default 5)")
    parser.add_argument("--records", type=Path, metavar="DIR", help="decode nothing: the texts of this run of eval")
    parser.add_argument("--page", type=Path, metavar="FILE", help="measure nothing, write the result into this page")
    arguments = parser.parse_args(given)
    file = arguments.out / f"{NAME}.json"
    if arguments.page is not None:
        write_between(markdown(json.loads(file.read_text(encoding="utf-8"))), arguments.page, NAME)
        return 0
    command = shlex.join(["python", "-m", f"examples.real_pair.{NAME}", *given])
    result: dict[str, Any] = {"meta": describe(command), "new_tokens": NEW_TOKENS, "gamma": arguments.gamma}
    result["answers"] = []
    if file.exists():
        result = json.loads(file.read_text(encoding="utf-8"))
    task = gsm8k(arguments.data)
    target, draft, tokenizer = load_pair()
    if arguments.records is not None and not result["answers"]:
        result["answers"] = from_records(arguments.records, tokenizer, task, "lossless", arguments.limit)
        result["new_tokens"] = RECORDED_TOKENS
    for index in range(len(result["answers"]), 0 if arguments.records is not None else arguments.limit):
        ids = encode(tokenizer, task.question(index))
        result["answers"].append(measure(target, draft, ids, result["gamma"]))
        print(index, result["answers"][-1]["differs_at"], file=sys.stderr, flush=True)
        write(file, result)
    add_gaps(target, result["answers"], lambda: write(file, result))
    print(markdown(result))
    return 0


def write(file: Path, result: dict[str, Any]) -> None:
    """The file appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    scratch.replace(file)


if __name__ == "__main__":
    sys.exit(main())
