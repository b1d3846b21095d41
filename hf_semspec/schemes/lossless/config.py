"""The config of the scheme `lossless`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..token_level import ChainsConfig


@dataclass(frozen=True, kw_only=True)
class LosslessConfig(ChainsConfig):
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
