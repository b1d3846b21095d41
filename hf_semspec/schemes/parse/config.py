"""The config of the scheme `parse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...common.fields import SchemeConfig, assign, bad_value, within
from ..revising import reviser_config
from ..token_level import TokenLevelConfig


@dataclass(frozen=True, kw_only=True)
class PARSEConfig(SchemeConfig):
    r"""
    Parallel prefix verification (arXiv 2605.04263).

    The draft writes a whole answer, the target judges it and many of its prefixes in one forward pass, and goes on
    from the last one before the first that fails. The judge is the target itself, asked in words: how good the output
    is depends on how well it judges.

    Args:
        segment_tokens (`int`, *optional*, defaults to 48):
            Δ, the tokens from one judged prefix to the next, at least 1; each boundary is moved forward to the next
            end of a line or sentence. The default is ours.
        accept_threshold (`float`, *optional*, defaults to 0.9):
            τ_full >= 0: a whole answer is returned as it is where the target's confidence in it is at least this; 0
            accepts every finished answer, above 1 none. The default is ours.
        prefix_threshold (`float`, *optional*, defaults to 0.7):
            τ >= 0: a prefix counts as valid where the confidence is at least this. The default is ours.
        boundary (`str`, *optional*, defaults to `"first_fail"`):
            Which prefix of a failed answer is kept: `"first_fail"` the last one before the first that fails,
            `"longest"` the longest that passes. `"cascade"` keeps none, and `"random"` one at random, of the same mean
            length as `"first_fail"`: controls for an evaluation. The default and the controls are ours.
        single_pass (`bool`, *optional*, defaults to `True`):
            Judge the whole answer and its prefixes in one forward; `False` judges the prefixes in a second one, and
            only where the whole answer has failed. The default is ours.
        judge_prompt (`str`, *optional*):
            What the target is asked about a prefix; `{correct}` and `{incorrect}` stand for the labels. Ours.
        full_judge_prompt (`str`, *optional*):
            What it is asked about the whole answer. Ours.
        labels (`tuple` of two `str`, *optional*, defaults to `("Correct", "Incorrect")`):
            The words that the target answers with.
        revise_with (`str`, [`LosslessConfig`], [`EASDConfig`] or `None`, *optional*, defaults to `"lossless"`):
            The token-level scheme by which the target goes on, with the same draft; `None` lets it decode alone. The
            default is ours.
        draft_ngram (`bool`, *optional*, defaults to `False`):
            Let the draft itself be sped up by n-grams looked up in the text so far; its answers keep their law.
        max_redrafts (`int`, *optional*, defaults to 0):
            How often the draft may write the rest anew after the target has revised one segment, in [0, 64]. Ours.
        max_packed_tokens (`int`, *optional*, defaults to 8192):
            The most tokens, over all rows, of one judging forward, at least 1: more prefixes are judged in several.
            Ours.
        compile_draft (`bool`, *optional*, defaults to `False`):
            Run the draft's one-token forwards from fixed buffers, on CUDA as a captured graph, which is faster where
            launching kernels takes longer than running them. The tokens are the same up to rounding. One
            draft serves writing and revising, so `revise_with` leaves it to this field. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "parse"
    other_tokenizers: ClassVar[bool] = True
    needs_masks: ClassVar[bool] = False

    segment_tokens: int = within(48, 1)
    accept_threshold: float = 0.9
    prefix_threshold: float = 0.7
    boundary: Literal["first_fail", "longest", "cascade", "random"] = "first_fail"
    single_pass: bool = True
    judge_prompt: str = (
        "Is the solution above correct so far? It may be unfinished: do not count that against it. Reply with one "
        "word, {correct} or {incorrect}."
    )
    full_judge_prompt: str = "Is the answer above complete and correct? Reply with one word, {correct} or {incorrect}."
    labels: tuple[str, str] = ("Correct", "Incorrect")
    revise_with: TokenLevelConfig | None = "lossless"  # type: ignore[assignment]
    draft_ngram: bool = False
    max_redrafts: int = within(0, 0, 64)
    max_packed_tokens: int = within(8192, 1)
    compile_draft: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("judge_prompt", "full_judge_prompt"):
            if not getattr(self, name).strip():
                raise bad_value(name, getattr(self, name), "a text that is not empty")
        assign(self, "labels", _labels(self.labels))
        assign(self, "revise_with", reviser_config("revise_with", self.revise_with))
        if self.revise_with is not None and self.revise_with.compile_draft:
            raise ValueError(
                "`revise_with` must leave `compile_draft` off: one draft writes and revises, so set compile_draft of "
                "parse itself."
            )


def _labels(value: Any) -> tuple[str, str]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(label, str) and label.strip() for label in pair) or pair[0] == pair[1]:
        raise bad_value("labels", value, 'two different words, (correct, incorrect), such as ("Yes", "No")')
    return pair
