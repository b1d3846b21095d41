"""The config of the scheme `smc`, and the sampling options that go with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...common.fields import assign, bad_value, boolean, entry_of, integer, listed, real
from .weights import RESAMPLINGS, SELECTIONS


@dataclass(frozen=True, kw_only=True)
class SMCConfig:
    r"""
    Sequential Monte Carlo speculative decoding (arXiv 2604.15672).

    Every drafted token is kept; particles are weighted by target over draft, and resampled where the weights have
    become uneven. The output follows the target's law only in the limit of many particles.

    Args:
        num_particles (`int`, *optional*, defaults to 8):
            N, the particles of a prompt, in [1, 256]. 1 decodes with the draft, every (γ+1)-th token from the target.
            The default is the authors'; the range is ours.
        num_draft_tokens (`int`, *optional*, defaults to 8):
            γ, the tokens drafted a round, in [1, 64]. The default is the authors'; the range is ours. `"auto"` is
            refused: it follows the acceptance, and here every drafted token is accepted.
        ess_threshold (`float`, *optional*, defaults to 0.5):
            Resample where ESS < `ess_threshold` · N, in [0, 1]. 0 never resamples, 1 wherever weights differ. The
            default is the authors'.
        resampling (`str`, *optional*, defaults to `"systematic"`):
            `"systematic"`, `"multinomial"`, `"stratified"` or `"residual"`. The default is the authors'; the others
            are ours.
        power (`float`, *optional*, defaults to 1.0):
            α > 0: the particles follow p^α, normalised over whole texts, in place of p. The default is the authors'.
        select (`"sample"` or `"best"`, *optional*, defaults to `"sample"`):
            What is returned: particles drawn by their final weights, as published, or the heaviest. `"best"` prefers
            likely texts over unlikely ones and no longer aims at the target's law. Ours.
        draft_temperature (`float`, *optional*):
            Temperature of the draft, > 0. `None` takes the target's. A flatter draft loses tokens to low weights, a
            sharper one leaves tokens of the target uncovered. Ours.
        compile_draft (`bool`, *optional*, defaults to `False`):
            Run the draft's one-token forwards from fixed buffers, on CUDA as a captured graph, which is faster where
            launching kernels takes longer than running them. The tokens are the same up to rounding. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "smc"

    num_particles: int = 8
    num_draft_tokens: int = 8
    ess_threshold: float = 0.5
    resampling: Literal["systematic", "multinomial", "stratified", "residual"] = "systematic"
    power: float = 1.0
    select: Literal["sample", "best"] = "sample"
    draft_temperature: float | None = None
    compile_draft: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_draft_tokens, str) and self.num_draft_tokens == "auto":
            raise ValueError(
                '`num_draft_tokens` must be an int in [1, 64] for smc, but is "auto": that follows the acceptance, '
                "and smc accepts every drafted token."
            )
        assign(self, "num_particles", integer("num_particles", self.num_particles, 1, 256))
        assign(self, "num_draft_tokens", integer("num_draft_tokens", self.num_draft_tokens, 1, 64))
        assign(self, "ess_threshold", real("ess_threshold", self.ess_threshold, highest=1.0))
        assign(self, "compile_draft", boolean("compile_draft", self.compile_draft))
        assign(self, "power", _positive("power", self.power))
        if self.draft_temperature is not None:
            assign(self, "draft_temperature", _positive("draft_temperature", self.draft_temperature, " or None"))
        for name, allowed in (("resampling", RESAMPLINGS), ("select", SELECTIONS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise bad_value(name, value, f"one of {listed(allowed)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`; see [`scheme_from_dict`]."""
        return entry_of(self)


def sampling_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of `GenerationConfig` with smc's defaults where they are unset: sampling, and nothing cut off.

    Raises:
        ValueError: `do_sample=False`.
    """
    if fields.get("do_sample") not in (None, True):
        raise ValueError(
            f"`do_sample` must be True for smc, which draws its particles, but is {fields['do_sample']!r}: leave it "
            "out, or decode greedily with the scheme lossless."
        )
    given = {name: value for name, value in fields.items() if value is not None}
    return {**fields, "do_sample": True, "top_k": given.get("top_k", 0), "top_p": given.get("top_p", 1.0)}


def _positive(name: str, value: Any, also: str = "") -> float:
    number = value if isinstance(value, bool) else _float(value)
    if isinstance(number, bool) or number is None or not 0 < number < math.inf:
        raise bad_value(name, value, f"a finite number > 0{also}")
    return number


def _float(value: Any) -> float | None:
    try:
        return real("value", value)
    except ValueError:
        return None
