"""Fits the probes to labelled features, and measures them on prompts that they have not seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..schemes.semantic.probe import ROLES, ProbeNetwork
from ..schemes.semantic.rules import acceptance_probability, score_ratio

BINS = 10
LEARNING_RATE, BATCH = 1e-3, 256


@dataclass(frozen=True)
class Samples:
    """Labelled segments of one prompt, of n of the target's and m of the draft's.

    Args:
        target, draft: (n, size) and (m, size) mean hidden states of each model on its own segments.
        crossed: (m, size) those of the target on the draft's segments.
        target_labels, draft_labels: (n,) and (m,) share of the model's own continuations that mean the same.
        crossed_labels: (m,) share of the target's continuations that mean the same as each of the draft's.
    """

    target: torch.Tensor
    draft: torch.Tensor
    crossed: torch.Tensor
    target_labels: torch.Tensor
    draft_labels: torch.Tensor
    crossed_labels: torch.Tensor


def joined(parts: Sequence[Samples]) -> Samples:
    """The samples of several prompts as one."""
    return Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in Samples.__dataclass_fields__))


def fit(samples: Samples, labels: str, hidden: Sequence[int], epochs: int, seed: int) -> dict[str, ProbeNetwork]:
    """The networks of both roles, by mean squared error and Adam.

    Args:
        labels: `"own"`: each model's own segments only; `"cross"`: the target's also on the draft's.
        hidden: sizes of the hidden layers.
        epochs (`int`): passes over the samples.
    """
    features = {"target": samples.target, "draft": samples.draft}
    wanted = {"target": samples.target_labels, "draft": samples.draft_labels}
    if labels == "cross":
        features["target"] = torch.cat([samples.target, samples.crossed])
        wanted["target"] = torch.cat([samples.target_labels, samples.crossed_labels])
    networks = {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for role in ROLES:
            x, y = features[role].float(), wanted[role].float()
            network = ProbeNetwork(x.shape[1], hidden)
            network.standardise(x)
            optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
            for _ in range(epochs):
                order = torch.randperm(len(x))
                for first in range(0, len(x), BATCH):
                    part = order[first : first + BATCH]
                    loss = (network(x[part]) - y[part]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            networks[role] = network.eval().requires_grad_(False)
    return networks


def measure(networks: dict[str, ProbeNetwork], samples: Samples, accept_ratio: float) -> dict[str, Any]:
    """JSON-safe metrics: R² and reliability of the target's probe on its own and on the draft's text and of the
    draft's on its own, and the acceptance that they predict, beside the one by the labels themselves."""
    cases = {
        "target": ("target", samples.target, samples.target_labels),
        "target on draft text": ("target", samples.crossed, samples.crossed_labels),
        "draft": ("draft", samples.draft, samples.draft_labels),
    }
    guesses = {kind: networks[role](x.float()).double() for kind, (role, x, _) in cases.items()}
    labels = {kind: y.double() for kind, (_, _, y) in cases.items()}
    ratio = score_ratio(guesses["target on draft text"], guesses["draft"])
    true_ratio = score_ratio(labels["target on draft text"], labels["draft"])
    return {
        "segments": {kind: len(y) for kind, y in labels.items()},
        "mse": {kind: float((guesses[kind] - y).square().mean()) for kind, y in labels.items()},
        "r2": {kind: _r2(guesses[kind], y) for kind, y in labels.items()},
        "reliability": {kind: reliability(guesses[kind], y) for kind, y in labels.items()},
        "predicted_acceptance": float(acceptance_probability(ratio, 0.0).mean()),
        "predicted_greedy_acceptance": float((ratio >= accept_ratio).double().mean()),
        "labelled_acceptance": float(acceptance_probability(true_ratio, 0.0).mean()),
    }


def reliability(guesses: torch.Tensor, labels: torch.Tensor) -> list[dict[str, float]]:
    """For each of ten bins of the estimate that holds any segment: mean estimate, mean label, number of segments."""
    curve = []
    for b in range(BINS):
        inside = (guesses * BINS).long().clamp(max=BINS - 1) == b
        if bool(inside.any()):
            means = {"predicted": float(guesses[inside].mean()), "label": float(labels[inside].mean())}
            curve.append({**means, "segments": int(inside.sum())})
    return curve


def _r2(guesses: torch.Tensor, labels: torch.Tensor) -> float | None:
    spread = (labels - labels.mean()).square().sum()
    return None if spread == 0 else float(1 - (guesses - labels).square().sum() / spread)
