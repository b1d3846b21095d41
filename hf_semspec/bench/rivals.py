"""Who is measured: plain `generate`, transformers' own ways to speculate, and the schemes, all on batches of ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ..configuration import EASDConfig, SemanticConfig, SemSpecConfig
from ..drafts.choose import asks_for_model
from ..drafts.vocabulary import first_clash
from ..engine.cache import text_config
from ..evaluation.batch import Batch
from ..evaluation.contenders import ASSISTED, DRAFT, TARGET, parse_contenders
from ..evaluation.contenders import Contender as Wanted
from ..evaluation.decoding import stock_schedule
from ..schemes.table import SCHEMES
from .subject import Subject

PLAIN, COMPILED, LOOKUP, ENSEMBLE = "plain", "plain, compiled", "HF prompt lookup", "HF ensemble"
TUNED = "HF assisted, tuned"
# The draft lengths that transformers' assisted generation is tried with; the fastest of the run counts as "tuned".
TUNED_LENGTHS = (2, 3, 4, 5, 8)
# What each way decodes with: greedily, or from the whole law.
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
MODES = {"greedy": GREEDY, "sampling": SAMPLING}
LOOKUP_TOKENS, ENSEMBLE_WEIGHT = 5, 0.5
_SAMPLING: dict[str, Any] = {"do_sample": True}
_SEGMENTS: dict[str, Any] = {
    "first_segment": "draft",
    "segment_stop": None,
    "think_end": None,
    "max_segment_tokens": 16,
}
# name, kind, options
DEFAULT_SCHEMES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("lossless γ=2", "lossless", {"num_draft_tokens": 2}),
    ("lossless γ=4", "lossless", {"num_draft_tokens": 4}),
    ("lossless γ=8", "lossless", {"num_draft_tokens": 8}),
    ("lossless γ=auto", "lossless", {"num_draft_tokens": "auto"}),
    ("easd γ=4", "easd", {"num_draft_tokens": 4}),
    ("lossless γ=4, sampling", "lossless", {"num_draft_tokens": 4, **_SAMPLING}),
    ("lossless 4 chains γ=4, sampling", "lossless", {"num_draft_tokens": 4, "num_chains": 4, **_SAMPLING}),
    ("smc N=4 γ=8", "smc", {"num_particles": 4, "num_draft_tokens": 8}),
    # What parse and semantic keep is up to the judgement and the probes: the two ends of what that can mean for speed.
    ("parse, all kept", "parse", {"accept_threshold": 0.0, "prefix_threshold": 0.0}),
    ("parse, none kept", "parse", {"accept_threshold": 2.0, "prefix_threshold": 2.0}),
    ("semantic, all kept", "semantic", {**_SEGMENTS, "scorer": "random", "accept_rate": 1.0}),
    ("semantic, none kept", "semantic", {**_SEGMENTS, "scorer": "none"}),
)
COMPILED_DRAFT = ("lossless γ=4, compiled draft", "lossless", {"num_draft_tokens": 4, "compile_draft": True})


@dataclass
class Way:
    """One way to decode a batch.

    Args:
        name (`str`): unique within a run.
        kind (`str`): `target`, `draft`, `assisted`, `lookup`, `ensemble`, `compiled`, or a scheme.
        mode (`str`): `greedy` or `sampling`.
        exact (`bool`): whether its tokens must be plain greedy decoding's.
        alone (`bool`): whether it takes one prompt at a time.
        decode (`Callable[[Batch, int], Any]`): decodes a batch with so many new tokens; a tensor of ids, or an output
            with `sequences` and `stats`.
        length (`int`, *optional*): γ, where it is one number; of semantic, the tokens of a segment if all are kept.
        number (`int`): rows of either model for each prompt: chains or particles.
        keeps (`float`, *optional*): share of the accepted tokens that an extra rejection leaves; `None` where that is
            up to the pair.
        options (`dict`): what was asked for, for the record.
    """

    name: str
    kind: str
    mode: str
    exact: bool
    alone: bool
    decode: Callable[[Batch, int], Any]
    length: int | None = None
    number: int = 1
    keeps: float | None = 1.0
    options: dict[str, Any] = field(default_factory=dict)


def check_schemes(schemes: str | Iterable[str | Wanted] | None) -> list[Wanted]:
    """The contenders that `schemes` names, in the evaluator's syntax; the default ones for `None`.

    Raises:
        ValueError: an unknown one, a bad option, or one that the bench has no use for.
    """
    if schemes is None:
        compiled = has_compiled_drafts() and torch.cuda.is_available()
        schemes = [Wanted(*entry) for entry in (*DEFAULT_SCHEMES, *([COMPILED_DRAFT] if compiled else []))]
    given = [schemes] if isinstance(schemes, str) else list(schemes)
    made = [one for one in given if isinstance(one, Wanted)]
    wanted = parse_contenders([one for one in given if isinstance(one, str)], also=made)
    wanted = [one for one in wanted if not (one.kind == TARGET and not one.options)]
    taken = {PLAIN, f"{PLAIN}, sampling", COMPILED, LOOKUP, ENSEMBLE, TUNED}
    for one in wanted:
        if one.kind not in (*SCHEMES, ASSISTED, DRAFT):
            raise ValueError(
                f"contender {one.name!r}: {one.kind} is not a way to decode faster, and the bench measures speed; "
                "hf-semspec eval compares answers"
            )
        if one.name in taken:
            raise ValueError(f"contender {one.name!r}: the name is that of a rival which is always measured")
    return wanted


def has_compiled_drafts() -> bool:
    """Whether `lossless` can capture the draft's forward (`compile_draft`)."""
    return hasattr(SCHEMES["lossless"].config, "compile_draft")


def has_ensembles() -> bool:
    """Whether this transformers has `assistant_ensemble_weight`."""
    return hasattr(GenerationConfig(), "assistant_ensemble_weight")


def plain_ways(subject: Subject) -> Iterator[Way]:
    """Plain `generate`, greedy and sampling; on CUDA also with a static cache and its compiled forward."""
    for mode, options in MODES.items():
        name = PLAIN if mode == "greedy" else f"{PLAIN}, {mode}"
        yield Way(name, TARGET, mode, mode == "greedy", False, _stock(subject, options))
    if subject.cuda:
        options = {**GREEDY, "cache_implementation": "static"}
        yield Way(COMPILED, "compiled", "greedy", True, False, _stock(subject, options))


def stock_ways(subject: Subject, modes: Sequence[str], lengths: dict[str, Sequence[int]]) -> Iterator[Way]:
    """Transformers' assisted generation at each γ of `lengths[mode]` and at its defaults, its prompt lookup, and its
    ensemble of both laws where it has one."""
    for mode in modes:
        tail = "" if mode == "greedy" else f", {mode}"
        for length in lengths[mode]:
            yield _assisted(subject, f"HF assisted γ={length}{tail}", mode, length)
    yield _assisted(subject, "HF assisted, defaults", "greedy", None)
    lookup = _stock(subject, {**GREEDY, "prompt_lookup_num_tokens": LOOKUP_TOKENS})
    yield Way(LOOKUP, "lookup", "greedy", True, True, lookup)
    if has_ensembles() and "sampling" in modes:
        options = {**SAMPLING, "assistant_ensemble_weight": ENSEMBLE_WEIGHT}
        length = lengths["sampling"][0] if len(lengths["sampling"]) == 1 else 5
        decode = _stock(subject, options, drafts=True, length=length)
        record = {"assistant_ensemble_weight": ENSEMBLE_WEIGHT}
        yield Way(ENSEMBLE, "ensemble", "sampling", False, True, decode, length, options=record)


def wanted_way(subject: Subject, wanted: Wanted) -> Way:
    """How the contender `wanted` decodes."""
    sampling = wanted.sampling(None)
    mode = "sampling" if sampling["do_sample"] else "greedy"
    record = {name: shown(value) for name, value in wanted.options.items()}
    if wanted.kind == ASSISTED:
        way = _assisted(subject, wanted.name, mode, wanted.own("num_draft_tokens"), {**wanted.fields, **sampling})
        way.options = record
        return way
    if wanted.kind == DRAFT:
        decode = _stock(subject, {**wanted.fields, **sampling}, model=subject.draft)
        return Way(wanted.name, DRAFT, mode, False, False, decode, options=record)
    scheme = SemSpecConfig(wanted.kind, **{**wanted.fields, **sampling}).scheme_config
    length = _length(scheme)
    return Way(
        wanted.name,
        wanted.kind,
        mode,
        wanted.kind == "lossless" and mode == "greedy",
        False,
        _scheme(subject, wanted.kind, {**wanted.fields, **sampling}),
        length,
        getattr(scheme, "num_particles", getattr(scheme, "num_chains", 1)),
        _keeps(scheme),
        record,
    )


def _length(scheme: Any) -> int | None:
    if isinstance(scheme, SemanticConfig):
        all_kept = (scheme.scorer, scheme.accept_rate, scheme.bonus, scheme.segment_stop) == ("random", 1, True, None)
        return scheme.max_segment_tokens if all_kept else None
    length = getattr(scheme, "num_draft_tokens", None)
    return length if isinstance(length, int) else None


def _keeps(scheme: Any) -> float | None:
    """Of the tokens that passed the ordinary test, the share that `scheme` keeps."""
    if not isinstance(scheme, EASDConfig):
        return 1.0
    if scheme.trigger == "random":
        return 1.0 - scheme.trigger_rate
    off = max(scheme.target_entropy_threshold, scheme.draft_entropy_threshold) == math.inf
    return 1.0 if off or scheme.overlap_threshold > 1 else None


def _assisted(
    subject: Subject, name: str, mode: str, length: int | None, options: dict[str, Any] | None = None
) -> Way:
    decode = _stock(subject, options or MODES[mode], drafts=True, length=length)
    return Way(name, ASSISTED, mode, mode == "greedy", True, decode, length)


def _stock(
    subject: Subject,
    options: dict[str, Any],
    *,
    drafts: bool = False,
    length: int | None = None,
    model: Any = None,
) -> Callable[[Batch, int], torch.Tensor]:
    """Stock `generate` with `options`; with the draft, it drafts `length` tokens a round or by its own heuristic."""
    decodes: Any = subject.model if model is None else model
    draft: Any = subject.draft
    arguments: dict[str, Any] = {"assistant_model": draft} if drafts else {}
    if drafts and subject.pair is None and _foreign(subject):
        arguments |= {"tokenizer": subject.tokenizer, "assistant_tokenizer": subject.draft_tokenizer}
    if getattr(decodes.generation_config, "semspec", None) is not None:
        arguments["semspec"] = None  # a model folder may carry a scheme of its own

    def decode(batch: Batch, new_tokens: int) -> torch.Tensor:
        config = GenerationConfig(**options, **_common(batch, new_tokens))
        with stock_schedule(draft, length):
            found: torch.Tensor = decodes.generate(
                batch.ids, attention_mask=batch.mask, generation_config=config, **arguments
            )
        return found

    return decode


def _foreign(subject: Subject) -> bool:
    sizes = [int(text_config(model).vocab_size) for model in (subject.model, subject.draft)]
    clash = first_clash(subject.tokenizer, subject.draft_tokenizer) is not None
    return clash or (sizes[0] != sizes[1] and subject.draft_tokenizer is not None)


def _scheme(subject: Subject, kind: str, options: dict[str, Any]) -> Callable[[Batch, int], Any]:
    tokenizers = {"tokenizer": subject.tokenizer, "assistant_tokenizer": subject.draft_tokenizer}
    given = {name: value for name, value in tokenizers.items() if value is not None}

    def decode(batch: Batch, new_tokens: int) -> Any:
        config = SemSpecConfig(kind, **options, **_common(batch, new_tokens), return_dict_in_generate=True)
        model: Any = subject.model
        arguments = {"assistant_model": subject.draft, **given} if asks_for_model(config) else {}
        return model.generate(batch.ids, attention_mask=batch.mask, generation_config=config, **arguments)

    return decode


def _common(batch: Batch, new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "pad_token_id": batch.pad, "eos_token_id": batch.eos or None}


def shown(value: Any) -> Any:
    """An option's value, JSON-safe."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def tuning_lengths(modes: Sequence[str]) -> dict[str, Sequence[int]]:
    """What transformers' assisted generation is tuned over, in each mode."""
    return dict.fromkeys(modes, TUNED_LENGTHS)
