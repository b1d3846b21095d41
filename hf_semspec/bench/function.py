"""The bench as a function: from arguments to a report, or to the rest of one that was interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..common.fields import integer
from ..evaluation.contenders import Contender as Wanted
from ..evaluation.journal import Journal
from ..tools.machine import describe
from .measure import measure_point
from .progress import Progress, silent
from .request import PairRequest
from .results import Measured
from .rivals import DEFAULT_SCHEMES, check_schemes

POINT = "point"


def bench(
    model: str | PreTrainedModel | None = None,
    draft: str | PreTrainedModel | None = None,
    *,
    schemes: str | Iterable[str | Wanted] | None = None,
    batches: Sequence[int] = (1, 4, 8),
    new_tokens: int = 128,
    repeats: int = 5,
    alone: int | None = None,
    out: str | Path | None = None,
    report: Progress = silent,
    command: str = "hf_semspec.bench.bench",
    **pair: Any,
) -> Measured:
    """Measure the schemes beside plain decoding and transformers' own ways to speculate, all in turns in one process.

    Args:
        model, draft (`str` or `PreTrainedModel`, *optional*): target and draft; see [`PairRequest`].
        schemes (`str` or `Iterable[str | Contender]`, *optional*): what is measured beside the rivals, as `hf-semspec
            eval` writes contenders; all schemes by default.
        batches (`Sequence[int]`): prompts decoded together.
        new_tokens (`int`): the most new tokens of a prompt.
        repeats (`int`): timed turns.
        alone (`int`, *optional*): of ways that take one prompt at a time, time only so many prompts of a batch.
        out (`str` or `Path`, *optional*): a folder for the result; an interrupted run is taken up again there.
        report (`Callable[[str], None]`): told what runs next.
        command (`str`): for the record.
        pair: the other fields of [`PairRequest`]: `controlled`, `prompts`, `dtype`, `device`, `seed`, ...

    Raises:
        ValueError: a bad option, named, before anything is loaded.
    """
    wanted = check_schemes(schemes)
    sizes = sorted({integer("batch", size, 1, 1024) for size in batches})
    if not sizes:
        raise ValueError("`batch` must name at least one size, such as 1,4,8.")
    integer("new_tokens", new_tokens, 2)
    integer("repeats", repeats, 1)
    if alone is not None:
        integer("alone", alone, 1)
    request = PairRequest(model=model, draft=draft, **pair)
    definition = {
        "pair": request.describe(),
        "schemes": {one.name: one.resolved(None) for one in wanted},
        "batches": sizes,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "alone": alone,
    }
    journal = Journal(None if out is None else Path(out))
    journal.check(definition)
    journal.begin(definition)
    journal.mend()
    done = {record["batch"]: record[POINT] for record in journal.records()}
    if len(done) < len(sizes):
        options: dict[str, Any] = {"new_tokens": new_tokens, "repeats": repeats, "alone": alone, "report": report}
        options["optional"] = [entry[0] for entry in DEFAULT_SCHEMES] if schemes is None else []
        _measure_rest(journal, request, wanted, sizes, done, command, options)
    sessions = journal.sessions()
    meta = {**sessions[0], "run": definition, "sessions": len(sessions)}
    measured = Measured(meta, [done[size] for size in sizes])
    if out is not None:
        measured.write(Path(out))
    return measured


def _measure_rest(
    journal: Journal,
    request: PairRequest,
    wanted: Sequence[Wanted],
    sizes: Sequence[int],
    done: dict[int, dict[str, Any]],
    command: str,
    options: dict[str, Any],
) -> None:
    """Load the pair and measure the batch sizes that `done` lacks; each is on record as soon as it is there."""
    options["report"]("loading or building the pair")
    subject = request.load(prompts=max(8, *sizes))
    session = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    journal.add({"session": session, "about": subject.about, **describe(command)})
    for size in (size for size in sizes if size not in done):
        tuned = done[sizes[0]]["tuned"] if sizes[0] in done else None
        done[size] = measure_point(subject, wanted, batch=size, seed=request.seed, tuned=tuned, **options)
        journal.add({"seed": 0, "batch": size, "contender": POINT, "session": session, POINT: done[size]})
