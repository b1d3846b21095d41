"""`smc` on the controlled pair: speed and ESS over N and γ beside exact multi-draft, its bound, its memory."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_semspec import LosslessConfig, SMCConfig
from hf_semspec.bench import ControlledPair
from hf_semspec.bench.costs import forward_seconds
from hf_semspec.bench.progress import Progress, silent
from hf_semspec.bench.rivals import SAMPLING

from . import ways
from .timing import Contender, interleave, median_ratio

GOAL_PARTICLES, GOAL_LENGTH = 4, 8


def measure_smc(
    pair: ControlledPair,
    *,
    particles: Sequence[int],
    lengths: Sequence[int],
    tuned_lengths: Sequence[int],
    prompt: int,
    new_tokens: int,
    repeats: int,
    report: Progress = silent,
) -> dict[str, Any]:
    """Batch 1, sampling: plain, stock assisted at `tuned_lengths`, `smc` and exact multi-draft for every N and γ.

    The pair's laws are sharp where they differ, so ESS is low: what is measured is the cost of the scheme, not what a
    trained pair's weights would be.
    """
    model, draft, ids = pair.model, pair.draft, pair.prompts(1, prompt)
    mode = SAMPLING
    plain = ways.plain(model, ids, new_tokens, mode)
    stock = {n: ways.stock_assisted(model, draft, ids, new_tokens, n, mode) for n in tuned_lengths}
    grid = [(number, gamma) for number in particles for gamma in lengths]
    ours, exact = {}, {}
    for number, gamma in grid:
        config = SMCConfig(num_particles=number, num_draft_tokens=gamma)
        ours[number, gamma] = ways.scheme(f"smc N={number} γ={gamma}", model, draft, ids, new_tokens, config, mode)
        chains = LosslessConfig(num_chains=number, num_draft_tokens=gamma)
        name = f"lossless {number} chains γ={gamma}"
        exact[number, gamma] = ways.scheme(name, model, draft, ids, new_tokens, chains, mode)
    interleave([plain, *stock.values(), *ours.values(), *exact.values()], repeats, report=report)

    tuned = min(stock, key=lambda n: statistics.median(stock[n].seconds))
    rows = [_row(place, ours[place], exact[place], plain, new_tokens) for place in grid]
    goal = _nearest(particles, GOAL_PARTICLES), _nearest(lengths, GOAL_LENGTH)
    chosen = ours[goal]
    costs = measure_costs(pair, goal, context=prompt + new_tokens // 2, prompt=prompt, repeats=3 * repeats + 2)
    bound = (goal[1] + 1) / (costs["c"] + goal[1] * costs["rho"])
    decoding = median_ratio(*([s - costs["prefill"] for s in each.seconds] for each in (plain, chosen)))
    return {
        "rows": rows,
        "tuned": tuned,
        "costs": costs,
        "goal": {
            "name": chosen.name,
            "bound": bound,
            "of_bound": decoding / bound,
            "over_plain": median_ratio(plain.seconds, chosen.seconds),
            "over_tuned": median_ratio(stock[tuned].seconds, chosen.seconds),
        },
        "memory": measure_memory(pair, particles=particles, prompt=prompt, lengths=(new_tokens // 2, new_tokens)),
    }


def measure_costs(
    pair: ControlledPair, place: tuple[int, int], *, context: int, prompt: int, repeats: int
) -> dict[str, float]:
    """c(N(γ+1)) and ρ_N, relative to a target pass of one row over one token, and the seconds of a prefill."""
    number, gamma = place
    seconds = forward_seconds(
        {
            "1": (pair.model, 1),
            "block": (pair.model, gamma + 1),
            "draft": (pair.draft, 1),
            "prefill": (pair.model, prompt),
        },
        batch=1,
        rows={"block": number, "draft": number},
        context=context,
        repeats=repeats,
    )
    one = seconds["1"]
    return {"c": seconds["block"] / one, "rho": seconds["draft"] / one, "prefill": seconds["prefill"]}


def measure_memory(
    pair: ControlledPair, *, particles: Sequence[int], prompt: int, lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Peak bytes of a call of one prompt beside the weights, for every N and number of new tokens."""
    rows = []
    ids = pair.prompts(1, prompt)
    for number in particles:
        for new_tokens in lengths:
            config = SMCConfig(num_particles=number, num_draft_tokens=GOAL_LENGTH)
            way = ways.scheme("smc", pair.model, pair.draft, ids, new_tokens, config, SAMPLING)
            states = sum(_bytes_a_token(model) for model in (pair.model, pair.draft)) * (prompt + new_tokens) * number
            peak = peak_bytes(way.run, pair.model)
            rows.append({"particles": number, "new_tokens": new_tokens, "peak": peak, "states": states})
    return rows


def peak_bytes(run: Callable[[], Any], model: PreTrainedModel) -> int:
    """Most bytes of tensors alive at the end of any forward of `model` during `run`, less those alive before it."""
    gc.collect()
    before, most = _live_bytes(), 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, _live_bytes())

    handle = model.register_forward_hook(look)
    try:
        run()
    finally:
        handle.remove()
    return most - before


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _bytes_a_token(model: PreTrainedModel) -> int:
    config = model.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def _row(
    place: tuple[int, int], ours: Contender, exact: Contender, plain: Contender, new_tokens: int
) -> dict[str, Any]:
    stats = ours.result.stats
    return {
        "particles": place[0],
        "length": place[1],
        "seconds": statistics.median(ours.seconds),
        "spread": [min(ours.seconds), max(ours.seconds)],
        "tokens_per_second": new_tokens / statistics.median(ours.seconds),
        "over_plain": median_ratio(plain.seconds, ours.seconds),
        "ess": stats.mean_ess,
        "resamplings": stats.resamplings,
        "target_forwards": stats.target_forwards,
        "lossless_tokens_per_second": new_tokens / statistics.median(exact.seconds),
        "lossless_tokens_a_round": exact.result.stats.emitted / max(exact.result.stats.rounds, 1),
        "over_lossless": median_ratio(exact.seconds, ours.seconds),
    }


def _nearest(choices: Sequence[int], wanted: int) -> int:
    return min(choices, key=lambda value: abs(value - wanted))
