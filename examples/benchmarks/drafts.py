"""What every kind of draft costs and is worth: acceptance, bytes and tokens per second, for the page on drafts.

Run it as `python -m examples.benchmarks.drafts`.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from hf_semspec import SemSpecConfig, load_draft
from hf_semspec.cli.comparison import PLAIN, Run, decode, plain_config
from hf_semspec.drafts.quantizations import MAKERS
from hf_semspec.drafts.weights import own_bytes, weight_bytes
from hf_semspec.evaluation.report import markdown_table
from hf_semspec.tools.loading import encode
from hf_semspec.tools.machine import describe
from hf_semspec.tools.models import NAME, PROBLEMS, load_smollm2
from hf_semspec.tools.wheels import located

from .marks import origin, write_between

NUM_DRAFT_TOKENS = 4
# Share of the target's layers in the drafts that are its first layers.
SHARES = (0.5, 0.8)


def self_drafts(model: PreTrainedModel) -> dict[str, Callable[[], PreTrainedModel]]:
    """How every draft that a loaded target can make of itself is made, by name."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    forms: dict[str, dict[str, Any]] = {"dtype=torch.bfloat16": {"dtype": torch.bfloat16}}
    forms |= {f'quantization="{name}"': {"quantization": name} for name in MAKERS}
    for share in SHARES:
        number = max(1, round(share * layers))
        forms[f"layers={number} (of {layers})"] = {"layers": number}
    return {name: lambda form=form: load_draft(model, **form) for name, form in forms.items()}  # type: ignore[misc]


def forms_of(name: str) -> dict[str, Callable[[], PreTrainedModel]]:
    """How every form of the draft `name` is made: as it is stored, in float32, and under every quantization."""
    forms: dict[str, dict[str, Any]] = {"as stored": {}, "dtype=torch.float32": {"dtype": torch.float32}}
    forms |= {f'quantization="{kind}"': {"quantization": kind} for kind in MAKERS}
    return {title: lambda form=form: load_draft(located(name), **form) for title, form in forms.items()}  # type: ignore[misc]


def measure(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: dict[str, Callable[[], PreTrainedModel]],
    prompts: Sequence[str],
    max_new_tokens: int,
    report: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Decode `prompts` greedily, plainly and with each draft under `lossless`, one after the other.

    Args:
        name (`str`): what the pair is called on the page.
        drafts (`dict[str, Callable[[], PreTrainedModel]]`): by name, how a draft is made; one at a time is kept.
        max_new_tokens (`int`): for each prompt.
        report (`Callable[[str], None]`): told what is being done.

    Returns:
        `dict[str, Any]`: JSON-safe; a draft whose package is missing has a row with the reason instead of numbers.
    """
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    config = SemSpecConfig(
        "lossless",
        num_draft_tokens=NUM_DRAFT_TOKENS,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    report(f"{name}: the target alone")
    plain = _decode_all(Run(PLAIN), model, ids, plain_config(config), None)
    rows: dict[str, Any] = {}
    for label, make in drafts.items():
        report(f"{name}: {label}")
        try:
            draft = make()
        except ImportError as error:
            rows[label] = {"missing": str(error)}
            continue
        run = _decode_all(Run("lossless"), model, ids, config, draft)
        rows[label] = {
            "acceptance_rate": run.acceptance_rate,
            "tokens_per_target_forward": run.tokens / run.target_forwards,
            "same_text": run.texts == plain.texts,
            "own_bytes": own_bytes(draft, model),
            "weight_bytes": weight_bytes(draft),
            "tokens_per_second": run.tokens_per_second,
        }
        del draft
    return {
        "name": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "own_bytes": own_bytes(model, torch.nn.Module()),
        "weight_bytes": weight_bytes(model),
        "tokens_per_second": plain.tokens_per_second,
        "drafts": rows,
    }


def _decode_all(run: Run, model: PreTrainedModel, ids: list[torch.Tensor], config: Any, draft: Any) -> Run:
    # A few unmeasured tokens, so that no draft pays for the first use of a kernel.
    short = SemSpecConfig("lossless", do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    decode(Run(run.name), model, ids[0], short if draft is not None else plain_config(short), draft=draft)
    for prompt in ids:
        decode(run, model, prompt, config, draft=draft)
    return run


def markdown(result: dict[str, Any]) -> str:
    """The tables of one result, ready for the page."""
    head = origin(result["meta"])
    if result["note"]:
        head = f"{head.removesuffix('.')}; {result['note']}."
    return "\n\n".join((head, *(_pair(pair) for pair in result["pairs"])))


def _pair(pair: dict[str, Any]) -> str:
    title = (
        f"**{pair['name']}**, {pair['dtype']}: {_size(pair['own_bytes'])} in memory, {_size(pair['weight_bytes'])} "
        f"read by a forward, {pair['tokens_per_second']:.1f} tokens/s alone. {pair['prompts']} prompts, "
        f"{pair['max_new_tokens']} new tokens each, greedy `lossless`, γ = {pair['num_draft_tokens']}."
    )
    header = [
        "draft",
        "acceptance",
        "tokens a target forward",
        "memory beside the target",
        "read by a draft forward",
        "tokens/s with it",
    ]
    rows = []
    for label, row in pair["drafts"].items():
        if "missing" in row:
            rows.append([f"`{label}`", "not installed", *[""] * (len(header) - 2)])
            continue
        rows.append(
            [
                f"`{label}`",
                f"{row['acceptance_rate']:.0%}",
                f"{row['tokens_per_target_forward']:.2f}",
                _size(row["own_bytes"]),
                _size(row["weight_bytes"]),
                f"{row['tokens_per_second']:.1f}",
            ]
        )
    different = [f"`{label}`" for label, row in pair["drafts"].items() if not row.get("same_text", True)]
    after = (
        f"\n\nThe text was not plain decoding's, token for token, with {', '.join(different)}." if different else ""
    )
    return f"{title}\n\n{markdown_table(header, rows)}{after}"


def _size(number: int) -> str:
    """Bytes in a unit that leaves three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


def _lab(folder: Path, prompts: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Path, list[str]]:
    """The trained pair of examples/arithmetic_lab: its target, tokenizer, the draft's folder, and held-out prompts."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:prompts]
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    return target, tokenizer, folder / "draft", [json.loads(line)["prompt"] for line in lines]


def main(argv: list[str] | None = None) -> int:
    """`python -m examples.benchmarks.drafts`."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.drafts", description=__doc__)
    parser.add_argument("--lab", type=Path, metavar="DIR", help="also the pair of examples/arithmetic_lab, in DIR")
    parser.add_argument("--pair", nargs=2, metavar="NAME", help="instead: this target, and this draft in every form")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--prompts", type=int, default=len(PROBLEMS), metavar="N", help="of each pair")
    parser.add_argument("--note", default="", help="a sentence on the machine, for the page")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write drafts.json there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables into this page, between its marks")
    parser.add_argument("--from", type=Path, metavar="JSON", dest="stored", help="take a stored result")
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    if arguments.stored is not None:
        result = json.loads(arguments.stored.read_text(encoding="utf-8"))
    else:
        result = _run(arguments, shlex.join(["python", "-m", "examples.benchmarks.drafts", *argv]))
    print(markdown(result))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "drafts.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.page is not None:
        write_between(markdown(result), arguments.page)
    return 0


def _run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every layer and forward of int8

    def report(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    result: dict[str, Any] = {"meta": describe(command), "note": arguments.note}
    length = arguments.max_new_tokens
    problems = PROBLEMS[: arguments.prompts]
    if arguments.pair is not None:
        name, small = arguments.pair
        model = AutoModelForCausalLM.from_pretrained(located(name), dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(located(name))
        result["pairs"] = [measure(f"{name}, {small}", model, tokenizer, forms_of(small), problems, length, report)]
        return result
    model, tokenizer = load_smollm2()
    result["pairs"] = [measure(NAME, model, tokenizer, self_drafts(model), problems, length, report)]
    if arguments.lab is not None:
        model, tokenizer, small, prompts = _lab(arguments.lab, arguments.prompts)
        drafts = {"the lab's draft": lambda: load_draft(small, dtype=torch.float32), **self_drafts(model)}
        result["pairs"].append(measure("arithmetic lab", model, tokenizer, drafts, prompts, length, report))
    return result


if __name__ == "__main__":
    sys.exit(main())
