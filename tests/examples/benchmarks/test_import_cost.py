"""The page on what an import costs is written from measurements."""

from pathlib import Path

import pytest

from examples.benchmarks import imports
from examples.benchmarks.marks import marks


def test_the_measurement_writes_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([{"wall": 900.0, "cpu": 900.0}, {"wall": 90.0, "cpu": 50.0}, {"wall": 110.0, "cpu": 70.0}])
    monkeypatch.setattr(imports, "measure", lambda: next(runs))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{marks('imports')[0]}\nold\n{marks('imports')[1]}\nafter\n")
    assert imports.main(["--runs", "2", "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| CPU time | 60 | 50 | 70 | < 150 |" in text
    assert "| wall time | 100 | 90 | 110 | < 150 |" in text
