"""The configs of the token-level schemes, `lossless` and `easd`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .checks import assign, bad_value, boolean, config_from_entry, entry_of, integer, listed, real, sampling_settings

DRAFT_SOURCES = ("model", "ngram", "ngram+model")


@dataclass(frozen=True, kw_only=True)
class LosslessConfig:
    r"""
    Ordinary speculative sampling: the output follows the target's law exactly (arXiv 2211.17192, 2302.01318).

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]. `"auto"` chooses it each round from the acceptance seen in this
            call and the sizes of the two models, never from a clock. The default and the range are ours.
        num_chains (`int`, *optional*, defaults to 1):
            Chains drafted a round, in [1, 64]. More than one is exact multi-draft verification: one target pass over
            all of them, the same output law. The default is the papers' algorithm; the range is ours.
        draft (`str`, *optional*, defaults to `"model"`):
            What drafts: `"model"` the `assistant_model`; `"ngram"` the text so far, in which what followed the last
            time its final n-gram occurred is looked up, without a draft model; `"ngram+model"` the text, and the
            `assistant_model` where nothing is found. The output law is the same. Both are ours.
        max_ngram (`int`, *optional*, defaults to 3):
            The longest n-gram that is looked up, in tokens, in [1, 16]; shorter ones are tried where it is not found.
            Used by `"ngram"` and `"ngram+model"` only. Ours.
        compile_draft (`bool`, *optional*, defaults to `False`):
            Run the draft's one-token forwards from fixed buffers, on CUDA as a captured graph, which is faster where
            launching kernels takes longer than running them. The tokens are the same up to rounding. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range, or `num_chains` or `"auto"` asks for a draft
            model where `draft` names none.
    """

    name: ClassVar[str] = "lossless"

    num_draft_tokens: int | Literal["auto"] = 5
    num_chains: int = 1
    draft: Literal["model", "ngram", "ngram+model"] = "model"
    max_ngram: int = 3
    compile_draft: bool = False

    def __post_init__(self) -> None:
        _check_chains(self)
        if not isinstance(self.draft, str) or self.draft not in DRAFT_SOURCES:
            raise bad_value("draft", self.draft, f"one of {listed(DRAFT_SOURCES)}")
        assign(self, "max_ngram", integer("max_ngram", self.max_ngram, 1, 16))
        if self.draft != "model" and self.num_chains > 1:
            raise ValueError(
                f'`num_chains` must be 1 with draft="{self.draft}", but is {self.num_chains}: there is one text to '
                'look up in; draft="model" draws several chains.'
            )
        if self.draft == "ngram" and self.compile_draft:
            raise ValueError(
                '`compile_draft=True` is about the draft model, and draft="ngram" has none: leave it out.'
            )
        if self.draft == "ngram" and self.num_draft_tokens == "auto":
            raise ValueError(
                '`num_draft_tokens="auto"` weighs what the draft model costs, and draft="ngram" has none: give a '
                "number."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`; see [`scheme_from_dict`]."""
        return entry_of(self)


@dataclass(frozen=True, kw_only=True)
class EASDConfig:
    r"""
    Entropy-aware speculative decoding (arXiv 2512.23765).

    A drafted token that passes the ordinary test is rejected all the same where draft and target are both uncertain
    and agree on what the likely tokens are.

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]; `"auto"` as in [`LosslessConfig`]. Default and range are ours.
        num_chains (`int`, *optional*, defaults to 1):
            Chains drafted a round, in [1, 64]. With more than one, the token tested for uncertain agreement is the one
            that multi-draft verification accepted. More than one is ours.
        target_entropy_threshold (`float`, *optional*, defaults to 1.0):
            τ_p in nats, >= 0: the target counts as uncertain where the entropy of its processed law is at least this.
            `inf` switches the extra rejection off, which gives `lossless` bit for bit. The authors take percentiles of
            entropies on held-out text; we know of no published value: the default is uncalibrated and ours.
        draft_entropy_threshold (`float`, *optional*, defaults to 1.0):
            τ_q in nats, >= 0, the same for the draft. The default is uncalibrated and ours.
        overlap_threshold (`float`, *optional*, defaults to 0.8):
            ρ >= 0: the two laws agree where at least this share of their `top_n` sets is common; above 1 they never
            do. We know of no published value: the default is ours.
        top_n (`int`, *optional*, defaults to 10):
            N, the size of those sets, in [1, 1000]. We know of no published value: the default is ours.
        penalty (`float`, *optional*, defaults to 0.0):
            What the target's probability of the rejected token is multiplied by before the next one is drawn, in
            [0, 1]. 0 excludes the token (v1 of the paper), 1 draws from the target as it is (v2's abstract read
            literally). That 0 is the default is our choice.
        trigger (`"entropy"` or `"random"`, *optional*, defaults to `"entropy"`):
            What causes the extra rejection: the rule above, or chance alone, the control that an evaluation needs.
            `"random"` is ours.
        trigger_rate (`float`, *optional*, defaults to 0.0):
            Probability of the extra rejection of a token that passed the ordinary test, in [0, 1]. Used by
            `trigger="random"` only. Ours.
        calibrated_for (`dict`, *optional*):
            Sampling settings that the thresholds were calibrated under, some or all of `do_sample`, `temperature`,
            `top_k` and `top_p`. `None` means that the thresholds are not calibrated. Ours.
        compile_draft (`bool`, *optional*, defaults to `False`):
            As in [`LosslessConfig`].

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "easd"

    num_draft_tokens: int | Literal["auto"] = 5
    num_chains: int = 1
    target_entropy_threshold: float = 1.0
    draft_entropy_threshold: float = 1.0
    overlap_threshold: float = 0.8
    top_n: int = 10
    penalty: float = 0.0
    trigger: Literal["entropy", "random"] = "entropy"
    trigger_rate: float = 0.0
    calibrated_for: dict[str, Any] | None = field(default=None, hash=False)
    compile_draft: bool = False

    def __post_init__(self) -> None:
        _check_chains(self)
        for name in ("target_entropy_threshold", "draft_entropy_threshold", "overlap_threshold"):
            assign(self, name, real(name, getattr(self, name)))
        for name in ("penalty", "trigger_rate"):
            assign(self, name, real(name, getattr(self, name), highest=1.0))
        assign(self, "top_n", integer("top_n", self.top_n, 1, 1000))
        if not isinstance(self.trigger, str) or self.trigger not in ("entropy", "random"):
            raise bad_value("trigger", self.trigger, '"entropy" or "random"')
        assign(self, "calibrated_for", sampling_settings(self.calibrated_for))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`, infinite numbers as `"inf"`; see [`scheme_from_dict`]."""
        return entry_of(self)


TOKEN_LEVEL_CONFIGS: dict[str, type[LosslessConfig] | type[EASDConfig]] = {
    "lossless": LosslessConfig,
    "easd": EASDConfig,
}


def token_level(name: str, value: Any) -> LosslessConfig | EASDConfig | None:
    """The token-level config that the option `name` asks for: `None`, a scheme's name, an entry or a config.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, (LosslessConfig, EASDConfig)):
        return value
    if isinstance(value, Mapping):
        nested: LosslessConfig | EASDConfig = config_from_entry(name, value, TOKEN_LEVEL_CONFIGS)
        return nested
    if isinstance(value, str) and value in TOKEN_LEVEL_CONFIGS:
        return TOKEN_LEVEL_CONFIGS[value]()
    raise bad_value(name, value, f"None, {listed(TOKEN_LEVEL_CONFIGS)}, a LosslessConfig or an EASDConfig")


def _check_chains(config: LosslessConfig | EASDConfig) -> None:
    if not (isinstance(config.num_draft_tokens, str) and config.num_draft_tokens == "auto"):
        value = integer("num_draft_tokens", config.num_draft_tokens, 1, 64, also=' or "auto"')
        assign(config, "num_draft_tokens", value)
    assign(config, "num_chains", integer("num_chains", config.num_chains, 1, 64))
    assign(config, "compile_draft", boolean("compile_draft", config.compile_draft))
