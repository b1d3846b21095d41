"""`parse`: parallel prefix verification (arXiv 2605.04263): the draft writes a whole answer, the target judges it and
many of its prefixes in one pass, and goes on from the last one before the first that fails."""

from typing import Any

from ...engine.outputs import DecodingStats
from ...engine.request import Request
from .config import PARSEConfig
from .rounds import Verification


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries verdicts, boundaries and kept tokens."""
    config: PARSEConfig = request.scheme
    state = Verification(request)
    for attempt in range(config.max_redrafts + 1):
        answers = state.write()  # 1. the draft writes a complete answer
        verdicts = state.judge(answers)  # 2., 3. c_i for the answer and its prefixes
        state.keep(
            answers, verdicts
        )  # c_full >= τ_full: return it; else cut to the last prefix before the first that fails
        state.revise(to_the_end=attempt == config.max_redrafts)  # 4. the target goes on from there
        if not state.running:
            break
    return state.output()
