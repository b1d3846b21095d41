"""Users' reports about stored configs and code on the Hub (their numbers are in the test names)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_semspec import SemSpecConfig, record_stats
from tests.helpers import EXACT, VERSION, WEAK_DRAFTS, Forwards, Version, exact, plain
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama", 0)
    return target, draft_of(target, "near")


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


def test_ui46_a_misspelt_name_is_an_error_that_names_the_right_one(pair: Any) -> None:
    with pytest.raises(TypeError, match=r"num_draft_tokns.*num_draft_tokens"):
        SemSpecConfig("lossless", num_draft_tokns=3)
    with pytest.raises(TypeError, match=r"semspec_treshold"):
        SemSpecConfig("easd", semspec_treshold=0.5)
    with pytest.raises(TypeError, match=r"max_new_token\b.*max_new_tokens"):
        SemSpecConfig("lossless", max_new_token=3)
    target, draft = pair
    with Forwards(target, draft) as spy, pytest.raises(ValueError, match="semspec_treshold"):
        target.generate(
            **prompts((5,)), assistant_model=draft, generation_config=SemSpecConfig("lossless"), semspec_treshold=0.5
        )
    assert spy.calls == 0


def widths(target: PreTrainedModel, draft: PreTrainedModel, **call: Any) -> set[int]:
    with Forwards(target) as spy:
        target.generate(**prompts((5,)), assistant_model=draft, **call)
    return set(spy.widths[1:-1])


@pytest.mark.filterwarnings("ignore:.*generation_config.*")
@pytest.mark.deprecated
def test_ui46_the_keyword_beats_the_config() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "same")
    five = SemSpecConfig("lossless", num_draft_tokens=5, max_new_tokens=45)
    assert widths(target, draft, generation_config=five) == {6}
    assert widths(target, draft, generation_config=five, num_draft_tokens=9) == {10}
    assert five.num_draft_tokens == 5
    target.generation_config.semspec = SemSpecConfig("lossless", num_draft_tokens=2).semspec
    assert widths(target, draft, max_new_tokens=45) == {3}
    assert widths(target, draft, generation_config=five) == {6}
    entry = {"scheme": "lossless", "num_draft_tokens": 7}
    assert widths(target, draft, generation_config=five, semspec=entry) == {8}
    assert widths(target, draft, max_new_tokens=45, semspec=entry) == {8}
    # The entry is taken whole: what the other one said does not show through.
    assert widths(target, draft, generation_config=five, semspec={"scheme": "lossless", "num_draft_tokens": 4}) == {5}


@pytest.mark.filterwarnings("ignore:.*generation_config.*")
@pytest.mark.deprecated
def test_ui46_semspec_none_decodes_plainly(pair: Any) -> None:
    target, draft = pair
    target.generation_config.semspec = SemSpecConfig("lossless").semspec
    with record_stats() as stats, Forwards(draft) as spy:
        output = target.generate(**prompts((5,)), max_new_tokens=9, semspec=None)
    assert stats == []
    assert spy.calls == 0
    target.generation_config.semspec = None
    assert torch.equal(output, plain(target, prompts((5,)), max_new_tokens=9))


def test_ui46_a_loose_scheme_field_beside_a_plain_config_is_stocks_error(pair: Any) -> None:
    target, draft = pair
    target.generation_config.semspec = SemSpecConfig("lossless").semspec
    with pytest.raises(ValueError, match="num_draft_tokens"):
        target.generate(**prompts((5,)), assistant_model=draft, num_draft_tokens=3)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("lossless", "semspec"),
        ({}, "scheme"),
        ({"scheme": "losless"}, "lossless"),
        ({"scheme": "lossless", "num_draft_tokns": 3}, "num_draft_tokens"),
        ({"scheme": "lossless", "num_draft_tokens": 0}, "num_draft_tokens"),
        ({"scheme": "easd", "penalty": 2.0}, "penalty"),
    ],
)
def test_ui46_a_malformed_stored_entry_is_named_before_any_forward(entry: Any, match: str, pair: Any) -> None:
    target, draft = pair
    target.generation_config.semspec = entry
    with Forwards(target, draft) as spy, pytest.raises(ValueError, match=match):
        target.generate(**prompts((5,)), assistant_model=draft, max_new_tokens=4)
    assert spy.calls == 0


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
