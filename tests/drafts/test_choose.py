"""The draft that a call is given: weak, short-sighted, missing, or with settings of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from hf_semspec import SemSpecConfig, record_stats
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    caught,
    check_identities,
    new_tokens,
    plain,
    plain_rows,
    refuses,
)
from tests.models import VOCAB, draft_of, prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS


@pytest.mark.parametrize("kind", EXACT)
def test_ui30_a_useless_draft_is_reported_once(kind: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "far")
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=32)
    drafted = 1 if kind == "semantic" else 4  # a segment is judged as a whole: only short ones are many
    with caught() as messages:
        for _ in range(5):
            output = assisted(
                target, draft, inputs, kind, num_draft_tokens=drafted, max_new_tokens=32, return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, expected)
            assert output.stats.acceptance_rate < 0.1
    assert len([message for message in messages if "accept" in message]) == 1
    with caught() as messages:
        assisted(target, draft_of(target, "near"), inputs, kind, num_draft_tokens=drafted, max_new_tokens=32)
    assert messages == []


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_ui42_text_that_outgrows_the_drafts_context(kind: str, shape: str) -> None:
    target = tiny("llama", 0)
    draft = tiny(shape, 0, positions=16)
    for lengths in ((4,), (20,), (3, 12, 20)):
        inputs = prompts(lengths)
        with caught() as messages:
            output = assisted(
                target, draft, inputs, kind, num_draft_tokens=4, max_new_tokens=40, return_dict_in_generate=True
            )
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=40))
        assert len([message for message in messages if "16" in message]) <= 1
        if shape == "gpt2":
            assert len([message for message in messages if "16" in message]) == 1
        check_identities(output.stats, [40] * len(lengths))


def test_ui42_smc_draws_from_the_target_where_the_draft_cannot_read() -> None:
    """Such tokens weigh nothing; what was drafted before keeps its weight."""
    target, draft = tiny("llama", 0), tiny("llama", 1, positions=24)
    inputs = prompts((26, 30), seed=1)
    fields = {"do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True}
    with caught() as messages:
        output = assisted(target, draft, inputs, "smc", **fields)
    assert len([message for message in messages if "context of 24" in message]) == 1
    assert output.stats.drafted == output.stats.draft_forwards == 0
    assert not output.log_weights.any()
    assert output.particles.unique(dim=1).shape[1] > 1
    shorter = prompts((18, 30), seed=1)
    with caught():
        mixed = assisted(target, draft, shorter, "smc", ess_threshold=0.0, **fields)
    assert mixed.log_weights[0].any()
    assert not mixed.log_weights[1].any()
    check_identities(mixed.stats, [12, 12])


@pytest.mark.deprecated
def test_ui43_the_draft_is_used_through_generate_pipeline_and_a_model_folder(tmp_path: Path) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=12)
    with Forwards(draft) as spy:
        assert torch.equal(assisted(target, draft, inputs, max_new_tokens=12), expected)
        assert spy.calls > 0
    target.generation_config = SemSpecConfig("lossless", num_draft_tokens=3, pad_token_id=0)
    with Forwards(draft) as spy:
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft)(
            "Hi", max_new_tokens=12
        )
        assert spy.calls > 0
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with Forwards(draft) as spy:
        assert torch.equal(loaded.generate(**inputs, assistant_model=draft, max_new_tokens=12), expected)
        assert spy.calls > 0


def test_ui43_no_draft_is_an_error_that_names_both_ways_out() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, None, prompts((4,)), r"(?s)assistant_model.*semspec=None", generation_config=config)


@pytest.mark.parametrize("kind", EXACT)
def test_ui44_the_draft_length_asked_for_is_the_one_used(kind: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "same")
    draft.generation_config.num_assistant_tokens = 10
    before = draft.generation_config.to_dict()
    inputs = prompts((5,))
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(
            target, draft, inputs, kind, num_draft_tokens=3, max_new_tokens=33, return_dict_in_generate=True
        )
    assert set(of_target.widths[1:-1]) == {4}
    # parse's draft writes a whole answer first.
    assert of_draft.calls <= 3 * output.stats.rounds + (33 if kind == "parse" else 0)
    assert output.stats.histogram[3] >= output.stats.rounds - 1
    assert draft.generation_config.to_dict() == before


@pytest.mark.parametrize(
    "field",
    [
        {"num_assistant_tokens": 3},
        {"num_assistant_tokens_schedule": "heuristic"},
        {"assistant_confidence_threshold": 0.0},
    ],
)
def test_ui44_stocks_knobs_are_answered_by_naming_ours(field: dict[str, Any]) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((5,))
    with caught() as messages:
        for _ in range(2):
            output = assisted(target, draft, inputs, max_new_tokens=12, **field)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=12))
    assert len([m for m in messages if "num_draft_tokens" in m and next(iter(field)) in m]) == 1


@pytest.mark.deprecated
def test_a_drafts_own_scheme_does_not_capture_stock_assisted_decoding() -> None:
    """Stock passes both a config and loose arguments to the draft, which it reports as deprecated itself."""
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    draft.generation_config.semspec = {"scheme": "lossless"}
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=12)
    with record_stats() as stats:
        assert torch.equal(target.generate(**inputs, assistant_model=draft, max_new_tokens=12), expected)
    assert stats == []
    assert expected.max() < VOCAB
