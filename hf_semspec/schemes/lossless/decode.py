"""`lossless`: ordinary speculative sampling (arXiv 2211.17192, 2302.01318), exact for any draft."""

from typing import Any

from ...engine.acceptance import Acceptance, accept_chains, accept_chains_greedy
from ...engine.call import CallState
from ...engine.outputs import DecodingStats
from ...engine.request import Block, Request
from ...engine.rounds import Speculation
from ..token_level import begin
from .config import LosslessConfig


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`."""
    state = begin(request)
    Rounds(state.call, request.scheme).run(state)
    return state.output()


class Rounds:
    """The rounds of this scheme, for any rows of `call`."""

    with_laws = False

    def __init__(self, call: CallState, config: LosslessConfig) -> None:
        self.call = call

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""
        while state.running:
            block = state.draft_and_score()
            state.commit(block, accept(block) if block.draft is not None else state.plain(block))

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Nothing: the statistics say all."""


def accept(block: Block) -> Acceptance:
    """Accept each token with probability min(1, p/q), greedily where it is the argmax; then residual or bonus."""
    draft = block.draft
    assert draft is not None
    if block.choices is not None:
        return accept_chains_greedy(block.choices, draft.ids, valid=draft.valid)
    assert block.log_p is not None and draft.log_q is not None and block.uniforms is not None
    return accept_chains(block.log_p, draft.log_q, draft.ids, block.uniforms, valid=draft.valid)
