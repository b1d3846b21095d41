"""What token-level schemes share: their common fields, and how a call of theirs begins."""

from __future__ import annotations

from typing import Any

from ..common.fields import assign, boolean, integer
from ..drafts.choose import drafter
from ..engine.call import CallState
from ..engine.request import Request
from ..engine.rounds import Speculation


def check_chains(config: Any) -> None:
    """Check the fields that every token-level scheme has."""
    if not (isinstance(config.num_draft_tokens, str) and config.num_draft_tokens == "auto"):
        value = integer("num_draft_tokens", config.num_draft_tokens, 1, 64, also=' or "auto"')
        assign(config, "num_draft_tokens", value)
    assign(config, "num_chains", integer("num_chains", config.num_chains, 1, 64))
    assign(config, "compile_draft", boolean("compile_draft", config.compile_draft))


def begin(request: Request, with_laws: bool = False) -> Speculation:
    """A whole call: all rows, with the drafts that the request's scheme wants, up to the first token."""
    call = CallState(request, request.scheme.num_chains)
    state = Speculation(call, call.target(), drafter(call, request.scheme, with_laws), with_laws=with_laws)
    state.prefill(call.inputs.cached)
    return state
