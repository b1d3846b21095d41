"""`hf-semspec trace`, on models made here."""

import json

import pytest

from hf_semspec import cli
from hf_semspec.tools import models as demo
from tests.models import tokenizer


def trace(folders, out, *extra, model=True):
    pair = ["--model", str(folders / "target"), "--draft", str(folders / "draft")] if model else []
    rest = ["--device", "cpu", "--prompt", "two and two", "--max-new-tokens", "12", "--out", str(out)]
    return cli.main(["trace", *pair, *rest, *extra])


@pytest.mark.parametrize(
    "settings",
    [
        ["--scheme", "easd", "--set", "trigger=random", "--set", "trigger_rate=0.5"],
        ["--scheme", "smc", "--set", "num_particles=3", "--set", "do_sample=true"],
    ],
    ids=["easd", "smc"],
)
def test_writes_the_page_and_the_record(folders, tmp_path, capsys, settings):
    assert trace(folders, tmp_path / "page.html", "--json", str(tmp_path / "trace.json"), *settings) == 0
    out = capsys.readouterr().out
    assert "page.html" in out
    record = json.loads((tmp_path / "trace.json").read_text())
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert record["scheme"] == settings[1]
    assert record["stats"]["emitted"] == 12
    assert html.count('<span role="option"') == len(record["rows"][0]["events"])
    text = tokenizer().decode(record["rows"][0]["tokens"])
    assert text.splitlines()[0][:20] in out


def test_without_a_model_it_is_the_demos(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "smollm2_folder", lambda: folders / "target")
    assert trace(folders, tmp_path / "page.html", model=False) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("out", "extra", "message"),
    [
        ("missing/page.html", [], "there is no folder"),
        ("page.html", ["--set", "trace=true"], "--set trace"),
        ("page.html", ["--set", "num_return_sequences=2"], "--set num_return_sequences"),
    ],
)
def test_mistakes_are_one_line(folders, tmp_path, capsys, out, extra, message):
    assert trace(folders, tmp_path / out, *extra) == 2
    assert message in capsys.readouterr().err


def test_a_model_needs_a_draft(folders, tmp_path, capsys):
    arguments = ["--model", str(folders / "target"), "--prompt", "x", "--out", str(tmp_path / "page.html")]
    assert cli.main(["trace", *arguments]) == 2
    assert "--draft is missing" in capsys.readouterr().err
