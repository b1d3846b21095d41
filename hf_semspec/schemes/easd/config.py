"""The config of the scheme `easd`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ...common.fields import assign, sampling_settings, within
from ..token_level import ChainsConfig


@dataclass(frozen=True, kw_only=True)
class EASDConfig(ChainsConfig):
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
            `inf` switches the extra rejection off, which gives `lossless` with `verification="token"` bit for bit. The
            authors take percentiles of entropies on held-out text; we know of no published value: the default is
            uncalibrated and ours.
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
        draft (`str`, *optional*, defaults to `"model"`):
            As in [`LosslessConfig`]. What is looked up is certain, so no trigger stops it while
            `draft_entropy_threshold` is above 0. Ours.
        max_ngram (`int`, *optional*, defaults to 3):
            As in [`LosslessConfig`].
        compile_draft (`bool`, *optional*, defaults to `False`):
            As in [`LosslessConfig`].
        cost_profile (`dict`, *optional*):
            As in [`LosslessConfig`].

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "easd"

    target_entropy_threshold: float = 1.0
    draft_entropy_threshold: float = 1.0
    overlap_threshold: float = 0.8
    top_n: int = within(10, 1, 1000)
    penalty: float = within(0.0, 0, 1)
    trigger: Literal["entropy", "random"] = "entropy"
    trigger_rate: float = within(0.0, 0, 1)
    calibrated_for: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        assign(self, "calibrated_for", sampling_settings(self.calibrated_for))
