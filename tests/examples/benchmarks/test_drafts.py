"""The measuring of drafts, on a tiny pair: what the numbers are, and the page they are written into."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import drafts
from examples.benchmarks.marks import marks
from hf_semspec import load_draft
from hf_semspec.drafts.quantizations import MAKERS
from tests.helpers import WEAK_DRAFTS
from tests.models import draft_of, tiny, tokenizer

pytestmark = WEAK_DRAFTS
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    """Three drafts of a tiny target: one that agrees with it, one that does not, one whose package is missing."""
    model = tiny(layers=4, dtype=torch.float32)

    def missing() -> Any:
        raise ImportError("needs nothing: pip install nothing")

    makers = {
        "same": lambda: load_draft(model, dtype=torch.float64),
        "far": lambda: draft_of(model, "far"),
        "layers": lambda: load_draft(model, layers=2),
        "missing": missing,
    }
    return drafts.measure("tiny", model, tokenizer(), makers, ["one and one", "two"], 12)


def test_the_numbers_are_those_of_the_drafts(pair: dict[str, Any]) -> None:
    same, far, layers = (pair["drafts"][name] for name in ("same", "far", "layers"))
    assert same["acceptance_rate"] > 0.9 > 0.5 > far["acceptance_rate"]
    assert same["tokens_per_target_forward"] > 2.5 > far["tokens_per_target_forward"] >= 1
    assert same["own_bytes"] == pytest.approx(2 * pair["own_bytes"], rel=0.01)
    assert layers["own_bytes"] < 200
    assert layers["weight_bytes"] < pair["weight_bytes"] < pair["own_bytes"]
    assert all(row["same_text"] and row["tokens_per_second"] > 0 for row in (same, far, layers))
    assert pair["drafts"]["missing"] == {"missing": "needs nothing: pip install nothing"}


def test_the_page_is_written_from_a_stored_result(pair: dict[str, Any], tmp_path: Path) -> None:
    meta = drafts.describe("a command")
    meta["machine"]["load_average"] = 1.25
    result = {"meta": meta, "note": "the machine was shared", "pairs": [pair]}
    stored, page = tmp_path / "drafts.json", tmp_path / "page.md"
    stored.write_text(json.dumps(result))
    page.write_text(f"before\n{marks()[0]}\nold\n{marks()[1]}\nafter")
    assert drafts.main(["--from", str(stored), "--page", str(page), "--out", str(tmp_path / "out")]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter") and "old" not in text
    assert "`a command`" in text and "load average 1.2 when it began; the machine was shared." in text
    assert "| `missing` | not installed |" in text
    assert json.loads((tmp_path / "out" / "drafts.json").read_text()) == result


def test_every_kind_of_draft_is_measured() -> None:
    names = drafts.self_drafts(tiny(layers=4)).keys()
    assert {f'quantization="{name}"' for name in MAKERS} < names
    assert "layers=2 (of 4)" in names


def test_a_text_that_differs_is_said(pair: dict[str, Any]) -> None:
    odd = {**pair, "drafts": {"odd": {**pair["drafts"]["same"], "same_text": False}}}
    result = {"meta": drafts.describe("a command"), "note": "", "pairs": [odd]}
    assert "not plain decoding's, token for token, with `odd`" in drafts.markdown(result)


def test_the_page_on_drafts_has_its_marks_and_names_every_quantization() -> None:
    page = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")
    assert page.index(marks()[0]) < page.index(marks()[1])
    assert all(f'`"{name}"`' in page for name in MAKERS)


def test_a_pair_by_name_takes_the_draft_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny(dtype=torch.bfloat16)
    small.save_pretrained(tmp_path)
    monkeypatch.setattr(drafts, "located", lambda name: str(tmp_path / name))
    forms = drafts.forms_of("")
    assert list(forms) == ["as stored", "dtype=torch.float32", *(f'quantization="{name}"' for name in MAKERS)]
    assert forms["as stored"]().dtype == torch.bfloat16
    assert forms["dtype=torch.float32"]().dtype == torch.float32
