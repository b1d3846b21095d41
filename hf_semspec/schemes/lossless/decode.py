"""`lossless`: ordinary speculative sampling (arXiv 2211.17192, 2302.01318), exact for any draft.

A round drafts d_1..d_γ from q, scores them in one pass of the target, p_1..p_{γ+1}, and goes through them in order:

    accept    d_t stands with probability min(1, p_t(d_t) / q_t(d_t)); greedily iff it is the argmax of p_t
    residual  the first that fails is replaced by x ~ norm(max(p_t - q_t, 0)); greedily by the argmax of p_t
    bonus     where none fails, x ~ p_{γ+1} follows; greedily its argmax

and the round ends there. Several chains (`num_chains`) are tested in turn, each against what the last one left.
"""

from ...engine.acceptance import Acceptance, accept_chains, accept_chains_greedy, drafted, next_law, stop
from ...engine.request import Block
from ..token_level import TokenLevelRounds


class LosslessRounds(TokenLevelRounds):
    """Rounds of `lossless`."""

    def accept(self, block: Block) -> Acceptance:
        """Which drafted tokens of a block stand, and the token that follows them, or its law."""
        return accept(block)


def accept(block: Block) -> Acceptance:
    """The rule above, for every row of a block."""
    if block.drafts.shape[1] > 1:
        if block.choices is not None:
            return accept_chains_greedy(block.choices, block.drafts, valid=block.valid)
        return accept_chains(block.log_p, block.log_q, block.drafts, block.uniforms, valid=block.valid)
    block = block.one_chain()
    if block.choices is not None:
        num_accepted, outcome = stop(block.drafts == block.choices[:, :-1], block.valid)
        token = block.choices.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)  # residual or bonus
        return Acceptance(num_accepted, outcome, token=token)
    p, q = (drafted(law, block.drafts) for law in (block.log_p, block.log_q))  # (rows, γ)
    num_accepted, outcome = stop(block.uniforms * q < p, block.valid)
    return Acceptance(num_accepted, outcome, next_law(block.log_p, block.log_q, num_accepted, outcome))
