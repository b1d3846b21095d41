"""The pure rules of `semantic`: enumerated laws of the committed meaning, forced uniforms, the token rule, texts."""

import math

import pytest
import torch

from hf_semspec.calibration.meanings import meanings, shares
from hf_semspec.engine.text import TokenTexts
from hf_semspec.schemes.semantic.rules import (
    acceptance_probability,
    accepted,
    leading_matches,
    residual_keep_probability,
    score_ratio,
    within_top_k,
)
from hf_semspec.schemes.semantic.segment import Segment
from tests.models import tokenizer
from tests.schemes.semantic.laws import committed_law, exact_law
from tests.toy import assert_exact


def laws(seed: int, meanings: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """P and Q over meanings; each misses one that the other has."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(2, meanings, generator=generator, dtype=torch.float64) + 0.02).pow(2)
    if seed % 3:
        p[seed % meanings] = 0
        q[(seed + 1) % meanings] = 0
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("seed", range(12))
def test_the_committed_law_is_the_one_that_the_page_states(seed: int) -> None:
    """Summed over what is drafted, whether it stands, and what the target then writes."""
    p, q = laws(seed)
    acceptance = acceptance_probability(score_ratio(p, q), 0.0)
    enumerated = torch.zeros_like(p)
    for drafted in range(len(p)):
        stands = float(acceptance[drafted])
        enumerated[drafted] += q[drafted] * stands
        for written in range(len(p)):
            enumerated[written] += q[drafted] * (1 - stands) * p[written]
    assert_exact(committed_law(p, q, acceptance), enumerated)
    assert_exact(enumerated.sum(), 1.0)
    overlap = torch.minimum(p, q)
    a = overlap.sum()
    assert_exact(enumerated, overlap + (1 - a) * p)
    distance = 0.5 * float((enumerated - p).abs().sum())
    assert distance <= float(a * (1 - a)) + 1e-12 <= 0.25 + 1e-12
    # The control: what stands whatever it means, or at chance with the same rate, is further away.
    blind = committed_law(p, q, torch.full_like(p, float((q * acceptance).sum())))
    assert 0.5 * float((blind - p).abs().sum()) > distance


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("floor", [0.0, 0.7, math.inf])
def test_the_exact_residual_gives_the_targets_law_and_a_wrong_one_does_not(seed: int, floor: float) -> None:
    p, q = laws(seed)
    acceptance = acceptance_probability(score_ratio(p, q), floor)
    keep = residual_keep_probability(p, q, acceptance)
    assert_exact(exact_law(p, q, acceptance, keep), p)
    if floor == 0:
        assert_exact(keep[p > 0], (1 - q / p).clamp(min=0)[p > 0])
    wrong = exact_law(p, q, acceptance, torch.ones_like(p))
    assert_exact(wrong, committed_law(p, q, acceptance))
    if floor < math.inf:  # where nothing passes, to keep all is right
        with pytest.raises(AssertionError):
            assert_exact(wrong, p)


def test_equal_laws_reject_nothing_and_disjoint_ones_all() -> None:
    p, _ = laws(0)
    assert_exact(acceptance_probability(score_ratio(p, p), 0.0), torch.ones_like(p))
    assert_exact(exact_law(p, p, torch.ones_like(p), residual_keep_probability(p, p, torch.ones_like(p))), p)
    one, other = torch.eye(2, dtype=torch.float64)
    assert acceptance_probability(score_ratio(one, other), 0.0).tolist() == [0.0, 0.0]
    assert_exact(committed_law(one, other, torch.zeros(2, dtype=torch.float64)), one)


def test_uniforms_forced_to_both_sides_of_the_ratio() -> None:
    ratio = score_ratio(torch.tensor([0.3, 0.3, 0.9, 0.0]), torch.tensor([0.6, 0.6, 0.3, 0.2]))
    below, above = math.nextafter(0.5, 0), 0.5
    assert accepted(ratio, torch.tensor([0.49, above, 0.999, 0.0]), 0.0, 9.0).tolist() == [True, False, True, False]
    assert below < 0.5
    # What the draft is said never to write is rejected, whatever the target thinks of it.
    nothing = score_ratio(torch.tensor([0.5, 0.0]), torch.tensor([0.0, -0.1]))
    assert nothing.tolist() == [0.0, 0.0]
    assert accepted(nothing, torch.zeros(2), 0.0, 0.0).tolist() == [False, False]


def test_the_floor_and_the_greedy_ratio() -> None:
    ratio = torch.tensor([0.2, 0.7, 0.9999, 1.5])
    zeros = torch.zeros(4)
    assert accepted(ratio, zeros, 0.7, 1.0).tolist() == [False, True, True, True]
    assert accepted(ratio, zeros, math.inf, 1.0).tolist() == [False] * 4
    assert accepted(ratio, None, 0.0, 0.9999).tolist() == [False, False, True, True]
    assert accepted(ratio, None, 1.2, 0.5).tolist() == [False, False, False, True]
    assert accepted(ratio, None, 0.0, 0.0).tolist() == [True] * 4


def test_the_token_rule_counts_ties_and_no_id_without_mass() -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0, -torch.inf, 2.0]])
    ranks = {k: within_top_k(scores.expand(5, -1), torch.arange(5), k).tolist() for k in (1, 2, 3, 5)}
    assert ranks[1] == [True, False, True, False, False]
    assert ranks[2] == [True, False, True, False, False]
    assert ranks[3] == [True, False, True, False, True]
    assert ranks[5] == [True, True, True, False, True]


def test_a_failed_segment_leaves_its_leading_matches_but_never_its_last_token() -> None:
    ids = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 9, 9]])
    choices = torch.tensor([[4, 5, 6, 1], [4, 0, 6, 1], [0, 5, 6, 1], [4, 7, 7, 7]])
    assert leading_matches(choices, ids, torch.tensor([3, 3, 3, 1])).tolist() == [2, 1, 0, 0]


def pieces(*texts: str) -> Segment:
    segment = Segment("ab", "cd", 6)
    segment.begin(texts[0])
    for text in texts[1:]:
        segment.add(text, 1)
    return segment


def test_a_stop_is_found_in_the_text_wherever_the_tokens_are_cut() -> None:
    assert pieces("", "xa", "bx").ended
    assert pieces("", "xa", "bx").rest == "x"
    assert pieces("a", "b").ended, "a target's token before the segment is the first half"
    assert not pieces("ab", "x").ended, "the stop before the segment is not its own"
    assert not pieces("", "a", "xb").ended
    assert pieces("", *"xxxxxx").ended, "the cap"
    assert not pieces("x", *"xxxxx").ended, "the target's token before is not counted"
    assert pieces("", "c", "d").thought_ended
    assert pieces("cd").thought_ended
    assert not pieces("", "c", "xd").thought_ended
    never = Segment(None, None, 2)
    never.add("abcd", 1)
    assert not never.ended and not never.thought_ended
    copied = pieces("", "a")
    other = copied.copy()
    other.add("b", 1)
    assert other.ended and not copied.ended


def test_texts_of_tokens_keep_their_spaces() -> None:
    words = tokenizer()
    ids = words("to be", add_special_tokens=False)["input_ids"]
    assert TokenTexts(words)(ids) == "to be"


def test_meanings_by_text_by_hidden_state_and_by_a_function() -> None:
    texts = ["a  b", "a b\n", "c", "a b"]
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.99, 0.0], [1.0, 0.001]])
    assert meanings(texts, features, "exact") == [0, 0, 2, 0]
    assert meanings(texts, features, "hidden") == [0, 1, 0, 0]
    asked: list[tuple[str, str]] = []

    def same(one: str, other: str) -> bool:
        asked.append((one, other))
        return len(one) == len(other)

    assert meanings(["x", "y", "zz", "u"], features, same) == [0, 0, 2, 0]
    assert asked == [("x", "y"), ("x", "zz"), ("x", "u")], "compared with the first of each meaning"
    assert shares([0, 2, 5], [0, 0, 2, 3]) == [0.5, 0.25, 0.0]
