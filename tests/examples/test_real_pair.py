"""What measures and shows the real pair, on tiny models."""

import json

import pytest
import torch

from examples.real_pair import page, results, rounding
from hf_semspec.evaluation.contenders import parse_contenders
from hf_semspec.evaluation.tasks import Example, Task
from tests.models import draft_of, tiny, tokenizer

FOUND = {
    "parse": {"full": {"threshold": 0.9}, "prefix": {"threshold": 0.8}},
    "easd": {"target_entropy_threshold": 1.5, "draft_entropy_threshold": 1.25},
}


@pytest.mark.parametrize("name", ["greedy", "sampled", "one_by_one", "stock"])
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
    saved = []
    rounding.add_gaps(target, [entry], lambda: saved.append(1))
    assert len(saved) == 2
    row = target(torch.tensor([[*entry["prompt"], *entry["before"]]])).logits[0, -1]
    assert entry["float32"]["ranks"][1] == 0
    gap = float((row[entry["pair"][0]] - row[entry["pair"][1]]).detach().abs())
    assert entry["float32"]["gap"] == pytest.approx(gap, abs=1e-4)
    assert entry["float32"]["gap"] > 0


def test_differences_are_found_in_the_record_of_a_run(tmp_path):
    words, task = (
        tokenizer(),
        Task(name="t", examples=(Example("a b", "1"), Example("c", "2")), extract=str, check=str.__eq__),
    )
    texts = {"target": ["one two", "one"], "lossless": ["one too", "one"]}
    (tmp_path / "parts").mkdir()
    records = [
        {"contender": name, "prompts": [0, 1], "texts": own, "new_tokens": [99, 99]} for name, own in texts.items()
    ]
    (tmp_path / "parts" / "0.jsonl").write_text("\n".join(map(json.dumps, [{"session": "x"}, *records])))
    found = rounding.from_records(tmp_path, words, task, "lossless", 3)
    ids = [words(text, add_special_tokens=False).input_ids for text in ("one two", "one too")]
    place = rounding.first_difference(*ids)
    assert [entry["differs_at"] for entry in found] == [place, None]
    assert found[0]["pair"] == [text[place] for text in ids]
    assert found[0]["before"] == ids[0][:place]
    assert found[0]["prompt"] == words("a b").input_ids


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
