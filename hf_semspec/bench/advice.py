"""The advisor: what a pair's vocabularies, laws and costs promise for each scheme, before a scheme is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..common.fields import integer
from ..drafts.vocabulary import MAX_VOCABULARY_PADDING, first_clash
from ..engine.cache import text_config
from ..engine.timing import pair_of
from ..tools.machine import describe
from .agreement import Agreement, agreement_on, block_chi2
from .costs import Seconds, measure_costs
from .prediction import Cost, Forecast, best_particles, best_verified, interpolated, whole_pieces
from .progress import Progress, silent
from .request import PairRequest
from .results import title_of
from .rivals import GREEDY, SAMPLING
from .simulation import forecast_choice, profile_of, table_of
from .subject import Subject

WIDTHS, BATCHES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
LENGTHS, NUMBERS = (1, 2, 3, 4, 5, 6, 8, 12, 16), (2, 4, 8, 16)
CHI2_LENGTHS = (1, 2, 4, 8, 16)
SEGMENT = 32  # tokens, of semantic's
# Below this a forecast is no gain: it leaves out all time outside the forwards.
WORTH = 1.05


@dataclass
class Advice:
    """What [`check`] returns.

    Args:
        meta (`dict`): command, commit, versions, machine, and `run`: what was looked at.
        vocabulary (`dict`): `kind` (`same`, `padded`, `unequal` or `foreign`), `sizes`, `note`.
        agreement (`dict[str, Agreement]`): `greedy` and `sampling`: on plain text of that mode; empty where the ids
            mean different things.
        chi2 (`dict[int, float]`): by γ, χ² of a block of drafted tokens.
        seconds (`dict[tuple[str, int, int], float]`): of a forward: (`target` or `draft`, rows, tokens a row).
        forecasts (`list[dict]`): one for each scheme, mode and batch: `speed_up`, `num_draft_tokens`,
            `num_particles`, and of parse and semantic `break_even`, the share of the drafted tokens that must be kept
            for any gain; `speed_up` is `None` where nothing can be said.
        lengths (`list[dict]`): for `lossless` at each mode and batch, `speed_up` by γ, that of `"auto"` last: the same
            calls, played.
        profile (`dict`): the costs as a config's `cost_profile` takes them.
        warnings (`list[str]`): what speaks against the pair.
    """

    meta: dict[str, Any]
    vocabulary: dict[str, Any]
    agreement: dict[str, Agreement]
    chi2: dict[int, float]
    seconds: Seconds
    forecasts: list[dict[str, Any]]
    lengths: list[dict[str, Any]]
    profile: dict[str, Any]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; infinite numbers are `None`."""
        return {
            "meta": self.meta,
            "vocabulary": self.vocabulary,
            "agreement": {mode: each.to_dict() for mode, each in self.agreement.items()},
            "chi2": _finite_all({str(length): value for length, value in self.chi2.items()}),
            "costs": [[*place, value] for place, value in self.seconds.items()],
            "forecasts": self.forecasts,
            "lengths": self.lengths,
            "profile": self.profile,
            "warnings": self.warnings,
        }

    def tables(self) -> list[Any]:
        """`rich` tables: the pair, its costs, the forecasts."""
        from rich.table import Table

        facts = Table("", "", title=title_of(self.meta["about"]), show_header=False)
        facts.add_row("vocabulary", f"{self.vocabulary['kind']}: {self.vocabulary['note']}")
        for mode, each in self.agreement.items():
            text = f"plain {'greedy text' if mode == 'greedy' else 'samples'}, {each.positions:,} positions"
            facts.add_row(f"same argmax ({text})", f"{each.greedy:.3f}")
            facts.add_row("expected acceptance when sampling, Σ min(p, q) = 1 − TV", f"{each.overlap:.3f}")
            facts.add_row("entropy of target and draft, nats", f"{each.target_entropy:.2f}, {each.draft_entropy:.2f}")
            facts.add_row("share of positions that easd's defaults would reject", f"{each.uncertain:.3f}")
        for length, value in self.chi2.items():
            facts.add_row(f"χ² of a block of {length}", f"{value:.3g}, so ESS/N about {1 / (1 + value):.2f}")
        costs = Table(title="one forward, milliseconds")
        widths = sorted({width for _, _, width in self.seconds})
        for name in ("model", "batch", *(f"{width} wide" for width in widths)):
            costs.add_column(name, justify="left" if name == "model" else "right")
        for role, rows in sorted({place[:2] for place in self.seconds}, reverse=True):
            costs.add_row(role, str(rows), *(_milliseconds(self.seconds.get((role, rows, width))) for width in widths))
        return [facts, costs, self._forecast_table(), *([self._length_table()] if self.lengths else [])]

    def _length_table(self) -> Any:
        from rich.table import Table

        table = Table(title="lossless by γ: times plain decoding of the same batch")
        for name in ("", *(f"γ={length}" for length in self.lengths[0]["speed_up"])):
            table.add_column(name, justify="right" if name else "left")
        for entry in self.lengths:
            values = (f"{value:.2f}" for value in entry["speed_up"].values())
            table.add_row(f"{entry['mode']}, batch {entry['batch']}", *values)
        return table

    def _forecast_table(self) -> Any:
        from rich.table import Table

        table = Table(title="forecast: times plain decoding of the same batch, at the best γ (and N)")
        batches = sorted({entry["batch"] for entry in self.forecasts})
        for name in ("scheme", *(f"batch {batch}" for batch in batches)):
            table.add_column(name, justify="left" if name == "scheme" else "right")
        cells = {(entry["scheme"], entry["batch"]): entry for entry in self.forecasts}
        for scheme in dict.fromkeys(entry["scheme"] for entry in self.forecasts):
            table.add_row(scheme, *(_forecast_cell(cells[scheme, batch]) for batch in batches))
        return table


def check(
    model: str | PreTrainedModel | None = None,
    draft: str | PreTrainedModel | None = None,
    *,
    new_tokens: int = 64,
    repeats: int = 5,
    blocks: int = 64,
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
    report: Progress = silent,
    command: str = "hf_semspec.bench.check",
    **pair: Any,
) -> Advice:
    """Look at a pair and forecast what each scheme can gain with it, and at which γ and N.

    The laws are compared on text that the target writes itself, greedily or sampled at temperature 1. A forecast is
    made of forwards and acceptance alone, so what is measured is a little less.

    Args:
        model, draft (`str` or `PreTrainedModel`, *optional*): target and draft; see [`PairRequest`].
        new_tokens (`int`): tokens that the target writes after each prompt.
        repeats (`int`): timed turns of the forwards.
        blocks (`int`): drafted blocks a prompt, for χ².
        widths, batches (`Sequence[int]`): tokens a row and rows of the timed forwards; 1 is always among them.
        report (`Callable[[str], None]`): told what runs next.
        command (`str`): for the record.
        pair: the other fields of [`PairRequest`]: `controlled`, `prompts`, `dtype`, `device`, `seed`, ...

    Raises:
        ValueError: a bad option, named, before anything is loaded.
    """
    for name, value, lowest in (("new_tokens", new_tokens, 2), ("repeats", repeats, 1), ("blocks", blocks, 2)):
        integer(name, value, lowest)
    places = [
        (integer("batches", batch, 1), integer("widths", width, 1))
        for batch in sorted({1, *batches})
        for width in sorted({1, *widths})
    ]
    request = PairRequest(model=model, draft=draft, **pair)
    report("loading or building the pair")
    subject = request.load()
    vocabulary = compare_vocabularies(subject)
    agreement: dict[str, Agreement] = {}
    chi2: dict[int, float] = {}
    if vocabulary["kind"] in ("same", "padded"):
        for mode, options in (("greedy", GREEDY), ("sampling", SAMPLING)):
            report(f"the target writes, {mode}")
            agreement[mode] = _agreement(subject, new_tokens, options, request.seed)
        report("blocks of the draft")
        contexts = subject.prompts[: max(2, len(subject.prompts) // 2)]
        chi2 = block_chi2(subject.model, subject.draft, contexts, CHI2_LENGTHS, blocks=blocks, seed=request.seed)
    seconds = measure_costs(subject, places, places, context=new_tokens, repeats=repeats, report=report)
    forecasts = forecast_all(agreement, chi2, seconds, sorted({*batches}), new_tokens)
    run = {**request.describe(), "new_tokens": new_tokens, "blocks": blocks, "repeats": repeats}
    meta = {**describe(command), "about": subject.about, "run": run}
    warned = warnings_of(vocabulary, agreement, forecasts)
    lengths = forecast_lengths(agreement, seconds, sorted({*batches}), new_tokens)
    profile = {**profile_of(seconds), "pair": pair_of(subject.model, subject.draft)}
    return Advice(meta, vocabulary, agreement, chi2, seconds, forecasts, lengths, profile, warned)


def compare_vocabularies(subject: Subject) -> dict[str, Any]:
    """Whether an id means the same to both models: `kind`, `sizes`, and a sentence that says it."""
    sizes = [int(text_config(model).vocab_size) for model in (subject.model, subject.draft)]
    clash = first_clash(subject.tokenizer, subject.draft_tokenizer)
    known = subject.tokenizer is not None and subject.draft_tokenizer is not None
    if clash is not None:
        index, own, other = clash
        note = (
            f"different tokenizers (id {index} is {own!r} to the target and {other!r} to the draft): lossless and "
            "easd draft the tokens that both have, which is not forecast here, parse takes text across"
        )
        return {"kind": "foreign", "sizes": sizes, "note": note}
    if sizes[0] == sizes[1]:
        return {
            "kind": "same",
            "sizes": sizes,
            "note": f"{sizes[0]:,} ids" + ("" if known else ", tokens not compared"),
        }
    if known or abs(sizes[0] - sizes[1]) <= MAX_VOCABULARY_PADDING:
        note = f"{sizes[0]:,} and {sizes[1]:,} ids: one vocabulary padded to two sizes"
        return {"kind": "padded", "sizes": sizes, "note": note}
    note = f"{sizes[0]:,} and {sizes[1]:,} ids, and no tokenizer of the draft's to compare: pass one"
    return {"kind": "unequal", "sizes": sizes, "note": note}


def _agreement(subject: Subject, new_tokens: int, options: dict[str, Any], seed: int) -> Agreement:
    """On what the target writes after every prompt, prompts included."""
    given = subject.batch(len(subject.prompts), 0)
    config = GenerationConfig(
        **options, max_new_tokens=new_tokens, pad_token_id=given.pad, eos_token_id=given.eos or None
    )
    model: Any = subject.model
    plainly = {"semspec": None} if getattr(model.generation_config, "semspec", None) is not None else {}
    torch.manual_seed(seed)
    found = model.generate(given.ids, attention_mask=given.mask, generation_config=config, **plainly)
    mask = torch.zeros_like(found)
    mask[:, : given.width] = given.mask
    for i, answer in enumerate(given.answers(found)):
        mask[i, given.width : given.width + len(answer)] = 1
    return agreement_on(subject.model, subject.draft, found, mask)


def forecast_all(
    agreement: Mapping[str, Agreement],
    chi2: Mapping[int, float],
    seconds: Seconds,
    batches: Sequence[int],
    answer: int,
) -> list[dict[str, Any]]:
    """The best setting of every scheme at every batch; entries as in [`Advice`].

    Args:
        agreement (`Mapping[str, Agreement]`): by mode; empty where the draft cannot draft token by token.
        chi2 (`Mapping[int, float]`): by γ.
        seconds (`Seconds`): of forwards, 1 row and 1 token among them.
        batches (`Sequence[int]`): rows.
        answer (`int`): tokens of an answer, for parse.
    """
    entries = []
    for batch in batches:
        target, draft = _costs(seconds, batch)
        given: dict[str, Any] = {"target": target, "draft": draft, "batch": batch}
        found: dict[str, Forecast | None] = {"parse, all kept": whole_pieces(answer, bonus=0, **given)}
        if agreement:
            greedy, sampling = agreement["greedy"], agreement["sampling"]
            found = {
                "lossless, greedy": best_verified(greedy.greedy, lengths=LENGTHS, **given),
                "lossless, sampling": best_verified(sampling.overlap, lengths=LENGTHS, **given),
                "easd, greedy": best_verified(greedy.greedy, lengths=LENGTHS, keeps=1 - greedy.uncertain, **given),
                "smc, half the particles alive": best_particles(chi2, numbers=NUMBERS, **given),
                f"semantic, segments of {SEGMENT}, all kept": whole_pieces(SEGMENT, bonus=1, **given),
                **found,
            }
        for scheme, each in found.items():
            entries.append(
                {
                    "scheme": scheme,
                    "batch": batch,
                    "speed_up": None if each is None else each.speed_up,
                    "num_draft_tokens": None if each is None else each.num_draft_tokens or None,
                    "num_particles": None if each is None or not scheme.startswith("smc") else each.num_particles,
                    "break_even": None if each is None or math.isnan(each.break_even) else each.break_even,
                }
            )
    return entries


def forecast_lengths(
    agreement: Mapping[str, Agreement], seconds: Seconds, batches: Sequence[int], tokens: int
) -> list[dict[str, Any]]:
    """`lossless` at every γ and at `"auto"`, in both modes at every batch; entries as in [`Advice`]."""
    if not agreement or max(width for _, _, width in seconds) == 1:
        return []
    costs, entries = table_of(seconds), []
    for mode, rate in (("greedy", agreement["greedy"].greedy), ("sampling", agreement["sampling"].overlap)):
        for batch in batches:
            target, draft = _costs(seconds, batch)
            speeds = forecast_choice(rate, target, draft, costs, batch=batch, tokens=tokens)
            entries.append({"mode": mode, "batch": batch, "speed_up": {str(key): speeds[key] for key in speeds}})
    return entries


def _costs(seconds: Seconds, batch: int) -> tuple[Cost, Cost]:
    """c and ρ in units of plain decoding's step at that batch."""
    step = seconds["target", batch, 1]
    parts = []
    for role in ("target", "draft"):
        parts.append({place[1:]: value / step for place, value in seconds.items() if place[0] == role})
    return interpolated(parts[0]), interpolated(parts[1])


def warnings_of(
    vocabulary: Mapping[str, Any], agreement: Mapping[str, Agreement], forecasts: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What speaks against the pair, a sentence each."""
    found = []
    if vocabulary["kind"] in ("foreign", "unequal"):
        found.append(f"vocabulary: {vocabulary['note']}")
    token_level = [entry for entry in forecasts if entry["break_even"] is None]
    for batch in dict.fromkeys(entry["batch"] for entry in token_level):
        here = [entry for entry in token_level if entry["batch"] == batch]
        best = max((entry["speed_up"] or 0.0 for entry in here), default=0.0)
        if best < WORTH:
            found.append(
                f"batch {batch}: no token-level scheme can win with this draft (at best {best:.2f}x plain decoding by "
                "its forwards alone): decode plainly, or take a draft that is cheaper or agrees more"
            )
    if any(entry["scheme"].startswith("smc") and entry["speed_up"] is None for entry in token_level):
        found.append(
            "smc: the weights of even the shortest block leave less than half the particles alive, so that it would "
            "be fast and far from the target's law: take a closer draft"
        )
    for scheme in ("semantic", "parse"):
        gains = [entry["speed_up"] for entry in forecasts if entry["scheme"].startswith(scheme)]
        if gains and max(gains) < WORTH:
            found.append(f"{scheme}: the draft's forwards cost so much that nothing is gained even if all is kept")
    return found


def _finite_all(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _forecast_cell(entry: Mapping[str, Any]) -> str:
    if entry["speed_up"] is None:
        return "–"
    parts = [f"{name}={entry[key]}" for name, key in (("γ", "num_draft_tokens"), ("N", "num_particles")) if entry[key]]
    if entry["break_even"] is not None:
        parts.append("no gain" if entry["break_even"] >= 1 else f"a gain from {entry['break_even']:.0%} kept on")
    return f"{entry['speed_up']:.2f}" + (f" ({', '.join(parts)})" if parts else "")
