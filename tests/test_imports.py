"""What `import hf_semspec` loads and does: its own modules, the seam, and nothing that a call may never need."""

from pathlib import Path

import pytest

from hf_semspec.bench import imports
from hf_semspec.tools.pages import marks

from .test_layers import RANK, layer

# Of the modules below the package's own names, those that only a stored file or a command needs.
LATER = {"sidecar"}
# Modules of others, beyond what transformers' `generate` and pipelines load by themselves. Time is not asserted: this
# list is the same on every machine.
OTHERS: set[str] = set()


def test_the_import_loads_a_fixed_list_of_modules() -> None:
    modules = imports.measure()["modules"]
    assert isinstance(modules, list)
    own = {module.removeprefix("hf_semspec").removeprefix(".") for module in modules if layer(module) == "hf_semspec"}
    assert {"", "integration", "schemes.lossless"} <= own
    assert not [module for module in own if RANK[layer(module)] < RANK[""] or module in LATER]
    assert {module for module in modules if layer(module) != "hf_semspec"} <= OTHERS


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
