"""What measures and shows the real pair, on tiny models."""

import json

import pytest
import torch

from examples.real_pair import page, results, rounding
from hf_semspec.evaluation.contenders import parse_contenders
from tests.models import draft_of, tiny

FOUND = {
    "parse": {"full": {"threshold": 0.9}, "prefix": {"threshold": 0.8}},
    "easd": {"target_entropy_threshold": 1.5, "draft_entropy_threshold": 1.25},
}


@pytest.mark.parametrize("name", ["greedy", "sampled", "exact", "one_by_one", "stock"])
def test_the_contenders_of_a_run_are_understood_and_grow_level_by_level(name):
    levels = results.contenders(FOUND)[name]
    before = []
    for number in range(1, len(levels) + 1):
        chosen = parse_contenders([word for level in levels[:number] for word in level])
        assert chosen[: len(before)] == before
        before = chosen
    assert before[0].name == "target"


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([4], [5, 1], 0)]
)
def test_the_first_difference(one, other, place):
    assert rounding.first_difference(one, other) == place


def test_exact_texts_have_no_difference_and_a_wrong_one_shows_its_gap(monkeypatch):
    monkeypatch.setattr(rounding, "NEW_TOKENS", 12)
    target = tiny()
    draft = draft_of(target, "near")
    ids = torch.tensor([[5, 6, 7]])
    assert rounding.measure(target, draft, ids, 3)["differs_at"] is None

    generate = target.generate

    def wrong(*args, **options):
        """Plain decoding, with another fourth token."""
        out = generate(*args, **options)
        if "assistant_model" not in options:
            out[0, 6] = (out[0, 6] + 1) % 97
        return out

    target.generate = wrong
    entry = rounding.measure(target, draft, ids, 3)
    assert entry["differs_at"] == 3
    rounding.add_exact_gaps(target, [entry])
    row = target(torch.tensor([[*entry["prompt"], *entry["before"]]])).logits[0, -1]
    assert entry["float32"]["ranks"][1] == 0
    gap = float((row[entry["pair"][0]] - row[entry["pair"][1]]).detach().abs())
    assert entry["float32"]["gap"] == pytest.approx(gap, abs=1e-4)
    assert entry["float32"]["gap"] > 0


def test_a_row_says_what_is_missing_and_what_was_found(tmp_path):
    row = {"name": "lossless", "speed_ratio": 2.0, "prompts": 40}
    row["difference"] = {"value": 0.025, "interval": [-0.05, 0.1]}
    for run in ("one_by_one", "semantic_one_by_one", "one_by_one_sampled", "pair_greedy"):
        names = {"lossless"} if run.startswith("pair") else {lab[1] for _, lab, _ in page.ROWS}
        (tmp_path / run).mkdir()
        rows = [{**row, "name": name} for name in sorted(names)]
        (tmp_path / run / "results.json").write_text(json.dumps({"contenders": rows}))
    lines = page.gains(tmp_path).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        *("lossless", "2.00", "+2.5 (-5.0 to +10.0)", page.MISSING, "+2.5 (-5.0 to +10.0) on 40")
    ]
    assert lines[3].count(page.MISSING) == 2
