"""`lossless`: ordinary speculative sampling (arXiv 2211.17192, 2302.01318), exact for any draft.

A round drafts d_1..d_γ from q, scores them in one pass of the target, p_1..p_{γ+1}, and goes through them in order:

    accept    d_t stands with probability min(1, p_t(d_t) / q_t(d_t)); greedily iff it is the argmax of p_t
    residual  the first that fails is replaced by x ~ norm(max(p_t - q_t, 0)); greedily by the argmax of p_t
    bonus     where none fails, x ~ p_{γ+1} follows; greedily its argmax

and the round ends there. Several chains (`num_chains`) are tested in turn, each against what the last one left. One
chain that is sampled is decided on at once by default, see [`accept_block`].
"""

from ...engine.acceptance import Acceptance, accept_chains, accept_chains_greedy, drafted, next_law, stop
from ...engine.request import Block
from ..token_level import TokenLevelRounds
from .block import accept_block


class LosslessRounds(TokenLevelRounds):
    """Rounds of `lossless`; without a config, token by token."""

    def accept(self, block: Block) -> Acceptance:
        """Which drafted tokens of a block stand, and the token that follows them, or its law."""
        return accept(block, "token" if self.config is None else self.config.rule)


def accept(block: Block, rule: str = "token") -> Acceptance:
    """The rule above, or by `rule` "block" that of [`accept_block`], for every row of a block."""
    if block.drafts.shape[1] > 1:
        if block.choices is not None:
            return accept_chains_greedy(block.choices, block.drafts, valid=block.valid)
        return accept_chains(block.log_p, block.log_q, block.drafts, block.uniforms, valid=block.valid)
    block = block.one_chain()
    if block.choices is not None:
        num_accepted, outcome = stop(block.drafts == block.choices[:, :-1], block.valid)
        token = block.choices.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)  # residual or bonus
        return Acceptance(num_accepted, outcome, token=token)
    if rule == "block":
        lawful = block.faults[:, 0, :-1] == 0  # where the target has no law, what is behind cannot be looked at
        valid = lawful if block.valid is None else block.valid & lawful
        return accept_block(block.log_p, block.log_q, block.drafts, block.uniforms, valid=valid)
    p, q = (drafted(law, block.drafts) for law in (block.log_p, block.log_q))  # (rows, γ)
    num_accepted, outcome = stop(block.uniforms * q < p, block.valid)
    return Acceptance(num_accepted, outcome, next_law(block.log_p, block.log_q, num_accepted, outcome))
