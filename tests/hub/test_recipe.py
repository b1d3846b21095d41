"""Recipes: folders that `generate(custom_generate=...)` runs, written by the command line."""

import ast
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, dynamic_module_utils

import hf_semspec
from hf_semspec import SemSpecConfig, cli, record_stats
from hf_semspec.hub.recipe import REQUIREMENT, export_recipe
from hf_semspec.hub.sidecar import Sidecar
from tests.helpers import Forwards, plain
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, pytest.mark.deprecated]
FLAG = {"trust_remote_code": True}
# Before 5 a folder of this machine was trusted without a word.
ASKS = Version("5") <= Version(transformers.__version__)


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama", 0)
    return target, draft_of(target, "near")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package counts as installed, and what transformers copies of a recipe goes where the test's files go."""
    version = importlib.metadata.version
    found = {"hf-semspec": hf_semspec.__version__}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.get(name) or version(name))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def export(folder: Path, *arguments: str) -> Path:
    assert cli.main(["export-recipe", str(folder), *arguments]) == 0
    return folder


def test_a_recipe_runs_its_scheme_for_who_never_named_it(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    inputs = prompts((5, 5))
    folder = export(tmp_path / "recipe", "--set", "num_draft_tokens=3", "--set", "max_new_tokens=9")
    expected = plain(target, inputs, max_new_tokens=9)
    with record_stats() as stats, Forwards(draft) as spy:
        output = target.generate(**inputs, assistant_model=draft, custom_generate=str(folder), **FLAG)
    assert torch.equal(output, expected)
    assert [entry.scheme for entry in stats] == ["lossless"]
    assert spy.calls > 0
    assert getattr(target.generation_config, "semspec", None) is None


def test_arguments_of_the_call_beat_the_recipe(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    inputs = prompts((5,))
    folder = export(tmp_path / "recipe", "--scheme", "easd", "--set", "max_new_tokens=3", "--set", "penalty=1.0")
    call = {**inputs, "assistant_model": draft, "custom_generate": str(folder), **FLAG}
    for settings, scheme in (
        ({"max_new_tokens": 9, "top_n": 3}, "easd"),
        ({"generation_config": GenerationConfig(max_new_tokens=9)}, "easd"),
        ({"generation_config": SemSpecConfig("lossless", max_new_tokens=9)}, "lossless"),
    ):
        before = repr(settings)
        with record_stats() as stats:
            output = target.generate(**call, **settings)
        assert output.shape[1] == 5 + 9
        assert [entry.scheme for entry in stats] == [scheme]
        assert repr(settings) == before
    with pytest.raises(ValueError, match="penalty"):
        target.generate(**call, penalty=5)


def test_the_recipe_in_the_models_own_folder(pair: Any, tmp_path: Path) -> None:
    """There transformers puts the recipe in the place of `model.generate`, which must not call itself."""
    target, draft = pair
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=7)
    target.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", "--overwrite")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, **FLAG)
    with record_stats() as stats:
        assert torch.equal(loaded.generate(**inputs, assistant_model=draft, max_new_tokens=7), expected)
        output = loaded.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], assistant_model=draft, max_new_tokens=7
        )
    assert torch.equal(output, expected)
    assert len(stats) == 2


@pytest.mark.skipif(not ASKS, reason="stock runs the recipe of a local folder unasked")
def test_without_the_flag_nothing_of_the_recipe_runs(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    folder = export(tmp_path / "recipe")
    (folder / "custom_generate/generate.py").write_text("raise AssertionError('ran')\n")
    with pytest.raises((ValueError, OSError), match="trust_remote_code"):
        target.generate(**prompts((5,)), assistant_model=draft, custom_generate=str(folder), trust_remote_code=False)


def test_without_the_package_the_error_says_how_to_get_it(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    folder = export(tmp_path / "recipe")
    assert (folder / "custom_generate/requirements.txt").read_text() == REQUIREMENT + "\n"
    (folder / "custom_generate/requirements.txt").write_text("hf-semspec>=999\n")
    call = {**prompts((5,)), "assistant_model": draft, "custom_generate": str(folder), **FLAG}
    with pytest.raises(ImportError, match="hf-semspec>=999"):
        target.generate(**call)
    (folder / "custom_generate/requirements.txt").unlink()
    source = (folder / "custom_generate/generate.py").read_text()
    (folder / "custom_generate/generate.py").write_text(source.replace("hf_semspec.hub.recipe", "not_installed_here"))
    with pytest.raises(ImportError, match=r"pip install .hf-semspec>="):
        target.generate(**call)


def test_without_a_draft_the_error_names_the_ways_out(pair: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)assistant_model.*semspec=None"):
        pair[0].generate(**prompts((5,)), custom_generate=str(export(tmp_path / "recipe")), **FLAG)


def test_the_folder_is_data_and_ten_lines_of_code(tmp_path: Path) -> None:
    report, results = tmp_path / "report.json", tmp_path / "results.json"
    report.write_text('{"percentile": 90}')
    results.write_text('{"accuracy": "```\\n# not a heading"}')
    SemSpecConfig("easd", top_n=7, draft_entropy_threshold=float("inf")).save_pretrained(tmp_path / "config")
    folder = export(
        tmp_path / "recipe",
        *("--config", str(tmp_path / "config"), "--set", "penalty=0.5", "--target", "org/t", "--draft", "org/d"),
        *("--calibration", str(report), "--results", str(results)),
    )
    module = ast.parse((folder / "custom_generate/generate.py").read_text())
    assert [type(node) for node in module.body] == [ast.Expr, ast.Assign, ast.FunctionDef]
    stored = ast.literal_eval(module.body[1].value)
    config = SemSpecConfig.from_dict(stored)
    assert (config.top_n, config.penalty, config.draft_entropy_threshold) == (7, 0.5, float("inf"))
    assert SemSpecConfig.from_pretrained(folder) == config
    assert Sidecar.from_pretrained(folder) == Sidecar(
        target="org/t", draft="org/d", calibration={"percentile": 90}, results=json.loads(results.read_text())
    )
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")
    assert 'base_model: "org/t"' in card
    assert 'from_pretrained("org/d"' in card
    assert not [line for line in card.splitlines() if line.startswith("# not a heading")]


@pytest.mark.parametrize(
    ("scheme", "settings", "called"),
    [
        ("lossless", [], "assistant_model=draft, "),
        ("lossless", ["draft=ngram"], ""),
        ("semantic", ["scorer=none", "segment_stop=."], "assistant_model=draft, tokenizer=tokenizer, "),
    ],
)
def test_the_code_of_the_card_runs(
    scheme: str,
    settings: list[str],
    called: str,
    pair: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = pair
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    names_of = ("--target", "org/t", "--draft", "org/d")
    folder = export(tmp_path / "recipe", "--scheme", scheme, *chosen, *names_of)
    assert f"generate(..., {called}custom_generate=" in capsys.readouterr().out
    models, words = {"org/t": target, "org/d": draft}, tokenizer()
    words.model_input_names = ["input_ids", "attention_mask"]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **_: models[name])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: words)
    card = (folder / "README.md").read_text().replace("THIS REPOSITORY OR FOLDER", str(folder))
    first, second = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    with record_stats() as stats:
        exec(first, names)
        text = names["out"]
        exec(second, names)
    assert [entry.scheme for entry in stats] == [scheme] * 2
    assert ("draft" in names) == ("assistant_model" in called)
    assert torch.equal(text, names["out"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "num_draft_token=3"], "num_draft_tokens"),
        (["--set", "num_draft_tokens=0"], "num_draft_tokens"),
        (["--config", "."], "generation_config.json"),
        (["--results", "nowhere.json"], "nowhere.json"),
        (["--draft", "a\nb"], "`draft` must be"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: list[str], part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export-recipe", "recipe", *arguments]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "recipe").exists()


def test_files_that_are_there_stay(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert cli.main(["export-recipe", str(tmp_path)]) == 2
    assert "README.md already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_values_that_are_no_json_are_refused(tmp_path: Path) -> None:
    config = SemSpecConfig("lossless", temperature=float("nan"), do_sample=True)
    with pytest.raises(ValueError, match="values of JSON only"):
        export_recipe(tmp_path / "recipe", config)
    config = SemSpecConfig("lossless")
    config.semspec = None
    with pytest.raises(ValueError, match="no scheme"):
        export_recipe(tmp_path / "recipe", config)
    assert not (tmp_path / "recipe").exists()
