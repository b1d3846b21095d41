"""Configs that were saved come back, and code of a folder runs only where it is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_semspec import SemSpecConfig, record_stats
from tests.helpers import EXACT, VERSION, WEAK_DRAFTS, Version, exact
from tests.models import prompts, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def run(target: PreTrainedModel, draft: PreTrainedModel, **call: Any) -> tuple[torch.Tensor, Any]:
    with record_stats() as stats:
        output = target.generate(**prompts((5,)), assistant_model=draft, tokenizer=tokenizer(), **call)
    return output, stats[0] if stats else None


@pytest.mark.parametrize("route", ["plain class", "own class", "model folder"])
@pytest.mark.parametrize("kind", EXACT)
def test_ui46_a_saved_scheme_comes_back_every_way(kind: str, route: str, pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    config = exact(kind, max_new_tokens=14, pad_token_id=0)
    expected, first = run(target, draft, generation_config=config)
    if route == "model folder":
        target.generation_config = config
        target.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert loaded.generation_config.semspec == config.semspec
        output, again = run(loaded, draft)
    else:
        config.save_pretrained(tmp_path)
        stored = (GenerationConfig if route == "plain class" else SemSpecConfig).from_pretrained(tmp_path)
        assert stored.semspec == config.semspec
        output, again = run(target, draft, generation_config=stored)
    on_disk = json.loads((tmp_path / "generation_config.json").read_text())
    assert on_disk["semspec"] == config.semspec
    assert not on_disk.get("_from_model_config")
    assert torch.equal(output, expected)
    assert again.scheme == first.scheme == config.semspec["scheme"]
    assert [row.histogram for row in again.rows] == [row.histogram for row in first.rows]


def test_ui47_a_folder_with_a_config_alone_needs_no_flag(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    expected, _ = run(target, draft, generation_config=exact("lossless", max_new_tokens=14))
    target.generation_config = exact("lossless", max_new_tokens=14, pad_token_id=0)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    output, stats = run(loaded, draft)
    assert torch.equal(output, expected)
    assert stats.scheme == "lossless"


RECIPE = """
from pathlib import Path

Path(__file__).with_name("was_imported").touch()


def generate(model, *args, **kwargs):
    raise AssertionError("the recipe ran")
"""


@pytest.mark.skipif(Version("5") > VERSION, reason="stock ran the recipe of a local folder unasked")
def test_ui47_a_recipe_beside_the_config_is_not_imported_without_the_flag(pair: Any, tmp_path: Path) -> None:
    target, draft = pair
    target.generation_config = exact("lossless", max_new_tokens=14, pad_token_id=0)
    expected, _ = run(target, draft)
    target.save_pretrained(tmp_path)
    recipe = tmp_path / "custom_generate"
    recipe.mkdir()
    (recipe / "generate.py").write_text(RECIPE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(run(loaded, draft)[0], expected)
    with pytest.raises((ValueError, OSError), match="trust_remote_code"):
        loaded.generate(**prompts((5,)), custom_generate=str(tmp_path), assistant_model=draft, trust_remote_code=False)
    assert list(tmp_path.rglob("was_imported")) == []
