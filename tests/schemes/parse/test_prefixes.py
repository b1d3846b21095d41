"""Prefixes of a drafted answer, without a model: where they end, which one is kept, and what a packed block sees."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_semspec.engine.masks import packed_masks, packed_slots
from hf_semspec.schemes.parse.judge import confidence
from hf_semspec.schemes.parse.prefixes import boundaries, ends_of, kept_prefix, monotonicity_violations, segment_ended
from tests.schemes.parse import reference

RULES = ("first_fail", "longest", "cascade", "random")
PIECES = st.sampled_from(["a", " b", ".", "!", " ?", "\n", ".\n\n", " c.", "3", "5", "。", "", " ", ". "])

pieces_lists = st.lists(PIECES, max_size=60)
confidences = st.lists(st.floats(0, 1) | st.just(math.nan), max_size=8)
thresholds = st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0, 1.5, math.inf])


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["It", " is", " so", ".", " And"], [3]),
        (["3", ".", "5", " m"], []),
        (["3.", "5"], []),
        (["1", ".", " Add"], [1]),
        (["So", "!", "\n", "Yes", "?", " ", "No"], [1, 2, 4]),
        (["a\nb", "c"], [0]),
        (["a. ", "b"], [0]),
        (["end", "."], []),
        (["好", "。", "是", "！", "\n", "?"], [1, 3, 4]),
        (["e", ".", "g", ".", ","], []),
        ([], []),
    ],
)
def test_ends_of_lines_and_sentences(pieces: list[str], ends: list[int]) -> None:
    assert [index for index, ended in enumerate(ends_of(pieces)) if ended] == ends


def test_boundaries_of_a_text() -> None:
    words = ["w"] * 30
    assert boundaries(words, 8) == [8, 16, 24, 30]
    words[10], words[11] = ".", " w"  # a sentence ends with token 11
    assert boundaries(words, 8) == [11, 19, 27, 30]
    assert boundaries(words, 100) == [30]
    assert boundaries(words, 30) == [30]
    assert boundaries(words, 29) == [29, 30]
    assert boundaries(["\n"], 1) == [1]
    assert boundaries([], 5) == []


@given(pieces_lists, st.integers(1, 12))
def test_boundaries_increase_cover_the_text_and_lie_at_ends_where_there_are_any(
    pieces: list[str], segment_tokens: int
) -> None:
    lengths = boundaries(pieces, segment_tokens)
    ends = ends_of(pieces)
    assert lengths == [] if not pieces else lengths[-1] == len(pieces)
    before = 0
    for length in lengths:
        gap, reach = length - before, range(before + segment_tokens, before + 2 * segment_tokens)
        near = [n for n in reach if n <= len(pieces) and ends[n - 1]]
        if length < len(pieces):
            assert segment_tokens <= gap <= 2 * segment_tokens - 1
            assert length == (near[0] if near else before + segment_tokens)
        else:
            assert 0 < gap <= 2 * segment_tokens - 1
        before = length


@given(pieces_lists, st.integers(1, 12))
def test_a_segment_ends_at_an_end_past_its_due_length_and_never_later_than_twice_that(
    pieces: list[str], segment_tokens: int
) -> None:
    ended = segment_ended(pieces, segment_tokens)
    ends = [n for n, end in enumerate(ends_of(pieces), start=1) if end and n >= segment_tokens]
    assert ended == (bool(ends) or len(pieces) >= 2 * segment_tokens)
    assert not (ended and len(pieces) < segment_tokens)
    assert not ended or segment_ended([*pieces, "a"], segment_tokens), "more text does not open it again"


@pytest.mark.parametrize(
    ("rule", "expected"), [("first_fail", [3, 0, 2, 0]), ("longest", [3, 4, 4, 0]), ("cascade", [0, 0, 0, 0])]
)
def test_kept_prefix_by_rule(rule: str, expected: list[int]) -> None:
    rows = [[0.9, 0.7, 0.8], [0.1, 0.9, 0.2, 0.7], [0.8, 0.9, 0.3, 0.8, 0.1], []]
    assert [kept_prefix(row, rule, 0.7, 0.5) for row in rows] == expected


@given(confidences, thresholds, st.floats(0, 1, exclude_max=True))
def test_first_fail_and_longest_by_definition(values: list[float], threshold: float, uniform: float) -> None:
    first = kept_prefix(values, "first_fail", threshold, uniform)
    longest = kept_prefix(values, "longest", threshold, uniform)
    every = range(len(values) + 1)
    assert first == max(k for k in every if all(value >= threshold for value in values[:k]))
    assert longest == max(k for k in every if k == 0 or values[k - 1] >= threshold)
    assert first <= longest
    assert kept_prefix(values, "cascade", threshold, uniform) == 0
    if threshold > 1:
        assert first == longest == 0


@given(st.sampled_from(RULES), st.integers(1, 6), st.data())
def test_what_was_not_judged_is_never_valid(rule: str, size: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0, 1) | st.just(math.nan), min_size=size, max_size=size))
    kept = kept_prefix(values, rule, 0.0, 0.0)
    if rule in ("first_fail", "longest") and kept:
        assert not math.isnan(values[kept - 1])
    assert kept_prefix([math.nan] * size, rule, 0.0, data.draw(st.floats(0, 1, exclude_max=True))) == 0


def centred(first: int, size: int, uniform: float) -> int:
    """Wrong: uniform on all prefixes, whatever `first` is."""
    return int(uniform * (size + 1))


def mean_of(rule: Callable[[float], int], points: int) -> float:
    return math.fsum(rule((i + 0.5) / points) for i in range(points)) / points


def test_the_random_rule_has_first_fails_mean_and_a_wrong_one_has_not() -> None:
    """Enumerated: every value of the rule's interval once."""
    wrong = []
    for size in range(1, 9):
        for first in range(size + 1):
            values = [0.9] * first + [0.1] * (size - first)
            points = math.lcm(2 * min(first, size - first) + 1, size + 1)
            drawn = [kept_prefix(values, "random", 0.5, (i + 0.5) / points) for i in range(points)]
            assert 0 <= min(drawn) <= max(drawn) <= size
            assert set(drawn) == set(range(min(drawn), max(drawn) + 1)), "an interval"
            assert len({drawn.count(k) for k in set(drawn)}) == 1, "uniform on it"
            assert min(drawn) == 0 or max(drawn) == size, "the widest that fits"
            assert kept_prefix(values, "random", 0.5, 1 - 2.0**-53) <= size
            assert math.isclose(math.fsum(drawn) / points, first, abs_tol=1e-12)
            wrong.append(abs(mean_of(lambda u, f=first, s=size: centred(f, s, u), points) - first))
    assert max(wrong) > 0.5


def test_monotonicity_violations() -> None:
    assert monotonicity_violations([0.9, 0.2, 0.8, 0.1, 0.9], 0.5) == 2
    assert monotonicity_violations([0.9, 0.8, 0.1], 0.5) == 0
    assert monotonicity_violations([], 0.5) == 0
    # What was not judged has neither passed nor failed.
    assert monotonicity_violations([math.nan, math.nan, 0.9], 0.5) == 0
    assert monotonicity_violations([0.1, math.nan, 0.9], 0.5) == 0
    assert monotonicity_violations([0.1, 0.9, math.nan], 0.5) == 1


def test_confidence_sums_over_the_spellings_of_each_label() -> None:
    logits = torch.tensor([0.3, -2.0, 1.5, 0.1, 9.0], dtype=torch.float64)
    law = logits.softmax(dim=-1)
    expected = (law[0] + law[2]) / (law[0] + law[2] + law[1] + law[3])
    assert float(confidence(logits, [0, 2], [1, 3])) == pytest.approx(float(expected), abs=1e-6)
    assert float(confidence(logits, [1, 3], [0, 2])) == pytest.approx(1 - float(expected), abs=1e-6)
    extreme = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    assert confidence(extreme, [0], [1]).tolist() == [1.0, 0.0]
    assert confidence(torch.tensor([5.0, torch.nan]), [0], [1]).isnan()


@st.composite
def packed_blocks(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], list[int]]:
    """Starts, lengths, copies and sizes of rows with unequal texts and unequal numbers of prefixes."""
    rows, copies = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
    starts = [draw(st.integers(0, length)) for length in lengths]
    prefixes = [
        draw(st.lists(st.integers(1, length) | st.just(-1), min_size=copies, max_size=copies)) for length in lengths
    ]
    return starts, lengths, prefixes, draw(st.lists(st.integers(1, 4), min_size=copies, max_size=copies))


@given(packed_blocks(), st.none() | st.integers(1, 6))
def test_ui41_packed_slots_and_masks_equal_a_literal_builder_with_and_without_a_window(
    block: Any, window: int | None
) -> None:
    starts, lengths, copies, sizes = block
    slots = packed_slots(starts, lengths, copies, sizes)
    end = int(slots.columns.max()) + 1
    mask = packed_masks(slots, end, {"any": window}, torch.float32)
    assert isinstance(mask, torch.Tensor)
    positions, visible = reference.packed(starts, lengths, copies, sizes, window)
    assert mask.shape == (len(starts), 1, slots.columns.shape[1], end)
    assert slots.positions.tolist() == positions
    assert mask[:, 0].eq(0).tolist() == visible
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}, "finite"
    assert mask.eq(0).any(dim=-1).all(), "no query is left without a key"
    assert len({tuple(row) for row in slots.columns.tolist()}) <= len(starts)
    assert all(len(set(row)) == len(row) for row in slots.columns.tolist()), "no two tokens share a column"


@given(packed_blocks(), st.integers(1, 20))
def test_a_block_may_be_fed_in_parts(block: Any, step: int) -> None:
    """A part's mask is the whole's, cut to its queries: what comes later is never seen."""
    slots = packed_slots(*block)
    width, end = slots.columns.shape[1], int(slots.columns.max()) + 1
    whole = packed_masks(slots, end, {"any": 3}, torch.float64)
    for first in range(0, width, step):
        part = slots[first : first + step]
        reach = int(part.columns.max()) + 1
        mask = packed_masks(part, reach, {"any": 3}, torch.float64)
        assert torch.equal(mask, whole[:, :, first : first + step, :reach])
        assert whole[:, :, first : first + step, reach:].lt(0).all()


def test_a_wrong_mask_is_told_from_the_literal_one() -> None:
    """Windows by column instead of position, and copies that see each other, must not pass for right."""
    block = ([0], [6], [[2, 5]], [3, 3])
    slots = packed_slots(*block)
    right = reference.packed(*block, 3)[1]
    by_column = packed_masks(slots, 12, {"any": None}, torch.float32)[0, 0].eq(0)
    column, keys = torch.arange(12).unsqueeze(1), torch.arange(12)
    assert (by_column & (column - keys < 3)).tolist() != right[0]
    together = by_column.clone()
    together[9:, 6:9] = True
    assert together.tolist() != reference.packed(*block, None)[1][0]


def test_mixed_layers_get_a_mask_for_each_type() -> None:
    slots = packed_slots([0], [6], [[2, 5]], [3, 3])
    windows = {"sliding_attention": 3, "full_attention": None}
    masks = packed_masks(slots, 12, windows, torch.bfloat16)
    assert isinstance(masks, dict)
    for name, window in windows.items():
        assert torch.equal(masks[name], packed_masks(slots, 12, {name: window}, torch.bfloat16))
        assert masks[name].dtype == torch.bfloat16
    assert not torch.equal(*masks.values())


@given(packed_blocks())
def test_a_copy_stands_where_its_own_prompt_would_put_it(block: Any) -> None:
    starts, lengths, copies, sizes = block
    assume(any(prefix >= 0 for row in copies for prefix in row))
    slots = packed_slots(starts, lengths, copies, sizes)
    text = max(length - start for start, length in zip(starts, lengths, strict=True))
    for row, prefixes in enumerate(copies):
        at = text
        for prefix, size in zip(prefixes, sizes, strict=True):
            if prefix >= 0:
                assert slots.positions[row, at : at + size].tolist() == list(range(prefix, prefix + size))
            at += size
