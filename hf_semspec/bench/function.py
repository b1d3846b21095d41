"""The bench as a function: from arguments to a report, or to the rest of one that was interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import integer
from ..evaluation.journal import Journal
from ..loading import device_by_name, dtype_by_name
from ..machine import describe
from ..timing import Progress, silent
from .measure import measure_point
from .results import Measured
from .rivals import DEFAULT_SCHEMES, Wanted, check_schemes
from .sizes import DRAFT_1_5M, TARGET_98M, Size
from .subject import Subject, controlled_subject, load_subject, read_prompts

NEEDS = ("scipy", "matplotlib", "rich")
POINT = "point"


def bench(
    model: str | PreTrainedModel | None = None,
    draft: str | PreTrainedModel | None = None,
    *,
    controlled: float | None = None,
    target_size: Size = TARGET_98M,
    draft_size: Size = DRAFT_1_5M,
    vocab: int | None = None,
    logit_scale: float = 12.0,
    schemes: str | Iterable[str | Wanted] | None = None,
    batches: Sequence[int] = (1, 4, 8),
    new_tokens: int = 128,
    repeats: int = 5,
    prompts: Sequence[str] | Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    seed: int = 0,
    alone: int | None = None,
    chat: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | Path | None = None,
    report: Progress = silent,
    command: str = "hf_semspec.bench.bench",
) -> Measured:
    """Measure the schemes beside plain decoding and transformers' own ways to speculate, all in turns in one process.

    Args:
        model (`str` or `PreTrainedModel`, *optional*): the target: a Hub id, a folder, or a loaded model (with
            `tokenizer`).
        draft (`str` or `PreTrainedModel`, *optional*): the draft: the same, or `bf16`, `nf4`, `int8` for a copy of the
            target.
        controlled (`float`, *optional*): in place of both: make a pair in code that agrees on this share of tokens;
            see [`controlled_pair`], also for `vocab`, `logit_scale` and the sizes.
        target_size, draft_size (`Size`): shapes of that pair.
        schemes (`str` or `Iterable[str | Contender]`, *optional*): what is measured beside the rivals, as `hf-semspec
            eval` writes contenders; all schemes by default.
        batches (`Sequence[int]`): prompts decoded together.
        new_tokens (`int`): the most new tokens of a prompt.
        repeats (`int`): timed turns.
        prompts (`Sequence[str]` or `Path`, *optional*): texts, or a file of them; eight of our own by default.
        dtype (`str`): of both models, as torch calls it; `auto` is as stored, float32 for a pair made in code.
        device (`str`, *optional*): where both live; cuda where there is one, else cpu.
        seed (`int`): of all draws, and of the pair made in code.
        alone (`int`, *optional*): of ways that take one prompt at a time, time only so many prompts of a batch.
        chat (`bool`): put prompts as a user's turn where the tokenizer has a chat template.
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): of models that are passed loaded.
        out (`str` or `Path`, *optional*): a folder for the result; an interrupted run is taken up again there.
        report (`Callable[[str], None]`): told what runs next.
        command (`str`): for the record.

    Raises:
        ValueError: a bad option, named, before anything is loaded.
    """
    wanted = check_schemes(schemes)
    batches = check_numbers(batches, new_tokens, repeats, seed, alone)
    check_pair(model, draft, controlled, vocab, logit_scale)
    resolved = dtype_by_name(dtype)
    device = device_by_name(device)
    texts = read_prompts(prompts) if isinstance(prompts, Path) else None if prompts is None else list(prompts)
    if texts is not None and controlled is not None:
        raise ValueError("--prompts: a controlled pair has no words, only ids; its prompts are made with it")
    check_installed()
    definition = {
        "subject": {"model": _named(model), "draft": _named(draft), "controlled": controlled, "seed": seed}
        | ({} if controlled is None else _shape(target_size, draft_size, vocab, logit_scale)),
        "schemes": {one.name: one.resolved(None) for one in wanted},
        "batches": list(batches),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "prompts": texts,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "alone": alone,
    }

    def load() -> Subject:
        if controlled is not None:
            kind = resolved if isinstance(resolved, torch.dtype) else torch.float32
            return controlled_subject(
                controlled,
                target_size=target_size,
                draft_size=draft_size,
                vocab=vocab,
                seed=seed,
                logit_scale=logit_scale,
                dtype=kind,
                device=device,
                prompts=max(8, *batches),
            )
        assert model is not None and draft is not None
        return load_subject(
            model,
            draft,
            texts,
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
            dtype=dtype,
            device=device,
            chat=chat,
        )

    journal = Journal(None if out is None else Path(out))
    journal.check(definition)
    journal.begin(definition)
    journal.mend()
    done = {record["batch"]: record[POINT] for record in journal.records()}
    if len(done) < len(batches):
        report("loading the models" if controlled is None else "building the pair")
        subject = load()
        session = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        journal.add({"session": session, "about": subject.about, **describe(command)})
        optional = [entry[0] for entry in DEFAULT_SCHEMES] if schemes is None else []
        for batch in batches:
            if batch in done:
                continue
            done[batch] = measure_point(
                subject,
                wanted,
                batch=batch,
                new_tokens=new_tokens,
                repeats=repeats,
                seed=seed,
                tuned=done[batches[0]]["tuned"] if batches[0] in done else None,
                alone=alone,
                optional=optional,
                report=report,
            )
            journal.add({"seed": 0, "batch": batch, "contender": POINT, "session": session, POINT: done[batch]})
    sessions = journal.sessions()
    meta = {**sessions[0], "run": {**definition, "subject": sessions[0]["about"]}, "sessions": len(sessions)}
    measured = Measured(meta, [done[batch] for batch in batches])
    if out is not None:
        measured.write(Path(out))
    return measured


def check_numbers(batches: Sequence[int], new_tokens: int, repeats: int, seed: int, alone: int | None) -> list[int]:
    """The batch sizes in order, each once, after a look at the other numbers.

    Raises:
        ValueError: one is out of its range.
    """
    sizes = sorted({integer("batch", size, 1, 1024) for size in batches})
    if not sizes:
        raise ValueError("`batch` must name at least one size, such as 1,4,8")
    integer("new_tokens", new_tokens, 2)
    integer("repeats", repeats, 1)
    integer("seed", seed, 0)
    if alone is not None:
        integer("alone", alone, 1)
    return sizes


def check_pair(
    model: Any, draft: Any, controlled: float | None, vocab: int | None = None, logit_scale: float = 1.0
) -> None:
    """See that exactly one pair is asked for.

    Raises:
        ValueError: none is, or two are; or an agreement outside [0, 1].
    """
    if controlled is None and (model is None or draft is None):
        missing = "--model" if model is None else "--draft"
        raise ValueError(f"{missing} is missing: pass --model and --draft, or --controlled AGREEMENT to make a pair")
    if controlled is not None:
        if model is not None or draft is not None:
            raise ValueError("--controlled makes both models: leave out --model and --draft, or leave it out")
        if not 0 <= controlled <= 1:
            raise ValueError(f"--controlled {controlled}: must be in [0, 1]")
    if vocab is not None:
        integer("vocab", vocab, 4)
    if not 0 < logit_scale < float("inf"):
        raise ValueError(f"--logit-scale {logit_scale}: must be a number > 0")


def check_installed() -> None:
    """See that what the bench computes and draws with is there.

    Raises:
        ImportError: something is not.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ImportError(f'The bench needs {", ".join(missing)}: pip install "hf-semspec[bench]"')


def _named(model: str | PreTrainedModel | None) -> str | None:
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    return model.config._name_or_path or type(model).__name__


def _shape(target: Size, draft: Size, vocab: int | None, logit_scale: float) -> dict[str, Any]:
    return {
        "target_size": vars(target),
        "draft_size": vars(draft),
        "vocab": vocab,
        "logit_scale": logit_scale,
    }
