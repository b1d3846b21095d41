"""What shows while a call runs that its models are broken, or do not fit each other, and how the caller is told."""

from typing import Any

from ..common.warn_once import warn_once
from .gamma import ChosenLength
from .outputs import DecodingStats
from .request import Request
from .timing import costs_of

UNNAMED = "profile of an unnamed pair"
LOW_ACCEPTANCE, LOW_ACCEPTANCE_TESTED, LOW_ACCEPTANCE_SEGMENTS = 0.1, 20, 10


def check_laws(broken: int, request: Request, role: str = "target") -> None:
    """Raise where a model gave no law to draw from: bit 0 of `broken` is the one that decides, the target or (`role`)
    the draft writing by itself, bit 1 the draft."""
    deciding = request.model if role == "target" else request.draft
    for bit, name, model in ((1, role, deciding), (2, "draft", request.draft)):
        if broken & bit:
            raise without_a_law(name, model)


def without_a_law(name: str, model: Any) -> ValueError:
    """What is raised where the model, called so, gave no law to draw from."""
    return ValueError(
        f"the {name} model {describe_model(model)} gave logits without a law (nan, +inf, or every id masked out): "
        "check its weights, its dtype, its quantization and the logits processors"
    )


def warn_of_low_acceptance(stats: DecodingStats, request: Request) -> None:
    """One warning where hardly any token, or segment, that the draft model drafted passed; what is looked up may well
    be wrong."""
    if getattr(getattr(request.scheme, "revise_with", None) or request.scheme, "draft", "model") != "model":
        return
    what, tested, rate, enough = "tokens", stats.tested, stats.acceptance_rate, LOW_ACCEPTANCE_TESTED
    if stats.segments:
        what, tested, rate = "segments", stats.segments, stats.segment_acceptance_rate
        enough = LOW_ACCEPTANCE_SEGMENTS
    if tested >= enough and rate < LOW_ACCEPTANCE:
        draft, target = describe_model(request.draft), describe_model(request.model)
        right = "the output is right but " if request.scheme.name == "lossless" else ""
        warn_once(
            f"fewer than {LOW_ACCEPTANCE:.0%} of the {what} drafted by {draft} were accepted by {target}: {right}"
            "nothing is gained; check that both were trained on the same tokenizer and chat template, and that "
            "quantization has not broken the draft",
            late=True,
        )


def report_choice(length: ChosenLength, call: Any) -> None:
    """Put into the statistics how γ was chosen, and warn once of a pair that drafting gains nothing by."""
    request, found, before = call.request, length.to_dict(), call.stats.auto
    profile = getattr(getattr(request.scheme, "revise_with", None) or request.scheme, "cost_profile", None)
    found["costs"] = "measured" if profile is None else "profile" if profile.get("pair") else UNNAMED
    if before is not None:  # of turns before this one
        counts = {count: before["rounds"].get(count, 0) for count in before["rounds"] | found["rounds"]}
        found["rounds"] = {count: old + found["rounds"].get(count, 0) for count, old in sorted(counts.items())}
    call.stats.auto = found
    note = costs_of(request.model, request.draft)
    if not found["off"] or note.told:
        return
    note.told = True
    passes, draft = found["target_seconds"], found["draft_seconds"]
    rates = length.rates(length.rows)
    best = max((count for count in rates if count), key=rates.__getitem__)
    plain, wide, drafting = (1e3 * seconds for seconds in (passes[1], passes[best + 1], best * draft))
    stand = sum(found["survival"][:best])
    warn_once(
        f'num_draft_tokens="auto" ended with drafting off, as {describe_model(request.draft)} gains nothing for '
        f"{describe_model(request.model)} here: a plain round of {length.rows} rows takes {plain:.3g} ms, one with "
        f"{best} drafted tokens {wide:.3g} ms and {drafting:.3g} ms for drafting them, of which {stand:.2f} stand; "
        "a smaller draft, or one that agrees more often, would",
        late=True,
    )


def describe_model(model: Any) -> str:
    """Its class, and where it was loaded from."""
    path = getattr(model.config, "_name_or_path", "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__
