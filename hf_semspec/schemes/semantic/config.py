"""The config of the scheme `semantic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...common.fields import SchemeConfig, assign, shown, within
from ...engine.text import find_tokenizer
from ..revising import reviser_config
from ..token_level import TokenLevelConfig

TEXT_USE = "the scheme semantic tells segments by their text"


@dataclass(frozen=True, kw_only=True)
class SemanticConfig(SchemeConfig):
    r"""
    Acceptance of whole segments by probed meaning (SemanticSpec, arXiv 2602.03708; its released code is the source of
    what is not marked as ours).

    The draft writes a segment, up to a paragraph break; the target reads it in one pass, and it stands with
    probability min(1, P̂/Q̂), where two probes on hidden states estimate how likely target and draft are to say a
    segment of this meaning. Where it fails the target writes the segment itself.

    Args:
        probe (`str`, *optional*):
            The folder or Hub id of the probes that [`train_semantic_probe`] made for this pair; `scorer="probe"` needs
            them.
        scorer (`str`, *optional*, defaults to `"probe"`):
            Where P̂ and Q̂ come from. `"sequence"` takes the probabilities of the segment under either model,
            `"likelihood"` their geometric means a token; `"random"` accepts with probability `accept_rate`, and
            `"none"` nothing but by `top_k_accept`: controls that need no training, and ours.
        accept_rate (`float`, *optional*, defaults to 1.0):
            Used by `scorer="random"` only, in [0, 1]; 1 accepts every segment. Ours.
        segment_stop (`str` or `None`, *optional*, defaults to `"\n\n"`):
            The text that ends a segment, wherever the tokenizer cuts it. `None` leaves `max_segment_tokens` alone, and
            needs no tokenizer.
        max_segment_tokens (`int`, *optional*, defaults to 500):
            The longest segment, in tokens, in [1, 4096].
        first_segment (`"target"` or `"draft"`, *optional*, defaults to `"target"`):
            Who writes the first segment.
        top_k_accept (`int`, *optional*, defaults to 0):
            A segment also stands if each of its tokens is among the `top_k_accept` best of the target at its place; 0
            switches this second, token-level rule off. The release has 2; the default is ours.
        accept_floor (`float`, *optional*, defaults to 0.0):
            P̂/Q̂ below this always fails, >= 0; `inf` lets nothing pass by its score.
        accept_ratio (`float`, *optional*, defaults to 0.9999):
            Greedy decoding accepts iff P̂/Q̂ is at least this (and at least `accept_floor`), >= 0. Ours.
        residual (`"plain"` or `"exact"`, *optional*, defaults to `"plain"`):
            What the target writes where a drafted segment fails: `"plain"` what it likes, as in the release; `"exact"`
            what its law has more than the draft's, so that with true P̂ and Q̂ the output follows the target's law. It
            writes, and both models score, segment after segment until one is kept: for reference, slow, and for
            sampling only. It needs the scorer `"probe"`, `"sequence"` or `"likelihood"`, `top_k_accept=0` and
            `revise_with=None`. Ours.
        bonus (`bool`, *optional*, defaults to `True`):
            After a segment that stands, commit one token of the target's, which its pass has given anyway.
        think_end (`str` or `None`, *optional*, defaults to `"</think>"`):
            The text that ends the reasoning: a drafted segment that holds it is dropped, and from there on the target
            writes alone. The default is ours.
        max_finish_tokens (`int` or `None`, *optional*):
            The most tokens that it then writes, at least 1; `None` leaves it `generate`'s limits. The default is ours.
        revise_with (`str`, [`LosslessConfig`], [`EASDConfig`] or `None`, *optional*):
            The token-level scheme, with the same draft, by which the target writes; `None` lets it decode alone, as in
            the release.
        salvage (`bool`, *optional*, defaults to `True`):
            Greedy decoding only: keep the leading tokens of a failed segment that the target would have written, too.
            It changes no token. Ours.
        revise_chunk (`int`, *optional*, defaults to 16):
            In a batch, the tokens that the target writes in rows that failed before rows that wait draft again, at
            least 1. Greedy decoding gives the same tokens whatever it is. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range, `revise_with` has `compile_draft` on, or
            `residual="exact"` stands beside a field that it cannot be exact with.
    """

    name: ClassVar[str] = "semantic"

    probe: str | None = None
    scorer: Literal["probe", "sequence", "likelihood", "random", "none"] = "probe"
    accept_rate: float = within(1.0, 0, 1)
    segment_stop: str | None = "\n\n"
    max_segment_tokens: int = within(500, 1, 4096)
    first_segment: Literal["target", "draft"] = "target"
    top_k_accept: int = 0
    accept_floor: float = 0.0
    accept_ratio: float = 0.9999
    residual: Literal["plain", "exact"] = "plain"
    bonus: bool = True
    think_end: str | None = "</think>"
    max_finish_tokens: int | None = within(None, 1)
    revise_with: TokenLevelConfig | None = None
    salvage: bool = True
    revise_chunk: int = within(16, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        assign(self, "revise_with", reviser_config("revise_with", self.revise_with))
        if self.revise_with is not None and self.revise_with.compile_draft:
            raise ValueError("`revise_with` must leave `compile_draft` off: semantic reads the draft's hidden states.")
        if self.residual == "exact":
            self._check_exact()

    def _check_exact(self) -> None:
        for name, value, fits in (
            ("scorer", self.scorer, self.scorer in ("probe", "sequence", "likelihood")),
            ("top_k_accept", self.top_k_accept, self.top_k_accept == 0),
            ("revise_with", self.revise_with, self.revise_with is None),
        ):
            if not fits:
                raise ValueError(
                    f"`residual='exact'` does not go with {name}={shown(value)}: it redraws by P̂ and Q̂ what the "
                    "target writes alone, so it needs the scorer 'probe', 'sequence' or 'likelihood', "
                    "`top_k_accept=0` and `revise_with=None`; or take `residual='plain'`."
                )

    @property
    def reads_text(self) -> bool:
        """Whether segments are told by their text, for which a tokenizer is needed."""
        return self.segment_stop is not None or self.think_end is not None

    def check_call(self, model: Any, generation_config: Any, tokenizer: Any) -> None:
        """Refuse a scorer that lacks its probe or its tokenizer, and a residual that a greedy call has no use for."""
        if self.reads_text:
            find_tokenizer(model, tokenizer, TEXT_USE)
        if self.scorer == "probe" and self.probe is None:
            raise ValueError(
                'scorer="probe" needs probe=..., the folder or Hub id of a trained probe: make one for this pair with '
                'train_semantic_probe, or take a scorer without training, such as scorer="likelihood"'
            )
        if self.residual == "exact" and not generation_config.do_sample:
            raise ValueError(
                'residual="exact" draws segments until one is kept, but do_sample is off: set do_sample=True, or take '
                'residual="plain"'
            )
