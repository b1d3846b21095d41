"""What token-level schemes share: each round drafts a block, scores it, and keeps the tokens that it accepts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from ..common.fields import SchemeConfig, assign, within
from ..drafts.choose import drafter
from ..engine.acceptance import Acceptance
from ..engine.call import CallState
from ..engine.costs import check_profile
from ..engine.outputs import DecodingStats
from ..engine.request import Block, Request
from ..engine.rounds import Speculation
from . import table


@dataclass(frozen=True, kw_only=True)
class TokenLevelConfig(SchemeConfig):
    r"""
    The fields of a scheme that accepts drafted tokens one by one.

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]. `"auto"` chooses it each round, 0 among the choices, from what
            stood in this call and what rounds of this pair take. The default and the range are ours.
        draft (`str`, *optional*, defaults to `"model"`):
            What drafts: `"model"` the `assistant_model`; `"ngram"` the text so far, in which what followed the last
            time its final n-gram occurred is looked up, without a draft model; `"ngram+model"` the text, and the
            `assistant_model` where nothing is found. Both are ours.
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
        ValueError: If a value is of the wrong type or out of its range, or `"auto"` or `compile_draft` asks for a
            draft model where `draft` names none.
    """

    reads_encoders: ClassVar[bool] = True
    other_tokenizers: ClassVar[bool] = True

    num_draft_tokens: int | Literal["auto"] = within(5, 1, 64)
    draft: Literal["model", "ngram", "ngram+model"] = "model"
    max_ngram: int = within(3, 1, 16)
    compile_draft: bool = False
    cost_profile: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cost_profile is not None:
            check_profile(self.cost_profile)
            assign(self, "cost_profile", copy.deepcopy(dict(self.cost_profile)))
        if self.draft == "ngram" and self.compile_draft:
            raise ValueError(
                '`compile_draft=True` is about the draft model, and draft="ngram" has none: leave it out.'
            )
        if self.draft == "ngram" and self.num_draft_tokens == "auto":
            raise ValueError(
                '`num_draft_tokens="auto"` weighs what the draft model costs, and draft="ngram" has none: give a '
                "number."
            )


@dataclass(frozen=True, kw_only=True)
class ChainsConfig(TokenLevelConfig):
    """[`TokenLevelConfig`] of a scheme that can choose among several chains of drafts.

    Args:
        num_chains (`int`, *optional*, defaults to 1): chains drafted a round, in [1, 64].

    Raises:
        ValueError: also if several chains are to be looked up in one text.
    """

    num_chains: int = within(1, 1, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft != "model" and self.num_chains > 1:
            raise ValueError(
                f'`num_chains` must be 1 with draft="{self.draft}", but is {self.num_chains}: there is one text to '
                'look up in; draft="model" draws several chains.'
            )


class TokenLevelRounds(table.Rounds):
    """Rounds of a token-level scheme; `accept` is its rule."""

    def accept(self, block: Block) -> Acceptance:
        """Which drafted tokens of a block stand, and the token that follows them, or its law."""
        raise NotImplementedError

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""
        while state.running:
            block = state.draft_and_score()  # d_1..d_γ from q; p_1..p_{γ+1} in one pass of the target
            state.commit(block, self.accept(block) if block.draft is not None else state.plain(block))
        state.drafter.report(state.call)


def decode(request: Request, rounds: Callable[[CallState, Any], TokenLevelRounds]) -> tuple[Any, DecodingStats]:
    """Run one call of `generate` by `rounds`, from the prompts to the output."""
    config = request.scheme
    call = CallState(request, getattr(config, "num_chains", 1))
    own = rounds(call, config)
    state = Speculation(call, call.target(), drafter(call, config, own.with_laws), with_laws=own.with_laws)
    state.prefill(call.inputs.cached)
    own.run(state)
    output, stats = state.output()
    own.attach(output, stats)
    return output, stats


def scheme(config: type[SchemeConfig], rounds: Callable[[CallState, Any], TokenLevelRounds]) -> table.Scheme:
    """The entry of a token-level scheme."""
    return table.Scheme(config, partial(decode, rounds=rounds), rounds)


Rule = Callable[[Block, Any], Acceptance]


class RuleRounds(TokenLevelRounds):
    """Rounds whose acceptance is a function of a block of one chain and the config.

    Args:
        rule: the function.
        call, config: as [`TokenLevelRounds`].
    """

    with_laws = True

    def __init__(self, rule: Rule, call: CallState, config: Any) -> None:
        super().__init__(call, config)
        self.rule = rule

    def accept(self, block: Block) -> Acceptance:
        """What the rule decides."""
        return self.rule(block.one_chain(), self.config)
