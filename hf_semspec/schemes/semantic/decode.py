"""`semantic`: acceptance of whole segments by probed meaning (SemanticSpec, arXiv 2602.03708): the draft writes a
segment, the target reads it, and writes one itself where it is not likely to say the same."""

from typing import Any

from ...engine.outputs import DecodingStats
from ...engine.request import Request
from .rounds import SegmentRounds


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries the segments with their scores."""
    state = SegmentRounds(request)
    while state.running:
        draft = state.write()  # DRAFT: d_1..d_n from q to a segment stop, EOS or the cap
        if draft is not None:
            reading = state.check(draft)  # CHECK: one target pass over [pending ; d]
            scores = state.scores(reading)  # P̂ = probe_p(f_p), Q̂ = probe_q(f_q)
            decision = state.judge(reading, scores)  # ok iff u < min(1, P̂/Q̂), or every d_t in the top k
            reading = state.redraw(draft, reading, decision)  # residual="exact": s' ~ p until one is kept
            state.commit(draft, reading, decision)  # ok: d and a bonus; else roll back, the first token from p_1
        state.revise()  # REVISE: the target writes on to its own segment stop
    return state.output()
