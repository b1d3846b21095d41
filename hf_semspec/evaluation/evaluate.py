"""The evaluator as a function: from arguments to a report."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..common.fields import integer
from ..tools.loading import device_by_name, dtype_by_name, is_own_draft, load_named_draft
from ..tools.wheels import located
from .contenders import Contender, parse_contenders
from .decoding import Pair
from .grids import Grid, parse_grid
from .journal import Journal
from .report import Report
from .run import Plan, run
from .summary import summarize
from .tasks import Task, task_by_name

NEEDS = ("scipy", "matplotlib", "rich")
# A process that is done waits for the slowest, however long that takes.
PATIENCE = timedelta(days=30)


def evaluate(
    model: str | PreTrainedModel,
    draft: str | PreTrainedModel | None,
    task: str | Task,
    contenders: str | Iterable[str | Contender] = (),
    *,
    grids: str | Sequence[str] = (),
    path: str | Path | None = None,
    extract: str | None = None,
    template: str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    seeds: Sequence[int] = (0,),
    temperature: float | None = None,
    max_new_tokens: int = 256,
    dtype: str = "auto",
    device: str | None = None,
    chat: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    command: str = "hf_semspec.evaluation.evaluate",
) -> Report:
    """Decode a task with every contender, in turns, and compare accuracy and speed with the target's.

    Under `accelerate launch` the batches are dealt out to the processes; every process returns the report of all.

    Args:
        model (`str` or `PreTrainedModel`): the target: a Hub id, a folder, or a loaded model (with `tokenizer`).
        draft (`str` or `PreTrainedModel`, *optional*): the draft: the same, or made from the target
            (`bf16`, `nf4`, `layers:N`, ...; see [`loading.load_named_draft`]). Not needed by `target` and `majority`.
        task (`str` or `Task`): `gsm8k` or `jsonl` with `path`, or a task of one's own.
        contenders (`str` or `Iterable[str | Contender]`): see [`parse_contenders`]. The target is always among them.
        grids (`str` or `Sequence[str]`): see [`parse_grid`].
        path, extract, template: of the task; see [`tasks.jsonl`].
        limit (`int`, *optional*): take the first so many problems.
        batch_size (`int`): prompts decoded together.
        seeds (`Sequence[int]`): contenders that draw run once for each seed, others under the first alone.
        temperature (`float`, *optional*): sample at this temperature, from the whole law; greedy by default.
        max_new_tokens (`int`): of every answer.
        dtype (`str`): of both models, as torch calls it; `auto` is as stored.
        device (`str`, *optional*): where both live; cuda if there is one, else cpu.
        chat (`bool`): put prompts as a user's turn where the tokenizer has a chat template.
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): of models that are passed loaded.
        out (`str` or `Path`, *optional*): a folder: finished batches are kept there at once, the same call goes on
            where it was interrupted, and the report is written there.
        progress (`bool`): show a bar on standard error.
        command (`str`): what is noted as the command.

    Raises:
        ValueError: bad arguments, before a model is loaded; or what a scheme refuses, before anything is measured.
        ImportError: scipy, matplotlib or rich is missing.
    """
    _check_installed()
    parsed_grids = _grids(grids)
    chosen = _all_contenders(contenders, parsed_grids)
    if isinstance(task, str):
        task = task_by_name(task, path, extract=extract, template=template)
    plan = _plan(task, chosen, limit, batch_size, seeds, temperature, max_new_tokens)
    _check_draft(chosen, draft)
    dtype_by_name(dtype)
    definition = _define(plan, model, draft, dtype, chat)
    state = processes(device)
    device = f"cuda:{state.local_process_index}" if device is None and state.device.type == "cuda" else device
    device = device_by_name(device)
    journal = Journal(None if out is None else Path(out), state.process_index)
    if out is None and state.num_processes > 1:
        raise ValueError("several processes meet in a folder: pass --out DIR")
    journal.check(
        definition, lambda number: _define(replace(plan, task=plan.task.first(number)), model, draft, dtype, chat)
    )
    journal.begin(definition)
    load = functools.partial(load_pair, model, draft, tokenizer, draft_tokenizer, dtype, device, chat)
    run(
        plan,
        load,
        journal,
        command=command,
        process=state.process_index,
        processes=state.num_processes,
        progress=progress and state.is_main_process,
    )
    state.wait_for_everyone()
    records = journal.records()
    sessions = journal.sessions()
    meta = {**sessions[0], "run": definition, "sessions": sessions}
    rows = summarize(records, chosen, temperature, plan.seeds)
    report = Report(meta, rows, records, parsed_grids)
    if out is not None and state.is_main_process:
        journal.merge()
        report.write(Path(out))
    return report


def sweep(model: Any, draft: Any, task: str | Task, grid: str, **arguments: Any) -> dict[str, Any]:
    """Run one scheme over a grid of its options beside the target; arguments as of [`evaluate`].

    Args:
        model, draft, task: as of [`evaluate`].
        grid (`str`): such as `smc:num_particles=1|4|8,num_draft_tokens=4|8`.
        arguments: the rest of [`evaluate`]'s.

    Returns:
        `dict`: see [`Grid.table`]; [`plots.plot_heat_maps`] draws it.
    """
    report = evaluate(model, draft, task, grids=grid, **arguments)
    return report.grids[0].table(report.rows)


def _grids(texts: str | Sequence[str]) -> list[Grid]:
    grids = [parse_grid(text) for text in ([texts] if isinstance(texts, str) else texts)]
    names = [grid.name for grid in grids]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two grids are called {name!r}: name one, as in other={name}:...")
    return grids


def _all_contenders(contenders: str | Iterable[str | Contender], grids: Sequence[Grid]) -> tuple[Contender, ...]:
    if not isinstance(contenders, str):
        contenders = list(contenders)
        texts = [one for one in contenders if isinstance(one, str)]
        made = [one for one in contenders if isinstance(one, Contender)]
    else:
        texts, made = [contenders] if contenders else [], []
    cells = [cell for grid in grids for cell in grid.contenders()]
    return tuple(parse_contenders(texts, also=[*made, *cells]))


def _plan(
    task: Task,
    contenders: tuple[Contender, ...],
    limit: int | None,
    batch_size: int,
    seeds: Sequence[int],
    temperature: float | None,
    max_new_tokens: int,
) -> Plan:
    if limit is not None:
        integer("limit", limit, 1)
    integer("batch_size", batch_size, 1)
    integer("max_new_tokens", max_new_tokens, 1)
    seeds = tuple(integer("seeds", seed, 0) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {list(seeds)}: give at least one, and none twice")
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature}: must be > 0; leave it out for greedy decoding")
    return Plan(
        task=task.first(limit),
        contenders=contenders,
        batch_size=batch_size,
        seeds=seeds,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )


def _define(plan: Plan, model: Any, draft: Any, dtype: str, chat: bool) -> dict[str, Any]:
    """What two runs must have in common to be one."""
    return {
        "model": _name(model),
        "draft": None if draft is None else _name(draft),
        "task": plan.task.describe(),
        "contenders": {one.name: one.resolved(plan.temperature) for one in plan.contenders},
        "batch_size": plan.batch_size,
        "seeds": list(plan.seeds),
        "temperature": plan.temperature,
        "max_new_tokens": plan.max_new_tokens,
        "dtype": dtype,
        "chat_template": chat,
    }


def _name(model: str | PreTrainedModel) -> str:
    return str(model) if isinstance(model, str | Path) else model.config._name_or_path or type(model).__name__


def _check_draft(contenders: Sequence[Contender], draft: Any) -> None:
    hungry = [contender.name for contender in contenders if contender.needs_draft]
    if draft is None and hungry:
        raise ValueError(f"contender {hungry[0]!r} needs a draft: pass --draft")


def _check_installed() -> None:
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ImportError(f'The evaluator needs {", ".join(missing)}: pip install "hf-semspec[eval]"')


def processes(device: str | None) -> Any:
    """accelerate's view of the processes: one, unless a launcher started several."""
    from accelerate import PartialState

    cpu = device_by_name(device).startswith("cpu")
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ValueError(
            f"{started} processes were started, but accelerate sees {state.num_processes} on {state.device}: pass "
            "--device cpu, or start as many processes as there are devices"
        )
    return state


def load_pair(
    model: str | PreTrainedModel,
    draft: str | PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    dtype: str,
    device: str,
    chat: bool,
) -> Pair:
    """Both models with their tokenizers, each given loaded or by name; arguments as of [`evaluate`]."""
    resolved = dtype_by_name(dtype)
    if isinstance(model, str | Path):
        model = located(model)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
        model = AutoModelForCausalLM.from_pretrained(model, dtype=resolved, device_map={"": device}).eval()
    if tokenizer is None:
        raise ValueError("a model that is passed loaded needs its tokenizer: pass tokenizer=...")
    if isinstance(draft, str | Path):
        name = str(draft)
        if not is_own_draft(name) and draft_tokenizer is None:
            draft_tokenizer = _tokenizer_of(name)
        stored = resolved if isinstance(resolved, torch.dtype) else None
        draft = load_named_draft(name, model, device=device, dtype=stored)
    return Pair(model=model, tokenizer=tokenizer, draft=draft, draft_tokenizer=draft_tokenizer, chat=chat)


def _tokenizer_of(name: str) -> PreTrainedTokenizerBase | None:
    """The draft's tokenizer, `None` where its folder has none and so shares the target's."""
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(located(name))
    except (OSError, ValueError):
        return None
    return loaded
