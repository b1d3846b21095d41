"""Distances and tests between an empirical law and the law it should follow."""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2


def total_variation(p: torch.Tensor, q: torch.Tensor) -> float:
    """Half the L1 distance of two laws over the same cells."""
    return 0.5 * float((p - q).abs().sum())


def histogram(draws: torch.Tensor, num_cells: int) -> torch.Tensor:
    """Counts of the integer draws, float64 of shape `(num_cells,)`."""
    return torch.bincount(draws.flatten(), minlength=num_cells).double()


def chi_square_p_value(counts: torch.Tensor, law: torch.Tensor, min_expected: float = 5.0) -> float:
    """P-value of Pearson's test of `counts` against `law`; cells expected less than `min_expected` times are pooled.

    A count in a cell of probability 0 gives 0.
    """
    counts, law = counts.double().flatten(), law.double().flatten()
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law * counts.sum()
    small = expected < min_expected
    observed, wanted = counts[~small], expected[~small]
    if float(expected[small].sum()) > 0:
        observed = torch.cat([observed, counts[small].sum()[None]])
        wanted = torch.cat([wanted, expected[small].sum()[None]])
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return float(chi2.sf(statistic, len(observed) - 1))


def deviations(draws: torch.Tensor, law: torch.Tensor, significance: float = 1e-3) -> list[str]:
    """What speaks against `draws` following `law`: empty when nothing does.

    The bound on the total variation is √(V/n) for V cells and n draws, which no sampler of `law` exceeds but by a
    chance far below `significance`.
    """
    cells, n = law.numel(), draws.numel()
    counts = histogram(draws, cells)
    found = []
    distance, bound = total_variation(counts / n, law.double().flatten()), math.sqrt(cells / n)
    if not distance < bound:
        found.append(f"total variation {distance:.4f} >= {bound:.4f}")
    p_value = chi_square_p_value(counts, law)
    if p_value < significance:
        found.append(f"chi-square p-value {p_value:.2e} < {significance}")
    return found
