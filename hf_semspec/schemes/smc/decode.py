"""`smc`: sequential Monte Carlo speculative decoding (arXiv 2604.15672): every drafted token is kept, and particles
weighted by target over draft are resampled where their weights have become uneven."""

from typing import Any

from ...engine.outputs import DecodingStats
from ...engine.request import Request
from .config import SMCConfig
from .population import Population
from .weights import draw, log_increments, log_normaliser, resample


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries the particles, their weights and the log-evidence."""
    config: SMCConfig = request.scheme
    power = config.power
    state = Population(request)
    state.prefill()  # x0 ~ p(. | prompt)
    while state.running:
        block = state.draft_and_score()  # DRAFT d ~ q, SCORE in one target pass
        bonus, _ = draw(block.last, block.uniforms, power)  # BONUS b ~ p_{γ+1}^α
        state.judge(block, bonus)  # EOS
        increments = log_increments(  # WEIGHT α·log p − log q, up to the end
            block.log_p, block.log_q, log_normaliser(block.last, power), block.kept, power, block.drafted
        )
        log_weights = state.revive(block, state.log_weights + increments)
        uniforms = state.randomness.uniforms(*log_weights.shape)
        resampled = resample(  # RESAMPLE if ESS < threshold·N
            log_weights,
            state.log_evidence,
            config.ess_threshold,
            config.resampling,
            uniforms,
            state.open_prompts(block),
        )
        state.commit(block, resampled)  # x0 = b
    return state.output()
