"""`easd`: entropy-aware speculative decoding (arXiv 2512.23765): a token that passes the ordinary test is still
rejected where target and draft are both uncertain and yet agree."""

from typing import Any

import torch

from ...common.warn_once import warn_once
from ...engine.acceptance import Acceptance, accept_chains, accept_chains_greedy, entropy
from ...engine.call import CallState
from ...engine.outputs import DecodingStats
from ...engine.request import Block, Request
from ...engine.rounds import Speculation
from ..token_level import begin
from .agreement import uncertain_agreement
from .config import EASDConfig


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries `triggers` and the entropies, the stats their means."""
    state = begin(request, with_laws=True)
    rounds = Rounds(state.call, request.scheme)
    rounds.run(state)
    output, stats = state.output()
    rounds.attach(output, stats)
    return output, stats


class Rounds:
    """The rounds of this scheme, for any rows of `call`, and their record."""

    with_laws = True

    def __init__(self, call: CallState, config: EASDConfig) -> None:
        self.config = config
        self.trace = EntropyTrace(call)
        warn_if_calibrated_elsewhere(config, call.request.generation_config)

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""
        while state.running:
            block = state.draft_and_score()
            if block.draft is None:
                state.commit(block, state.plain(block))
                continue
            h_p, h_q, triggers = uncertain_agreements(block, self.config, state)
            decision = accept(block, triggers, self.config.penalty)
            self.trace.record(state.live, h_p, h_q, decision, block.draft.valid)
            state.commit(block, decision)
        self.trace.triggers += state.resampled

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Put the entropies and the triggers on the output, their means into the statistics."""
        self.trace.attach(output, stats)


def uncertain_agreements(
    block: Block, config: EASDConfig, state: Speculation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """H(p) and H(q) in nats, and `unc and agr` of every drafted position, each (rows, chains, γ).

    With `trigger="random"` the third is a coin of rate `trigger_rate` instead, the control; `None` where nothing can
    trigger.
    """
    assert block.draft is not None and block.draft.log_q is not None and block.log_p is not None
    log_p, log_q = block.log_p[:, :, :-1], block.draft.log_q
    h_p, h_q = entropy(log_p), entropy(log_q)
    if config.trigger == "random":
        # One coin a depth, so that chains which share a prefix share their triggers.
        coins = torch.rand(h_p[:, :1].shape, generator=state.call.randomness.second, device=h_p.device)
        return h_p, h_q, (coins < config.trigger_rate).expand_as(h_p)
    if (
        max(config.draft_entropy_threshold, config.target_entropy_threshold) == torch.inf
        or config.overlap_threshold > 1
    ):
        return h_p, h_q, None
    triggers = uncertain_agreement(
        log_p,
        log_q,
        target_entropy_threshold=config.target_entropy_threshold,
        draft_entropy_threshold=config.draft_entropy_threshold,
        overlap_threshold=config.overlap_threshold,
        top_n=config.top_n,
        entropies=(h_p, h_q),
    )
    return h_p, h_q, triggers


def accept(block: Block, triggers: torch.Tensor | None, penalty: float) -> Acceptance:
    """The ordinary test, then the trigger: x ~ r, with r = p but r[d] *= penalty."""
    draft = block.draft
    assert draft is not None
    if block.choices is not None:
        return accept_chains_greedy(
            block.choices, draft.ids, valid=draft.valid, triggers=triggers, log_p=block.log_p, penalty=penalty
        )
    assert block.log_p is not None and draft.log_q is not None and block.uniforms is not None
    return accept_chains(
        block.log_p, draft.log_q, draft.ids, block.uniforms, valid=draft.valid, triggers=triggers, penalty=penalty
    )


class EntropyTrace:
    """Entropies of the positions whose drafted token was tested, kept on the device until the call ends."""

    def __init__(self, call: CallState) -> None:
        self.call = call
        self.rounds: list[torch.Tensor] = []
        self.places: list[list[tuple[int, int]]] = []
        self.triggers: list[tuple[int, int]] = []

    def record(
        self,
        live: list[int],
        h_p: torch.Tensor,
        h_q: torch.Tensor,
        decision: Acceptance,
        valid: torch.Tensor | None,
    ) -> None:
        """Take a round's entropies (rows, chains, γ), of the chain that was committed; call before the commit."""
        rows, chain = torch.arange(h_p.shape[0], device=h_p.device), decision.chain
        tested = torch.arange(h_p.shape[2], device=h_p.device) <= decision.num_accepted.unsqueeze(1)  # (rows, γ)
        if valid is not None:
            tested = tested & valid[rows, chain].cumprod(dim=-1).bool()
        pair = torch.stack((h_p[rows, chain], h_q[rows, chain]), dim=1)  # (rows, 2, γ)
        self.rounds.append(torch.where(tested.unsqueeze(1), pair, torch.nan))
        self.places.append([(row, self.call.canvas.generated[row]) for row in live])

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
                    count = min(size, generated[row] - start)
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
