"""The sweeps of docs/benchmarks.md: agreements and batches, scaling, where a round's time goes. All can be taken up
again where they were interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_semspec.bench import SIZES, Size
from hf_semspec.bench.measure import measure_point
from hf_semspec.bench.progress import Progress, silent
from hf_semspec.bench.request import check_installed
from hf_semspec.bench.results import write_json
from hf_semspec.bench.rivals import COMPILED_DRAFT, DEFAULT_SCHEMES, check_schemes
from hf_semspec.bench.subject import Subject, controlled_subject
from hf_semspec.evaluation.contenders import Contender as Wanted
from hf_semspec.evaluation.journal import Journal
from hf_semspec.tools.machine import describe

from .profiling import profile

AGREEMENTS = (0.5, 0.65, 0.8, 0.9)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep measures; the defaults are those of the page.

    Args:
        target, draft (`Size`): shapes of the controlled pairs.
        vocab (`int`): their vocabulary.
        agreements (`tuple[float, ...]`): of `pairs`.
        batches (`tuple[int, ...]`): of `pairs`, in the order in which they are measured.
        new_tokens (`int`): of every call of `pairs`, and of the calls of `scaling` that do not vary it.
        repeats (`int`): timed turns; `pairs` takes one less at batches above 1.
        scaled_tokens, scaled_batches, scaled_numbers (`tuple[int, ...]`): new tokens, batch, N of `scaling`.
        agreement (`float`): of the pair of `scaling` and `profile`.
        seed (`int`): of the pairs and of all draws.
    """

    target: Size = SIZES["98M"]
    draft: Size = SIZES["1.5M"]
    vocab: int = 8192
    agreements: tuple[float, ...] = AGREEMENTS
    batches: tuple[int, ...] = (1, 8, 4)
    new_tokens: int = 24
    repeats: int = 3
    scaled_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    scaled_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    scaled_numbers: tuple[int, ...] = (1, 2, 4, 8, 16)
    agreement: float = 0.65
    seed: int = 0


# Longer texts and a smaller target where it is the growth that counts, not the ratio of the two models.
DEFAULTS = {
    "pairs": Sweep(),
    "scaling": Sweep(target=SIZES["7M"], new_tokens=64, repeats=2, agreement=0.8),
    "profile": Sweep(new_tokens=48),
}
LONG = 512  # from here on one timed turn is enough: a run is long
SCALED = (
    ("lossless γ=4", "lossless", {"num_draft_tokens": 4}),
    ("smc N=4 γ=8", "smc", {"num_particles": 4, "num_draft_tokens": 8}),
)
PROFILED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lossless γ=4", "lossless", {"num_draft_tokens": 4}),
    ("lossless γ=4, sampling", "lossless", {"num_draft_tokens": 4, "do_sample": True}),
    ("easd γ=4", "easd", {"num_draft_tokens": 4}),
    ("smc N=4 γ=8", "smc", {"num_particles": 4, "num_draft_tokens": 8}),
    ("parse, all kept", "parse", {"accept_threshold": 0.0, "prefix_threshold": 0.0}),
    ("parse, none kept", "parse", {"accept_threshold": 2.0, "prefix_threshold": 2.0}),
    *DEFAULT_SCHEMES[-2:],  # semantic
)
Unit = tuple[int, str]  # batch, name
Results = dict[Unit, dict[str, Any]]
Task = tuple[Unit, Callable[[Results], dict[str, Any]]]


def run_sweep(
    kind: str,
    sweep: Sweep | None = None,
    *,
    out: Path,
    work: Path | None = None,
    name: str | None = None,
    minutes: float | None = None,
    command: str = "",
    report: Progress = silent,
) -> dict[str, Any]:
    """Measure what the sweep `kind` lacks, and write `out/NAME.json`.

    Args:
        kind (`str`): `pairs`, `scaling` or `profile`.
        sweep (`Sweep`, *optional*): what to measure; the page's by default.
        out (`Path`): where the result goes.
        work (`Path`, *optional*): where finished points are kept until all are there; `out/bench/NAME` by default.
        name (`str`, *optional*): of the result; the kind by default.
        minutes (`float`, *optional*): start no point later than this; a later call goes on.
        command (`str`): for the record.
        report (`Callable[[str], None]`): told what runs next.

    Raises:
        ValueError: no such sweep, or `work` holds another one.
    """
    if kind not in DEFAULTS:
        raise ValueError(f"sweep {kind}: must be one of {', '.join(DEFAULTS)}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes {minutes}: must be > 0")
    check_installed()
    sweep = sweep or DEFAULTS[kind]
    name = name or kind
    sizes = {"target": vars(sweep.target), "draft": vars(sweep.draft)}
    definition = {"sweep": kind, "plan": {**vars(sweep), **sizes}}
    journal = Journal(work or Path("out") / "bench" / name)
    journal.check(definition)
    journal.begin(definition)
    journal.mend()
    done: Results = {(r["batch"], r["contender"]): r["point"] for r in journal.records()}
    tasks = [task for task in _TASKS[kind](sweep, report) if task[0] not in done]
    start, session = time.monotonic(), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if tasks:
        journal.add({"session": session, **describe(command)})
    for number, (unit, measure) in enumerate(tasks):
        passed = (time.monotonic() - start) / 60
        if minutes is not None and passed > minutes:
            report(f"{len(tasks) - number} of {len(tasks)} points left after {passed:.0f} minutes: call again")
            break
        report(f"[{number + 1} of {len(tasks)}, {passed:.1f} min] {unit[1]}, batch {unit[0]}")
        done[unit] = measure(done)
        journal.add({"seed": 0, "batch": unit[0], "contender": unit[1], "session": session, "point": done[unit]})
    sessions = journal.sessions()
    result = {
        "meta": {**sessions[0], "sessions": len(sessions), "run": definition},
        "points": [{"name": unit[1], **point} for unit, point in sorted(done.items())],
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}.json", result)
    return result


def _subject(sweep: Sweep, agreement: float, prompts: int) -> Subject:
    return controlled_subject(
        agreement,
        target_size=sweep.target,
        draft_size=sweep.draft,
        vocab=sweep.vocab,
        seed=sweep.seed,
        prompts=prompts,
    )


def _pairs(sweep: Sweep, report: Progress) -> Iterator[Task]:
    """Every agreement at the first batch size, then at the next: an interruption leaves whole columns."""
    for batch in sweep.batches:
        for agreement in sweep.agreements:
            unit = batch, _agreement_name(agreement)
            yield unit, partial(_pair, sweep, agreement, batch, report)


def _agreement_name(agreement: float) -> str:
    return f"agreement {agreement:g}"


def _pair(sweep: Sweep, agreement: float, batch: int, report: Progress, done: Results) -> dict[str, Any]:
    subject = _subject(sweep, agreement, prompts=max(8, *sweep.batches))
    first = done.get((sweep.batches[0], _agreement_name(agreement)))
    return {
        "subject": subject.about,
        **measure_point(
            subject,
            check_schemes(None),
            batch=batch,
            new_tokens=sweep.new_tokens,
            repeats=sweep.repeats if batch == 1 else max(1, sweep.repeats - 1),
            seed=sweep.seed,
            tuned=first["tuned"] if first else None,
            # Calls of one prompt each, whose speed does not depend on how many follow.
            alone=1,
            optional=[entry[0] for entry in (*DEFAULT_SCHEMES, COMPILED_DRAFT)],
            report=report,
        ),
    }


def _scaling(sweep: Sweep, report: Progress) -> Iterator[Task]:
    wanted = [Wanted(*entry) for entry in SCALED]
    for tokens in sweep.scaled_tokens:
        yield (1, f"new tokens {tokens:>5}"), partial(_scaled, sweep, wanted, report, 1, tokens)
    for batch in sweep.scaled_batches:
        yield (batch, "batch"), partial(_scaled, sweep, wanted, report, batch, sweep.new_tokens)
    for number in sweep.scaled_numbers:
        way = Wanted(f"smc N={number} γ=8", "smc", {"num_particles": number, "num_draft_tokens": 8})
        chains = {"num_chains": number, "num_draft_tokens": 4}
        lossless = Wanted(f"lossless {number} chains γ=4", "lossless", chains)
        each = partial(_scaled, sweep, [way, lossless], report, 1, sweep.new_tokens)
        yield (1, f"N {number:>3}"), each


def _scaled(
    sweep: Sweep, wanted: Sequence[Wanted], report: Progress, batch: int, tokens: int, done: Results
) -> dict[str, Any]:
    subject = _subject(sweep, sweep.agreement, prompts=max(8, *sweep.scaled_batches))
    point = measure_point(
        subject,
        list(wanted),
        batch=batch,
        new_tokens=tokens,
        repeats=1 if tokens > LONG else sweep.repeats,
        seed=sweep.seed,
        only_wanted=True,
        report=report,
    )
    return {"subject": subject.about, **point}


def _profile(sweep: Sweep, report: Progress) -> Iterator[Task]:
    yield (1, "profile"), partial(_profiled, sweep, report)


def _profiled(sweep: Sweep, report: Progress, done: Results) -> dict[str, Any]:
    subject = _subject(sweep, sweep.agreement, prompts=1)
    wanted = [Wanted(*entry) for entry in PROFILED]
    rows = profile(subject, wanted, new_tokens=sweep.new_tokens, repeats=sweep.repeats, seed=sweep.seed, report=report)
    return {"subject": subject.about, "batch": 1, "new_tokens": sweep.new_tokens, "rows": rows}


_TASKS: dict[str, Callable[[Sweep, Progress], Iterator[Task]]] = {
    "pairs": _pairs,
    "scaling": _scaling,
    "profile": _profile,
}


def quick(kind: str) -> Sweep:
    """The sweep `kind` on tiny models: seconds, and numbers that mean nothing."""
    tiny = SIZES["0.7M"]
    return replace(
        DEFAULTS[kind],
        target=tiny,
        draft=Size(layers=1, hidden=64, intermediate=64, heads=2),
        vocab=512,
        agreements=(0.5, 0.9),
        batches=(1, 2),
        new_tokens=8,
        repeats=2,
        scaled_tokens=(8, 16),
        scaled_batches=(1, 2),
        scaled_numbers=(1, 2),
    )
