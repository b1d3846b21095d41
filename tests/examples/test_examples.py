"""Each example runs as it stands, on the arithmetic lab's pair."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_semspec import SemSpecConfig
from hf_semspec.hub.sidecar import Sidecar
from hf_semspec.schemes.table import SCHEMES

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {path.stem: path for path in EXAMPLES.glob("*.py")}
# The lab's own tokenizer config, and texts that its draft gets wrong.
pytestmark = [pytest.mark.deprecated, pytest.mark.filterwarnings("ignore:fewer than 10%")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs an example as a program, and returns what it printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def program(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [str(PROGRAMS[name]), "--device", "cpu", *arguments])
        runpy.run_path(str(PROGRAMS[name]), run_name="__main__")
        out: str = capsys.readouterr().out
        return out

    return program


def test_they_are_short() -> None:
    for path in PROGRAMS.values():
        assert len(path.read_text().splitlines()) < (61 if path.stem == "serving" else 80), path.name


def test_every_one_is_named_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for name in [*PROGRAMS, "tour"]:
        assert f"({name}." in page, name


def test_quickstart(run: Any) -> None:
    out = run("quickstart")
    assert "#91" in out
    assert "% of the drafted tokens accepted" in out
    assert out.endswith("the same text as plain decoding: True\n")


def test_text_pipeline(run: Any) -> None:
    out = run("text_pipeline")
    assert out.count("#") == 3
    assert "3 rows: " in out


def test_chat(run: Any) -> None:
    out = run("chat", "--say", "91-52-08+33-76-97=", "--say", "03+00-74*06*03=")
    assert "#91" in out
    assert out.count("accepted a round]") == 2


@pytest.mark.quantized
def test_quantized_draft(run: Any) -> None:
    pytest.importorskip("bitsandbytes")
    out = run("quantized_draft")
    assert "its nf4 copy" in out
    assert "% accepted" in out


def test_batch(run: Any) -> None:
    out = run("batch", "--prompt", "91-52-08+33-76-97=", "--prompt", "03+00-74*06*03=")
    assert out.count(" rounds, ") == 2
    assert "tokens in all by" in out


@pytest.mark.grid
@pytest.mark.parametrize("shard", ["tensor", "full"])
def test_several_devices(shard: str) -> None:
    """Two processes: both decode both prompts, or each its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    program = [*launcher, str(PROGRAMS["several_devices"]), "--shard", shard]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    times = 2 if shard == "tensor" else 1
    assert done.stdout.count("process ") == 2 * times
    assert done.stdout.count("#91") == done.stdout.count("#22") == times


def test_hub_config(run: Any) -> None:
    out = run("hub_config")
    assert "made for" in out
    assert out.endswith("the recipe gives the same text: True\n")


def test_compare_schemes(run: Any) -> None:
    rows = {
        line.split()[0]: line.split() for line in run("compare_schemes", "--max-new-tokens", "24").splitlines()[1:]
    }
    assert rows.keys() == {"plain", *SCHEMES}
    assert rows["plain"][-3:] == rows["lossless"][-3:] == ["3", "of", "3"]
    assert float(rows["lossless"][2]) > float(rows["plain"][2]) == 1.0


def test_calibrate(run: Any, tmp_path: Path) -> None:
    out = run("calibrate", "--out", str(tmp_path), "--count", "2")
    assert "nats" in out
    for name in ("easd", "parse"):
        assert SemSpecConfig.from_pretrained(tmp_path / name).scheme_config.name == name
        assert Sidecar.from_pretrained(tmp_path / name).calibration
