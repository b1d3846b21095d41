"""`easd`: entropy-aware speculative decoding (arXiv 2512.23765).

A round goes through d_1..d_γ as `lossless` does, and stops at one more place: a token that passes the ordinary test
is rejected all the same where target and draft are both uncertain and yet agree,

    unc   H(q_t) >= τ_q  and  H(p_t) >= τ_p
    agr   |TopN(q_t) ∩ TopN(p_t)| / min(N, |supp p_t|, |supp q_t|) >= ρ

and x ~ r takes its place, where r = p_t but r(d_t) *= penalty, renormalised; greedily the argmax of r. Where r has no
mass, the token stands.
"""

from typing import Any

import torch

from ...common.warn_once import warn_once
from ...engine.acceptance import (
    RESAMPLED,
    Acceptance,
    accept_chains,
    accept_chains_greedy,
    drafted,
    entropy,
    next_law,
    rows_at,
    stop,
)
from ...engine.call import CallState
from ...engine.outputs import DecodingStats
from ...engine.request import Block
from ...engine.rounds import Speculation
from ..token_level import TokenLevelRounds
from .agreement import uncertain_agreement
from .config import EASDConfig


class EASDRounds(TokenLevelRounds):
    """Rounds of `easd`, and the record of their entropies and triggers."""

    with_laws = True

    def __init__(self, call: CallState, config: EASDConfig) -> None:
        super().__init__(call, config)
        self.trace = EntropyTrace(call)
        warn_if_calibrated_elsewhere(config, call.request.generation_config)

    def accept(self, block: Block) -> Acceptance:
        """Which drafted tokens of a block stand, and the token that follows them, or its law."""
        h_p, h_q, triggers = uncertain_agreements(block, self.config, self.call)
        decision = accept(block, triggers, self.config.penalty)
        self.trace.record(block, h_p, h_q, decision)
        return decision

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""
        super().run(state)
        self.trace.triggers += state.resampled

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Put the entropies and the triggers on the output, their means into the statistics."""
        self.trace.attach(output, stats)


def accept(block: Block, triggers: torch.Tensor | None, penalty: float) -> Acceptance:
    """The rule above, for every row of a block; `triggers` (rows, chains, γ) are `unc and agr`, `None` for nowhere."""
    if triggers is not None:
        triggers = triggers & leaves_mass(drafted(block.log_p, block.drafts), penalty)
    if block.drafts.shape[1] > 1:
        if block.choices is not None:
            decision = accept_chains_greedy(block.choices, block.drafts, valid=block.valid, triggers=triggers)
        else:
            decision = accept_chains(
                block.log_p, block.log_q, block.drafts, block.uniforms, valid=block.valid, triggers=triggers
            )
        return decision if triggers is None else resampled(decision, block, penalty)
    one, marked = block.one_chain(), None if triggers is None else triggers[:, 0]
    if one.choices is not None:
        num_accepted, outcome = stop(one.drafts == one.choices[:, :-1], one.valid, marked)
        token = one.choices.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)
        decision = Acceptance(num_accepted, outcome, token=token)
    else:
        p, q = (drafted(law, one.drafts) for law in (one.log_p, one.log_q))  # (rows, γ)
        num_accepted, outcome = stop(one.uniforms * q < p, one.valid, marked)
        decision = Acceptance(num_accepted, outcome, next_law(one.log_p, one.log_q, num_accepted, outcome))
    return decision if triggers is None else resampled(decision, block, penalty)


def leaves_mass(p_drafted: torch.Tensor, penalty: float) -> torch.Tensor:
    """Whether p keeps mass to draw from once the probability of one token is multiplied by `penalty`."""
    return 1 - (1 - penalty) * p_drafted > torch.finfo(p_drafted.dtype).eps


def resampled(decision: Acceptance, block: Block, penalty: float) -> Acceptance:
    """`decision` with r in the place of p, or its argmax, where a trigger stopped the row; on a tie the drafted token
    stays."""
    stopped = decision.outcome == RESAMPLED
    if decision.token is not None:
        at = decision.lead * block.log_p.shape[2] + decision.num_accepted
        p, index = rows_at(block.log_p.flatten(1, 2), at).exp_(), decision.token.unsqueeze(-1)
        best, other = p.scatter(-1, index, -1.0).max(-1)
        changed = stopped & (p.gather(-1, index).squeeze(-1) * penalty < best)
        return decision._replace(token=torch.where(changed, other, decision.token))
    assert decision.law is not None
    token = decision.triggered
    if token is None:
        gamma = block.drafts.shape[2]
        token = block.drafts[:, 0].gather(-1, decision.num_accepted.clamp(max=gamma - 1).unsqueeze(-1)).squeeze(-1)
    index = token.unsqueeze(-1)
    factor = 1 - (1 - penalty) * stopped.unsqueeze(-1).to(decision.law.dtype)
    law = decision.law.scatter(-1, index, decision.law.gather(-1, index) * factor)
    mass = torch.where(stopped.unsqueeze(-1), law.sum(-1, keepdim=True), 1.0)
    return decision._replace(law=law / mass)


def uncertain_agreements(
    block: Block, config: EASDConfig, call: CallState
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """H(p) and H(q) in nats, and `unc and agr` of every drafted position, each (rows, chains, γ).

    With `trigger="random"` the third is a coin of rate `trigger_rate` instead, the control; `None` where nothing can
    trigger.
    """
    log_p, log_q = block.log_p[:, :, :-1], block.log_q
    h_p, h_q = entropy(log_p), entropy(log_q)
    if config.trigger == "random":
        # One coin a depth, so that chains which share a prefix share their triggers.
        coins = call.randomness.coins(*h_p[:, :1].shape)
        return h_p, h_q, (coins < config.trigger_rate).expand_as(h_p)
    thresholds = config.target_entropy_threshold, config.draft_entropy_threshold
    if max(thresholds) == torch.inf or config.overlap_threshold > 1:
        return h_p, h_q, None
    triggers = uncertain_agreement(
        log_p,
        log_q,
        target_entropy_threshold=thresholds[0],
        draft_entropy_threshold=thresholds[1],
        overlap_threshold=config.overlap_threshold,
        top_n=config.top_n,
        entropies=(h_p, h_q),
    )
    return h_p, h_q, triggers


class EntropyTrace:
    """Entropies of the positions whose drafted token was tested, kept on the device until the call ends."""

    def __init__(self, call: CallState) -> None:
        self.call = call
        self.rounds: list[torch.Tensor] = []
        self.places: list[list[tuple[int, int]]] = []
        self.triggers: list[tuple[int, int]] = []

    def record(self, block: Block, h_p: torch.Tensor, h_q: torch.Tensor, decision: Acceptance) -> None:
        """Take a round's entropies (rows, chains, γ), of the chain that was committed; call before the commit."""
        rows, chain = torch.arange(h_p.shape[0], device=h_p.device), decision.lead
        tested = torch.arange(h_p.shape[2], device=h_p.device) <= decision.num_accepted.unsqueeze(1)  # (rows, γ)
        if block.valid is not None:
            tested = tested & block.valid[rows, chain].cumprod(dim=-1).bool()
        pair = torch.stack((h_p[rows, chain], h_q[rows, chain]), dim=1)  # (rows, 2, γ)
        self.rounds.append(torch.where(tested.unsqueeze(1), pair, torch.nan))
        self.places.append([(row, self.call.canvas.generated[row]) for row in block.rows])

    def by_column(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H(p) and H(q) in nats, each (batch, new tokens) on the CPU; nan where the token was not drafted and
        tested."""
        generated = self.call.canvas.generated
        columns = torch.full((len(generated), 2, max(generated)), torch.nan)
        if self.rounds:
            sizes = [entropies.shape[2] for entropies in self.rounds]
            flat = torch.cat([entropies.permute(1, 0, 2).flatten(1) for entropies in self.rounds], dim=1).cpu()
            at = 0
            for size, places in zip(sizes, self.places, strict=True):
                for row, start in places:
                    count = max(min(size, generated[row] - start), 0)
                    columns[row, :, start : start + count] = flat[:, at : at + count]
                    at += size
        return columns[:, 0], columns[:, 1]

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Put the entropies and the triggers on the output, their means into the statistics."""
        h_p, h_q = self.by_column()
        if not h_p.isnan().all():
            stats.mean_target_entropy, stats.mean_draft_entropy = float(h_p.nanmean()), float(h_q.nanmean())
        if isinstance(output, torch.Tensor):
            return
        triggers = torch.zeros(h_p.shape, dtype=torch.bool)
        for row, column in self.triggers:
            if column < self.call.canvas.generated[row]:  # else cut: where nothing ends rows alone, at the very end
                triggers[row, column] = True
        device = output.sequences.device
        output.target_entropies, output.draft_entropies = h_p.to(device), h_q.to(device)
        output.triggers = triggers.to(device)


def warn_if_calibrated_elsewhere(config: EASDConfig, generation_config: Any) -> None:
    """One warning where the thresholds were calibrated for other sampling settings."""
    calibrated = config.calibrated_for
    if calibrated is None or config.trigger == "random":
        return
    names = ("do_sample", "temperature", "top_k", "top_p") if generation_config.do_sample else ("do_sample",)
    changed = [name for name in names if name in calibrated and calibrated[name] != getattr(generation_config, name)]
    if changed:
        warn_once(
            f"easd's thresholds were calibrated for other sampling settings ({', '.join(changed)} differ): calibrate "
            "again with calibrate_easd, or expect another trigger rate"
        )
