"""What shows while a call runs that its models are broken, or do not fit each other, and how the caller is told."""

from typing import Any

from ..common.warn_once import warn_once
from .outputs import DecodingStats
from .request import Request

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


def describe_model(model: Any) -> str:
    """Its class, and where it was loaded from."""
    path = getattr(model.config, "_name_or_path", "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__
