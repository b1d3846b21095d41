"""`"auto"` against fixed lengths, and the two rules on the lab: that all of it runs, goes on, and gets onto a page."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import choice
from examples.benchmarks.marks import marks

ROOT = Path(__file__).parents[3]


@pytest.mark.deprecated  # stock's own assisted loop makes the calls that it reports as deprecated
def test_it_runs_goes_on_and_gets_onto_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *marks("choice"), "after"]))
    given = ["--quick", "--out", str(tmp_path), "--page", str(page)]
    assert choice.main([*given, "--minutes", "0"]) == 0
    assert json.loads((tmp_path / choice.FILE).read_text() if (tmp_path / choice.FILE).exists() else "{}") == {}
    assert choice.main(given) == 0
    result: dict[str, Any] = json.loads((tmp_path / choice.FILE).read_text())
    assert result["cells"].keys() == {"agreement 0.7, batch 1", "agreement 0.7, batch 2"}
    one = result["cells"]["agreement 0.7, batch 1"]
    assert one["tokens_per_second"].keys() == {"plain", "γ=1", "γ=4", "auto", "HF assisted γ=3"}
    assert one["same"] and sum(one["rounds"].values()) > 0
    low, high = one["over_best"]["interval"]
    assert low <= one["over_best"]["value"] <= high
    assert 0.5 < result["rules"]["lab, temperature 1"]["tokens"]["value"] < 2
    assert result["rules"].keys() == {"lab, temperature 1", "controlled, agreement 0.7"}
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter") and "agreement 0.7, batch 2" in text
    monkeypatch.setattr(choice, "measure_cell", None)
    monkeypatch.setattr(choice, "measure_rules", None)
    assert choice.main(given) == 0
    assert json.loads((tmp_path / choice.FILE).read_text()) == result


def test_the_page_has_its_marks_and_shows_what_is_stored() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    first, last = marks("choice")
    stored = ROOT / "docs" / "bench" / choice.FILE
    result = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else None
    assert page.partition(first)[2].partition(last)[0] == f"\n{choice.markdown(result)}\n"
