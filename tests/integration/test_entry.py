"""The scheme's entry in a call: which one counts, and what is wrong with it."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig, record_stats
from tests.helpers import WEAK_DRAFTS, Forwards, plain
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


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
