"""Thresholds of parse from verdicts: the arithmetic, enumerated, and whole calibrations on tiny models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_semspec import PARSEConfig, SemSpecConfig, calibrate_parse
from hf_semspec.calibration.parse import lowest_threshold, rates, reliability, same_answer
from tests.models import draft_of, prompts, row_of, tiny, tokenizer

ASKED = PARSEConfig(segment_tokens=6, labels=("Y", "N"), judge_prompt="fine?", full_judge_prompt="right?")
VERDICTS = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.booleans()), min_size=1, max_size=30)


def tensors(pairs: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([c for c, _ in pairs], dtype=torch.float64), torch.tensor([ok for _, ok in pairs])


@given(VERDICTS, st.sampled_from([0.0, 0.02, 0.3, 1.0]))
def test_the_threshold_keeps_the_promise_and_no_lower_one_does(pairs: Any, share: float) -> None:
    confidences, right = tensors(pairs)
    threshold = lowest_threshold(confidences, right, share, 0.7)
    wrong = confidences[~right]
    if not len(wrong):
        assert threshold == 0.7
        return
    passing = float((wrong >= threshold).double().mean())
    assert passing <= share
    assert rates(confidences, right, threshold)["false_accept"] == passing
    lower = math.nextafter(threshold, -math.inf)
    assert threshold == 0.0 or float((wrong >= lower).double().mean()) > share


@given(VERDICTS)
def test_the_reliability_curve_counts_every_verdict_once(pairs: Any) -> None:
    confidences, right = tensors(pairs)
    curve = reliability(confidences, right)
    assert sum(point["verdicts"] for point in curve) == len(pairs)
    assert sum(point["right"] for point in curve) == int(right.sum())
    weighted = sum(point["confidence"] * point["verdicts"] for point in curve)
    assert weighted == pytest.approx(float(confidences.sum()))


@pytest.mark.parametrize(
    ("text", "answer", "same"),
    [
        ("so it is 1,200.", "1200", True),
        ("#12", "12", True),
        ("7 and 12", "7", False),
        ("none", "7", False),
        ("It is Paris.", "paris", True),
        ("Paris it is", "paris", False),
    ],
)
def test_answers_are_compared_by_their_last_number_or_their_end(text: str, answer: str, same: bool) -> None:
    assert same_answer(text, answer) is same


@pytest.fixture(scope="module")
def pair() -> Any:
    target = tiny(eos=5, attention="sdpa")  # stock's eager attention turns padded float64 rows into nan
    return target, draft_of(target, "near", noise=0.15)


def test_without_answers_the_targets_own_are_taken_for_right(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    inputs = prompts((6, 6, 6))
    rows = [row_of(inputs, row) for row in range(3)]
    compared: list[tuple[str, str]] = []

    def check(text: str, answer: str) -> bool:
        compared.append((text, answer))
        return text == answer

    calibration = calibrate_parse(
        target, draft, rows, max_false_accept=0.0, check=check, config=ASKED, tokenizer=tokenizer(chat=True),
        max_new_tokens=20, progress=False,
    )  # fmt: skip
    report = json.loads(json.dumps(calibration.report))
    assert report["labelled"] is False
    assert report["rates"]["full"]["verdicts"] == 3
    assert len(calibration.confidences["prefix"]) == report["rates"]["prefix"]["verdicts"] > 0
    own = {
        tokenizer().decode(target.generate(**row, max_new_tokens=20)[0, 6:], skip_special_tokens=True) for row in rows
    }
    assert {answer for _, answer in compared} == own
    for kind in ("full", "prefix"):
        wrong = calibration.confidences[kind][~calibration.right[kind]]
        assert len(wrong)
        assert float(wrong.max()) < report["thresholds"][kind]
    assert calibration.config.segment_tokens == 6
    assert SemSpecConfig(calibration.config).accept_threshold == report["thresholds"]["full"]
    calibration.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_prefix_is_right_if_the_target_goes_on_from_it_to_a_right_answer(pair: Any) -> None:
    """Where the draft is the target, every prefix leads to the target's own answer; with other answers none does."""
    target, _ = pair
    rows = [row_of(prompts((6,)), 0)]
    common = {"config": ASKED, "tokenizer": tokenizer(chat=True), "max_new_tokens": 20, "progress": False}
    same = calibrate_parse(target, target, rows, check=str.__eq__, **common)
    assert same.right["full"].all()
    assert same.right["prefix"].all()
    assert same.config.accept_threshold == ASKED.accept_threshold
    other = calibrate_parse(target, target, rows, ["never said"], check=str.__eq__, **common)
    assert not other.right["full"].any()
    assert not other.right["prefix"].any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_false_accept": 2}, "max_false_accept=2"),
        ({"prompts": []}, "prompts is empty"),
        ({"answers": ["1", "2"]}, "2 entries for 1 prompts"),
        ({"prompts": [3]}, "prompts holds a int"),
        ({"tokenizer": None}, "pass tokenizer="),
    ],
)
def test_bad_input_is_refused_by_name(pair: Any, change: dict[str, Any], match: str) -> None:
    arguments = {"prompts": ["abc"], "tokenizer": tokenizer(), "progress": False, **change}
    with pytest.raises(ValueError, match=match):
        calibrate_parse(*pair, **arguments)
