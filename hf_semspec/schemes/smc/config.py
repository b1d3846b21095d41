"""The config of the scheme `smc`, and the sampling options that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...common.fields import SchemeConfig, positive, within


@dataclass(frozen=True, kw_only=True)
class SMCConfig(SchemeConfig):
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
            likely texts over unlikely ones and no longer aims at the target's law; where fewer particles have weight
            than are returned, the rest have none, and a warning says so. Ours.
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

    num_particles: int = within(8, 1, 256)
    num_draft_tokens: int = within(8, 1, 64)
    ess_threshold: float = within(0.5, 0, 1)
    resampling: Literal["systematic", "multinomial", "stratified", "residual"] = "systematic"
    power: float = positive(1.0)
    select: Literal["sample", "best"] = "sample"
    draft_temperature: float | None = positive(None)
    compile_draft: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.num_draft_tokens, str) and self.num_draft_tokens == "auto":
            raise ValueError(
                '`num_draft_tokens` must be an int in [1, 64] for smc, but is "auto": that follows the acceptance, '
                "and smc accepts every drafted token."
            )
        super().__post_init__()

    @classmethod
    def generation_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Sampling, and nothing cut off, where that is unset.

        Raises:
            ValueError: `do_sample=False`.
        """
        if given.get("do_sample") not in (None, True):
            raise ValueError(
                f"`do_sample` must be True for smc, which draws its particles, but is {given['do_sample']!r}: leave "
                "it out, or decode greedily with the scheme lossless."
            )
        own = {"top_k": 0, "top_p": 1.0} | {name: value for name, value in given.items() if value is not None}
        return {**given, "do_sample": True, "top_k": own["top_k"], "top_p": own["top_p"]}

    def check_call(self, model: Any, generation_config: Any, tokenizer: Any) -> None:
        """Refuse greedy decoding, and more rows than there are particles."""
        if not generation_config.do_sample:
            raise ValueError(
                'smc draws its particles, but do_sample is off: set "do_sample": true in the generation config, or '
                "use the scheme lossless for greedy decoding"
            )
        if generation_config.num_return_sequences > self.num_particles:
            raise ValueError(
                f"num_return_sequences={generation_config.num_return_sequences} asks for more rows than num_particles="
                f"{self.num_particles} has: raise num_particles"
            )
