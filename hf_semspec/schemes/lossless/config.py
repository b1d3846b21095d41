"""The config of the scheme `lossless`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..token_level import ChainsConfig


@dataclass(frozen=True, kw_only=True)
class LosslessConfig(ChainsConfig):
    r"""
    Ordinary speculative sampling: the output follows the target's law exactly (arXiv 2211.17192, 2302.01318).

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]. `"auto"` chooses it each round, 0 among the choices, from what
            stood in this call and what rounds of this pair take. The default and the range are ours.
        num_chains (`int`, *optional*, defaults to 1):
            Chains drafted a round, in [1, 64]. More than one is exact multi-draft verification: one target pass over
            all of them, the same output law. The default is the papers' algorithm; the range is ours.
        verification (`"block"` or `"token"`, *optional*):
            How sampled drafts are judged: a whole block at once (arXiv 2403.10444), or token by token. The output law
            is the same; a block keeps at least as many tokens in expectation. `None` is `"block"` with one chain,
            `"token"` with several. Greedy decoding is the same by both. That `"block"` is the default is our choice.
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
        cost_profile (`dict`, *optional*):
            What rounds take, as `hf-semspec check --save FILE` writes it. Used by `"auto"` only, which measures it by
            itself by default; with it the same seed gives the same tokens. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range, or `num_chains` or `"auto"` asks for a draft
            model where `draft` names none, or several chains are to be verified as a block.
    """

    name: ClassVar[str] = "lossless"

    verification: Literal["block", "token"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verification == "block" and self.num_chains > 1:
            raise ValueError(
                f'`verification="block"` judges one chain, but `num_chains` is {self.num_chains}: leave '
                "`verification` out, or draft one chain."
            )

    @property
    def rule(self) -> str:
        """`verification`, with what `None` stands for."""
        return self.verification or ("token" if self.num_chains > 1 else "block")

    def resolved_dict(self) -> dict[str, Any]:
        """`to_dict`, with the rule that `verification` stands for."""
        return {**self.to_dict(), "verification": self.rule}
