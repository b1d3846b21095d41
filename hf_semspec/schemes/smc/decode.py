"""`smc`: sequential Monte Carlo speculative decoding (arXiv 2604.15672): every drafted token is kept, and particles
weighted by target over draft are resampled where their weights have become uneven."""

from typing import Any

from ...engine.outputs import DecodingStats
from ...engine.request import Request
from .config import SMCConfig
from .population import Particles
from .weights import draw, log_increments, log_normaliser, resample


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries the particles, their weights and the log-evidence."""
    config: SMCConfig = request.scheme
    power = config.power
    state = Particles(request)
    state.prefill()  # x0 ~ p(. | prompt)
    while state.running:
        scored = state.draft_and_score()  # DRAFT d ~ q, SCORE in one target pass
        bonus, _ = draw(scored.last, scored.uniforms, power)  # BONUS b ~ p_{γ+1}^α
        judged = state.judge(scored, bonus)  # EOS
        increments = log_increments(  # WEIGHT α·log p − log q, up to the end
            scored.log_p, scored.log_q, log_normaliser(scored.last, power), judged.kept, power, scored.drafted
        )
        judged = state.revive(judged, increments)
        resampling = resample(  # RESAMPLE if ESS < threshold·N
            judged.log_weights,
            state.log_evidence,
            config.ess_threshold,
            config.resampling,
            state.call.randomness.uniforms(*increments.shape),
            state.open_prompts(judged),
        )
        state.commit(judged, resampling)  # x0 = b
    return state.output()
