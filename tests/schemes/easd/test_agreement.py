"""Entropies, overlaps and easd's trigger."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_semspec.engine.acceptance import entropy
from hf_semspec.schemes.easd.agreement import top_overlap, uncertain_agreement
from tests import reference
from tests.toy import log


def laws(seed: int, vocab: int, num_masked: int, rows: int = 3) -> Tensor:
    """Float64 log-probabilities `(rows, V)` with so many ids masked in each row, at most all but one."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab, generator=rng, dtype=torch.float64)
    for row in logits:
        row[torch.randperm(vocab, generator=rng)[: min(num_masked, vocab - 1)]] = -math.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [-math.inf, None])
def test_ui22_one_token_left_has_entropy_zero(dtype: torch.dtype, mask: float | None) -> None:
    """Masked by -inf, and by the dtype's minimum as some processors do."""
    scores = torch.full((2, 5), torch.finfo(dtype).min if mask is None else mask, dtype=dtype)
    scores[:, 3] = 0.0
    log_p = scores.log_softmax(-1)
    assert entropy(log_p).tolist() == [0.0, 0.0]
    assert top_overlap(log_p, log_p, 3).tolist() == [1.0, 1.0]
    agreement = uncertain_agreement(
        log_p, log_p, target_entropy_threshold=0.1, draft_entropy_threshold=0.1, overlap_threshold=0.8, top_n=3
    )
    assert agreement.tolist() == [False, False]


def test_entropy_of_uniform_laws_is_log_of_their_support() -> None:
    for support in (1, 2, 7):
        law = [1 / support] * support + [0.0] * 3
        torch.testing.assert_close(entropy(log(law)).item(), math.log(support), rtol=0, atol=1e-12)


def test_entropy_keeps_leading_dimensions() -> None:
    log_p = laws(0, 6, 2, rows=6)
    assert torch.equal(entropy(log_p.view(2, 3, 6)), entropy(log_p).view(2, 3))


@pytest.mark.parametrize(
    ("p", "q", "n", "overlap"),
    [
        ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], 2, 0.0),
        ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], 3, 2 / 3),
        ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], 10, 1.0),
        ([0.6, 0.4, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], 3, 1 / 2),  # the smaller support, 2, is the divisor
        ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.6, 0.4], 4, 0.0),  # ids without mass are in no set
        ([1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1], 3, 1.0),
    ],
)
def test_top_overlap_of_small_laws(p: list[float], q: list[float], n: int, overlap: float) -> None:
    torch.testing.assert_close(top_overlap(log(p), log(q), n).item(), overlap, rtol=0, atol=1e-12)
    torch.testing.assert_close(top_overlap(log(q), log(p), n).item(), overlap, rtol=0, atol=1e-12)


def test_top_overlap_needs_a_positive_n() -> None:
    with pytest.raises(ValueError, match="n = 0"):
        top_overlap(log([1.0]), log([1.0]), 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_overlap_reaches_an_equal_threshold(dtype: torch.dtype) -> None:
    """8 of 10 reach ρ = 0.8 in every dtype."""
    scores = torch.arange(12, 0, -1).to(dtype)
    log_p, log_q = scores.log_softmax(-1), scores.roll(2).log_softmax(-1)
    for threshold, reached in ((0.8, True), (0.81, False)):
        agreement = uncertain_agreement(
            log_p,
            log_q,
            target_entropy_threshold=0.0,
            draft_entropy_threshold=0.0,
            overlap_threshold=threshold,
            top_n=10,
        )
        assert agreement.item() is reached


def test_each_condition_is_needed() -> None:
    sharp, flat = log([0.98, 0.01, 0.01]), log([0.4, 0.35, 0.25])
    other = log([0.25, 0.35, 0.4])

    def fires(p: Tensor, q: Tensor) -> bool:
        return bool(
            uncertain_agreement(
                p, q, target_entropy_threshold=0.9, draft_entropy_threshold=0.9, overlap_threshold=1.0, top_n=1
            )
        )

    assert fires(flat, flat)
    assert not fires(sharp, flat)
    assert not fires(flat, sharp)
    assert not fires(flat, other)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 12),
    masked=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    n=st.integers(1, 14),
    thresholds=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0)),
)
def test_reference_measures_the_same(
    seed: int, vocab: int, masked: tuple[int, int], n: int, thresholds: tuple[float, float, float]
) -> None:
    log_p, log_q = laws(seed, vocab, masked[0]), laws(seed + 1, vocab, masked[1])
    tau_p, tau_q, rho = thresholds
    agreement = uncertain_agreement(
        log_p, log_q, target_entropy_threshold=tau_p, draft_entropy_threshold=tau_q, overlap_threshold=rho, top_n=n
    )
    for row, (p, q) in enumerate(zip(log_p.exp().tolist(), log_q.exp().tolist(), strict=True)):
        torch.testing.assert_close(entropy(log_p)[row].item(), reference.entropy(p), rtol=0, atol=1e-9)
        torch.testing.assert_close(
            top_overlap(log_p, log_q, n)[row].item(), reference.overlap(p, q, n), rtol=0, atol=1e-12
        )
        assert agreement[row].item() is reference.uncertain_agreement(p, q, tau_p, tau_q, rho, n)
