"""The measuring itself: all ways in turns on batches of the same prompts, then what the turns say of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..drafts.vocabulary import first_clash
from ..evaluation.batch import Batch
from ..evaluation.contenders import Contender as Wanted
from ..evaluation.decoding import synchronize
from ..evaluation.statistics import bootstrap
from .accounting import accounted
from .agreement import Agreement, agreement_on
from .costs import forecast, measure_costs, needed
from .progress import Progress, silent
from .rivals import PLAIN, Way, plain_ways, stock_ways, tuning_lengths, wanted_way
from .subject import Subject

COST_REPEATS = 5


@dataclass
class Sample:
    """One timed run: which batch of prompts, its new tokens, seconds, rows of new ids, and what it returned."""

    unit: int
    tokens: int
    seconds: float
    rows: list[list[int]]
    output: Any = None

    @property
    def speed(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds


@dataclass
class Entry:
    """A way, its timed runs in the order of the turns, and its one accounted run."""

    way: Way
    samples: list[Sample] = field(default_factory=list)
    account: dict[str, Any] = field(default_factory=dict)


def measure_point(
    subject: Subject,
    wanted: Sequence[Wanted],
    *,
    batch: int,
    new_tokens: int,
    repeats: int,
    seed: int = 0,
    tuned: Mapping[str, int] | None = None,
    alone: int | None = None,
    only_wanted: bool = False,
    optional: Sequence[str] = (),
    report: Progress = silent,
) -> dict[str, Any]:
    """Measure all ways on batches of one size.

    Args:
        subject (`Subject`): the pair and its prompts.
        wanted (`Sequence[Contender]`): what is measured beside plain decoding and transformers' own ways.
        batch (`int`): prompts decoded together.
        new_tokens (`int`): the most new tokens of a prompt.
        repeats (`int`): timed turns. Every turn takes the next batch of prompts, the same for all ways.
        seed (`int`): the draws of a turn depend on it and on the turn alone.
        tuned (`Mapping[str, int]`, *optional*): by mode, the γ of transformers' assisted generation found before; by
            default all of 2, 3, 4, 5, 8 run and the fastest is taken.
        alone (`int`, *optional*): ways that take one prompt at a time decode only so many of the batch's prompts;
            these are separate calls, whose speed does not depend on how many follow.
        only_wanted (`bool`): leave transformers' own ways to speculate out.
        optional (`Sequence[str]`): names of ways that may refuse this pair; the refusal is put on record.
        report (`Callable[[str], None]`): told what runs next.

    Returns:
        `dict`: JSON-safe: `batch`, `rows`, `tuned`, `agreement`, `costs`, `skipped`.
    """
    own = [wanted_way(subject, each) for each in wanted]
    modes = ["greedy", *(["sampling"] if any(way.mode == "sampling" for way in own) else [])]
    lengths: dict[str, Sequence[int]] = tuning_lengths(modes)
    if tuned is not None:
        lengths = {mode: [tuned[mode]] if mode in tuned else [] for mode in modes}
    stock = [] if only_wanted else list(stock_ways(subject, modes, lengths))
    ways = [*plain_ways(subject), *stock, *own]
    # Stock refuses some models and vocabularies, as a scheme may: that says nothing against the others.
    may_refuse = {*optional, *(way.name for way in stock)}
    entries, skipped = [], {}
    for way in ways:
        report(f"batch {batch}, {way.name}: warm-up and account")
        try:
            entries.append(Entry(way, account=_account(subject, way, batch, new_tokens, seed, alone)))
        except ValueError as error:
            if way.name not in may_refuse:
                raise ValueError(f"contender {way.name!r}: {error}") from error
            skipped[way.name] = str(error)
    for turn in range(repeats):
        unit = turn % subject.batches(batch)
        for entry in entries:
            report(f"batch {batch}, turn {turn + 1} of {repeats}: {entry.way.name}")
            entry.samples.append(_timed(subject, entry.way, batch, unit, new_tokens, seed + turn, alone))
    return _point(subject, entries, skipped, batch=batch, new_tokens=new_tokens, alone=alone, report=report)


def _decode(way: Way, subject: Subject, given: Batch, new_tokens: int, alone: int | None) -> list[Any]:
    """Outputs of the way: one of the batch, or one of each prompt."""
    if not way.alone:
        return [way.decode(given, new_tokens)]
    pairs = list(zip(given.ids, given.mask, strict=True))[:alone]
    return [way.decode(subject.padded([ids[mask.bool()]]), new_tokens) for ids, mask in pairs]


def _timed(subject: Subject, way: Way, batch: int, unit: int, new_tokens: int, seed: int, alone: int | None) -> Sample:
    given = subject.batch(batch, unit)
    torch.manual_seed(seed)
    synchronize()
    start = time.perf_counter()
    outputs = _decode(way, subject, given, new_tokens, alone)
    synchronize()
    seconds = time.perf_counter() - start
    rows = _rows(way, subject, given, outputs)
    return Sample(unit, sum(len(row) for row in rows), seconds, rows, outputs[0])


def _rows(way: Way, subject: Subject, given: Batch, outputs: Sequence[Any]) -> list[list[int]]:
    """The new ids of every row that was decoded."""
    texts = [output if isinstance(output, torch.Tensor) else output.sequences for output in outputs]
    if not way.alone:
        return given.answers(texts[0])
    prompts = [int(mask.sum()) for mask in given.mask]
    rows = []
    for text, length in zip(texts, prompts, strict=False):
        alone = Batch(text[:, :length], torch.ones_like(text[:, :length]), subject.eos, subject.pad)
        rows += alone.answers(text)
    return rows


def _account(subject: Subject, way: Way, batch: int, new_tokens: int, seed: int, alone: int | None) -> dict[str, Any]:
    """Forwards, shares of the time and memory of one run, which is also the way's warm-up."""
    given = subject.batch(batch, 0)
    # What is captured for one shape must see that shape; elsewhere two tokens load every kernel.
    _decode(way, subject, given, new_tokens if subject.cuda else 2, alone if subject.cuda else 1)
    torch.manual_seed(seed)
    if way.kind == "compiled" or way.options.get("compile_draft"):
        return {}
    with accounted(subject.model, subject.draft) as account:
        outputs = _decode(way, subject, given, new_tokens, alone)
    tokens = sum(len(row) for row in _rows(way, subject, given, outputs))
    return {**account.to_dict(), "tokens": tokens}


def _point(
    subject: Subject,
    entries: list[Entry],
    skipped: dict[str, str],
    *,
    batch: int,
    new_tokens: int,
    alone: int | None,
    report: Progress,
) -> dict[str, Any]:
    by_name = {entry.way.name: entry for entry in entries}
    plain = {"greedy": by_name[PLAIN], "sampling": by_name[f"{PLAIN}, sampling"]}
    stock = {
        mode: [e for e in entries if e.way.kind == "assisted" and e.way.mode == mode and "γ=" in e.way.name]
        for mode in plain
    }
    best = {mode: max(found, key=lambda e: _median(e.samples)) for mode, found in stock.items() if found}
    report(f"batch {batch}: agreement")
    agreements = {mode: _agreement(subject, entry.samples[0], batch) for mode, entry in plain.items()}
    seconds, acceptance = {}, {}
    if agreements["greedy"] is not None:
        places = needed([entry.way for entry in entries], batch)
        context = int(subject.batch(batch, 0).mask.sum(-1).max()) + new_tokens // 2
        seconds = measure_costs(subject, **places, context=context, repeats=COST_REPEATS, report=report)
        greedy, sampling = agreements["greedy"], agreements["sampling"]
        assert sampling is not None
        acceptance = {"greedy": greedy.greedy, "sampling": sampling.overlap, "easd": 1.0 - greedy.uncertain}
    rows = []
    for entry in entries:
        mode = entry.way.mode
        row = describe_entry(entry, plain[mode], best.get(mode), plain["greedy"])
        row["tuned"] = any(entry is each for each in best.values())
        row["predicted"] = forecast(entry.way, batch, seconds, acceptance) if seconds else None
        rows.append(row)
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "alone": None if alone is None else min(alone, batch),
        "tuned": {mode: entry.way.length for mode, entry in best.items()},
        "agreement": {mode: None if each is None else each.to_dict() for mode, each in agreements.items()},
        "costs": [[role, number, width, value] for (role, number, width), value in seconds.items()],
        "skipped": skipped,
        "rows": rows,
    }


def describe_entry(entry: Entry, plain: Entry, assisted: Entry | None, reference: Entry) -> dict[str, Any]:
    """The entry as a row, JSON-safe.

    Args:
        entry (`Entry`): who.
        plain (`Entry`): plain decoding of the same mode, timed in the same turns.
        assisted (`Entry`, *optional*): transformers' assisted generation, tuned, of the same mode.
        reference (`Entry`): plain greedy decoding, whose tokens exact contenders must give.
    """
    way, samples = entry.way, entry.samples
    speeds = [sample.speed for sample in samples]
    row: dict[str, Any] = {
        "name": way.name,
        "kind": way.kind,
        "mode": way.mode,
        "alone": way.alone,
        "length": way.length,
        "number": way.number,
        "options": way.options,
        "tokens_per_second": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "samples": [[sample.unit, sample.tokens, sample.seconds] for sample in samples],
        "over_plain": _ratio(entry, plain),
        "over_assisted": None if assisted is None else _ratio(entry, assisted),
        **entry.account,
    }
    if way.mode == "greedy":
        pairs = [
            pair
            for mine, theirs in zip(samples, reference.samples, strict=True)
            for pair in zip(mine.rows, theirs.rows, strict=False)
        ]
        row["matched"] = [sum(a == b for a, b in pairs), len(pairs)]
        row["exact"] = way.exact
    stats = [sample.output.stats for sample in samples if hasattr(sample.output, "stats")]
    if stats:
        tested, rounds = sum(s.tested for s in stats), sum(s.rounds for s in stats)
        row["acceptance"] = sum(s.accepted for s in stats) / tested if tested and way.kind != "smc" else None
        row["tokens_a_round"] = sum(s.emitted for s in stats) / rounds if rounds else None
        row["ess"] = statistics.mean(s.mean_ess for s in stats) if way.kind == "smc" else None
    return row


def _ratio(entry: Entry, base: Entry) -> dict[str, Any]:
    """Median over the turns of the ratio of speeds within a turn, with a 95 % bootstrap interval over the turns."""
    import numpy

    ratios = [a.speed / b.speed for a, b in zip(entry.samples, base.samples, strict=True)]
    interval = bootstrap(ratios, numpy.median)
    return {"value": statistics.median(ratios), "interval": None if interval is None else list(interval)}


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.speed for sample in samples)


def _agreement(subject: Subject, sample: Sample, batch: int) -> Agreement | None:
    """On the text that plain decoding gave, prompts included; `None` where the ids mean different things."""
    if first_difference(subject):
        return None
    given = subject.batch(batch, sample.unit)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(given.ids, given.mask, strict=True)]
    texts = [torch.tensor(prompt + row) for prompt, row in zip(prompts, sample.rows, strict=True)]
    padded = subject.padded(texts)
    return agreement_on(subject.model, subject.draft, padded.ids, padded.mask)


def first_difference(subject: Subject) -> str | None:
    """Why the laws of the two models cannot be compared id by id; `None` where they can."""
    clash = first_clash(subject.tokenizer, subject.draft_tokenizer)
    if clash is not None:
        return f"id {clash[0]} is {clash[1]!r} to the target and {clash[2]!r} to the draft"
    return None
