"""The command line `hf-semspec`: single prompts, files of them, pages, measurements and exports."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from ..configuration import SemSpecConfig
from ..drafts.choose import asks_for_model
from ..schemes.table import SCHEMES
from ..tools.loading import (
    DRAFT_HELP,
    TARGET_HELP,
    device_by_name,
    dtype_by_name,
    encode,
    load_named_draft,
)
from ..tools.wheels import located
from . import demo as demo_command
from . import models
from .comparison import PLAIN, Run, comparison_table, decode, plain_config
from .console import console as make_console
from .scheme_files import add_scheme_file, run_scheme_files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; by default the process's own.

    Returns:
        `int`: 0, or 2 after an error of the user's input or installation, printed in one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        run_scheme_files(argv)  # first, for the parser knows the schemes by name
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace, str], int] = arguments.run
        return run(arguments, shlex.join(["hf-semspec", *argv]))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"hf-semspec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-semspec", description="Speculative decoding behind generate().")
    add_scheme_file(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="every scheme beside plain decoding")
    demo_command.add_arguments(demo)
    demo.set_defaults(run=demo_command.execute)

    generate = commands.add_parser("generate", help="decode a prompt and compare, or a file of prompts")
    _add_decoding(generate, prompt=False)
    from ..jobs import command as job_command

    job_command.add_arguments(generate)
    from ..jobs import served

    served.add_arguments(commands.add_parser("parse", help="a file of prompts by parse, over two servers"), _setting)
    generate.set_defaults(run=_generate)

    trace = commands.add_parser("trace", help="decode a prompt with a scheme and save a page that shows every token")
    _add_decoding(trace)
    trace.add_argument("--out", required=True, metavar="PAGE.html", help="the page to write")
    trace.add_argument("--json", metavar="FILE", help="write the same record as JSON too")
    trace.set_defaults(run=_trace)

    bench = commands.add_parser("bench", help="speed and memory of every scheme and its rivals on your pair")
    advise = commands.add_parser("check", help="what your pair promises for each scheme, before anything is decoded")
    from ..bench import command

    command.add_arguments(bench)
    bench.set_defaults(run=command.execute)
    command.add_check_arguments(advise)
    advise.set_defaults(run=command.execute_check)

    export = commands.add_parser("export-recipe", help="write a folder for generate(custom_generate=...)")
    from ..hub import export as recipe_command

    recipe_command.add_arguments(export, _setting)
    export.set_defaults(run=recipe_command.execute)

    evaluate = commands.add_parser("eval", help="quality beside speed: every scheme and its rivals on a task of yours")
    from ..evaluation import command as evaluation_command

    evaluation_command.add_arguments(evaluate)
    evaluate.set_defaults(run=evaluation_command.execute)
    offered = commands.add_parser("models", help="models that can be had without the Hub: list them, fetch them")
    models.add_arguments(offered)
    offered.set_defaults(run=models.execute)
    for command_parser in (generate, trace, bench, advise, export, evaluate):
        add_scheme_file(command_parser)
    return parser


def _add_decoding(parser: argparse.ArgumentParser, *, prompt: bool = True) -> None:
    """What to decode, by which pair; the demo's own model by default."""
    own = " (default: the demo's SmolLM2-135M and a copy of it)"
    parser.add_argument("--model", help=TARGET_HELP + own)
    parser.add_argument("--draft", help=DRAFT_HELP + "; none with --set draft=ngram")
    parser.add_argument(
        "--scheme", default="lossless", metavar="NAME", help=", ".join(SCHEMES) + " (default lossless)"
    )
    parser.add_argument("--prompt", required=prompt, help='the prompt; "-" reads it from standard input')
    parser.add_argument("--raw", action="store_true", help="pass the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    parser.add_argument(
        "--dtype", default="auto", help="the target's dtype (float32, bfloat16, ...; default: as stored)"
    )
    parser.add_argument("--device", help="where both models live (default: cuda if there is one, else cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        dest="settings",
        help="a field of the scheme or of GenerationConfig; may be repeated",
    )


def _generate(arguments: argparse.Namespace, command: str) -> int:
    console = make_console()
    logging.disable_progress_bar()
    config = _config_of(arguments)
    if arguments.input is not None:
        from ..jobs import command as job_command

        return job_command.execute(arguments, config)
    if arguments.prompt is None:
        raise ValueError("--prompt is missing, or --input with --output")
    model, tokenizer, draft, ids = _pair_of(arguments, config, console)
    run, plain = Run(arguments.scheme), Run(PLAIN)
    torch.manual_seed(arguments.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    decode(run, model, ids, config, draft=draft, streamer=streamer, tokenizer=tokenizer)
    torch.manual_seed(arguments.seed)
    with console.status("plain decoding of the same prompt"):
        decode(plain, model, ids, plain_config(config), tokenizer=tokenizer)
    console.print()
    console.print(comparison_table([plain, run]))
    return 0


def _trace(arguments: argparse.Namespace, command: str) -> int:
    console = make_console()
    logging.disable_progress_bar()
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    config = _config_of(arguments, trace=True)
    model, tokenizer, draft, ids = _pair_of(arguments, config, console)
    torch.manual_seed(arguments.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    output = decode(Run(arguments.scheme), model, ids, config, draft=draft, streamer=streamer, tokenizer=tokenizer)
    output.trace.save_html(out, tokenizer)
    console.print(
        f"\n{out}: {out.stat().st_size / 1024:.0f} kB, open it in a browser", highlight=False, soft_wrap=True
    )
    if arguments.json:
        output.trace.save_json(arguments.json)
    return 0


def _config_of(arguments: argparse.Namespace, *, trace: bool = False) -> SemSpecConfig:
    """The config that the arguments describe; greedy unless they ask for sampling, whatever the model's defaults."""
    settings = dict(arguments.settings)
    settings.setdefault("max_new_tokens", arguments.max_new_tokens)
    for name in ("return_dict_in_generate", "num_return_sequences", "trace"):
        if name in settings:
            raise ValueError(f"--set {name}: the command decodes one text and reads its statistics itself")
    config = SemSpecConfig(arguments.scheme, **settings, trace=trace, return_dict_in_generate=True)
    # The model's own sampling defaults would make texts incomparable.
    if config.do_sample is None:
        config.do_sample = False
    return config


def _pair_of(arguments: argparse.Namespace, config: SemSpecConfig, console: Any) -> tuple[Any, Any, Any, torch.Tensor]:
    """Target, tokenizer, draft (`None` where `config` has no use for one) and the prompt's ids."""
    device = device_by_name(arguments.device)
    dtype = dtype_by_name(arguments.dtype)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    name, draft_name = arguments.model, arguments.draft
    with_draft = asks_for_model(config)
    if draft_name is not None and not with_draft:
        raise ValueError('--draft is of no use with draft="ngram": leave it out, or --set draft=ngram+model')
    if name is None:
        from ..tools.models import smollm2_folder

        name, draft_name = str(smollm2_folder()), draft_name or ("nf4" if device.startswith("cuda") else "bf16")
    elif draft_name is None and with_draft:
        raise ValueError(f"--draft is missing: {DRAFT_HELP}")
    with console.status(f"loading {name}"):
        name = located(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device}).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not with_draft:
        return model, tokenizer, None, encode(tokenizer, prompt, chat=not arguments.raw)
    with console.status(f"loading the draft {draft_name}"):
        draft = load_named_draft(draft_name, model, device=device)
    return model, tokenizer, draft, encode(tokenizer, prompt, chat=not arguments.raw)


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
