"""`easd`: entropy-aware speculative decoding (arXiv 2512.23765): a token that passes the ordinary test is still rejected where
target and draft are both uncertain and yet agree."""

from typing import Any

import torch

from ..acceptance import Acceptance, accept_chains, accept_chains_greedy
from ..configuration import EASDConfig
from ..notices import warn_once
from ..outputs import DecodingStats
from ..speculation import Block, Request, Speculation
from ..uncertainty import entropy, top_overlap


def decode(request: Request) -> tuple[Any, DecodingStats]:
    """Run one call of `generate`; the output carries `triggers`, the stats mean entropies."""
    config: EASDConfig = request.scheme
    _warn_if_calibrated_elsewhere(config, request.generation_config)
    state = Speculation(request, with_laws=True)
    entropies = torch.zeros(3, device=state.device)  # sums of H(p), H(q) and count over tested positions
    state.prefill()
    while state.running:
        block = state.draft_and_score()
        if block.draft is None:
            state.commit(block, state.plain(block))
            continue
        h_p, h_q, triggers = uncertain_agreements(block, config, state)
        decision = accept(block, triggers, config.penalty)
        entropies += _over_tested(h_p, h_q, decision, block.draft.valid)
        state.commit(block, decision)
    target_sum, draft_sum, count = entropies.tolist()
    if count:
        state.stats.mean_target_entropy, state.stats.mean_draft_entropy = target_sum / count, draft_sum / count
    output, stats = state.output()
    if request.generation_config.return_dict_in_generate:
        output.triggers = _trigger_map(state, output.sequences)
    return output, stats


def uncertain_agreements(
    block: Block, config: EASDConfig, state: Speculation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """H(p) and H(q) in nats, and unc and agr of every drafted position, each (rows, chains, γ).

    With `trigger="random"` the third is a coin of rate `trigger_rate` instead, the control; `None` where nothing can trigger.
    """
    assert block.draft is not None and block.draft.log_q is not None and block.log_p is not None
    log_p, log_q = block.log_p[:, :, :-1], block.draft.log_q
    h_p, h_q = entropy(log_p), entropy(log_q)
    if config.trigger == "random":
        second = state.randomness.second
        return h_p, h_q, torch.rand(h_p.shape, generator=second, device=h_p.device) < config.trigger_rate
    if max(config.draft_entropy_threshold, config.target_entropy_threshold) == torch.inf or config.overlap_threshold > 1:
        return h_p, h_q, None
    unc = (h_q >= config.draft_entropy_threshold) & (h_p >= config.target_entropy_threshold)
    agr = top_overlap(log_p, log_q, config.top_n) >= config.overlap_threshold
    return h_p, h_q, unc & agr


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


def _over_tested(
    h_p: torch.Tensor, h_q: torch.Tensor, decision: Acceptance, valid: torch.Tensor | None
) -> torch.Tensor:
    rows = torch.arange(h_p.shape[0], device=h_p.device)
    tested = torch.arange(h_p.shape[2], device=h_p.device) <= decision.num_accepted.unsqueeze(1)  # (rows, γ)
    if valid is not None:
        tested = tested & valid[rows, decision.chain].cumprod(dim=-1).bool()
    sums = [torch.where(tested, h[rows, decision.chain], 0.0).sum() for h in (h_p, h_q)]
    return torch.stack([*sums, tested.sum()])


def _trigger_map(state: Speculation, sequences: torch.Tensor) -> torch.Tensor:
    triggers = torch.zeros(
        (sequences.shape[0], sequences.shape[1] - state.canvas.prompt_width), dtype=torch.bool, device=sequences.device
    )
    for row, column in state.resampled:
        if column < triggers.shape[1]:
            triggers[row, column] = True
    return triggers


def _warn_if_calibrated_elsewhere(config: EASDConfig, generation_config: Any) -> None:
    calibrated = config.calibrated_for
    if calibrated is None or config.trigger == "random":
        return
    names = ("do_sample", "temperature", "top_k", "top_p") if generation_config.do_sample else ("do_sample",)
    changed = [name for name in names if name in calibrated and calibrated[name] != getattr(generation_config, name)]
    if changed:
        warn_once(
            f"easd's thresholds were calibrated for other sampling settings ({', '.join(changed)} differ): calibrate again with "
            "calibrate_easd, or expect another trigger rate"
        )
