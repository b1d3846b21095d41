"""The rules of lossless and easd on bare tensors, in the shapes of one chain and of several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_semspec.engine.acceptance import Acceptance
from hf_semspec.engine.draft import Draft
from hf_semspec.engine.request import Block
from hf_semspec.schemes.easd import decode as easd
from hf_semspec.schemes.lossless import decode as lossless


def block(drafts: Tensor, valid: Tensor | None = None, log_q: Any = None, **laws: Any) -> Block:
    """A block of (rows, chains, γ) drafts."""
    broken = torch.zeros((), dtype=torch.bool)
    draft = Draft(drafts, valid, [drafts.shape[2]] * len(drafts), log_q, broken)
    laws = {"scores": None, "logits": None, "log_p": None, "choices": None, "uniforms": None, **laws}
    faults = torch.zeros(*drafts.shape[:2], drafts.shape[2] + 1, dtype=torch.long)
    return Block(rows=list(range(len(drafts))), draft=draft, faults=faults, **laws)


def decide(block: Block, triggers: Tensor | None, penalty: float) -> Acceptance:
    """By the rule of lossless, or with triggers by that of easd."""
    decision = lossless.accept(block) if triggers is None else easd.accept(block, triggers, penalty)
    return decision._replace(chain=decision.lead)


def accept_chains(
    log_p: Tensor,
    log_q: Tensor,
    drafts: Tensor,
    uniforms: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    penalty: float = 0.0,
) -> Acceptance:
    """N chains: (B, N, γ+1, V), (B, N, γ, V), (B, N, γ), (B, N, γ)."""
    return decide(block(drafts, valid, log_q, log_p=log_p, uniforms=uniforms), triggers, penalty)


def accept_chain(log_p: Tensor, log_q: Tensor, drafts: Tensor, uniforms: Tensor, **options: Any) -> Acceptance:
    """One chain, without the dimension N."""
    return accept_chains(*(value.unsqueeze(1) for value in (log_p, log_q, drafts, uniforms)), **_unsqueezed(options))


def accept_chains_greedy(
    choices: Tensor,
    drafts: Tensor,
    *,
    valid: Tensor | None = None,
    triggers: Tensor | None = None,
    log_p: Tensor | None = None,
    penalty: float = 0.0,
) -> Acceptance:
    """N chains, greedily: `choices` (B, N, γ+1) are the target's."""
    return decide(block(drafts, valid, log_p=log_p, choices=choices), triggers, penalty)


def accept_chain_greedy(choices: Tensor, drafts: Tensor, **options: Any) -> Acceptance:
    """One chain, greedily."""
    return accept_chains_greedy(choices.unsqueeze(1), drafts.unsqueeze(1), **_unsqueezed(options))


def _unsqueezed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.unsqueeze(1) if isinstance(value, Tensor) else value for name, value in options.items()}
