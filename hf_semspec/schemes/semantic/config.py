"""The config of the scheme `semantic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...common.fields import assign, bad_value, entry_of, integer, listed, real, shown
from ..easd.config import EASDConfig
from ..lossless.config import LosslessConfig
from ..revising import token_level

SCORERS = ("probe", "sequence", "likelihood", "random", "none")
FIRST_SEGMENTS = ("target", "draft")
RESIDUALS = ("plain", "exact")


@dataclass(frozen=True, kw_only=True)
class SemanticConfig:
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
    accept_rate: float = 1.0
    segment_stop: str | None = "\n\n"
    max_segment_tokens: int = 500
    first_segment: Literal["target", "draft"] = "target"
    top_k_accept: int = 0
    accept_floor: float = 0.0
    accept_ratio: float = 0.9999
    residual: Literal["plain", "exact"] = "plain"
    bonus: bool = True
    think_end: str | None = "</think>"
    max_finish_tokens: int | None = None
    revise_with: LosslessConfig | EASDConfig | None = None
    salvage: bool = True
    revise_chunk: int = 16

    def __post_init__(self) -> None:
        for name in ("probe", "segment_stop", "think_end"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise bad_value(name, value, "None or a text that is not empty")
        for name, choices in (("scorer", SCORERS), ("first_segment", FIRST_SEGMENTS), ("residual", RESIDUALS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise bad_value(name, value, f"one of {listed(choices)}")
        assign(self, "accept_rate", real("accept_rate", self.accept_rate, highest=1.0))
        for name in ("accept_floor", "accept_ratio"):
            assign(self, name, real(name, getattr(self, name)))
        assign(self, "max_segment_tokens", integer("max_segment_tokens", self.max_segment_tokens, 1, 4096))
        assign(self, "top_k_accept", integer("top_k_accept", self.top_k_accept, 0))
        assign(self, "revise_chunk", integer("revise_chunk", self.revise_chunk, 1))
        if self.max_finish_tokens is not None:
            value = integer("max_finish_tokens", self.max_finish_tokens, 1, also=" or None")
            assign(self, "max_finish_tokens", value)
        for name in ("bonus", "salvage"):
            if not isinstance(getattr(self, name), bool):
                raise bad_value(name, getattr(self, name), "a bool")
        assign(self, "revise_with", token_level("revise_with", self.revise_with))
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`, `revise_with` nested; see [`scheme_from_dict`]."""
        return entry_of(self)
