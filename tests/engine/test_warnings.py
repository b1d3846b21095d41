"""Warnings about what was done never lose it, whatever filter is set, and say what holds for their scheme."""

import warnings
from typing import Any

import pytest
import torch

from tests.helpers import EXACT, assisted, caught, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny


@pytest.mark.parametrize("kind", EXACT)
def test_an_output_is_not_lost_where_warnings_are_errors(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    target, inputs = tiny("llama", 1), prompts((7, 3), seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        output = assisted(target, draft_of(target, "far"), inputs, kind, max_new_tokens=40)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=40))
    said = [record.getMessage() for record in caplog.records if record.name == "hf_semspec"]
    if kind != "smc":  # greedily its particles are all alike
        assert len(said) == 1
        assert said[0].startswith("fewer than 10%")


def test_a_draft_that_is_outgrown_loses_nothing_either(caplog: pytest.LogCaptureFixture) -> None:
    target, inputs = tiny("llama", 1), prompts((5,), seed=2)
    draft = draft_of(tiny("llama", 1, positions=12), "near")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        output = assisted(target, draft, inputs, max_new_tokens=20)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))
    assert "outgrown the draft's context" in caplog.text


@pytest.mark.parametrize(("kind", "fields"), [("lossless", {}), ("semantic", {}), ("easd", {})])
def test_only_an_exact_scheme_says_that_its_output_is_right(kind: str, fields: dict[str, Any]) -> None:
    target = tiny("llama", 1)
    with caught() as messages:
        assisted(target, draft_of(target, "far"), prompts((7, 3), seed=2), kind, max_new_tokens=60, **fields)
    assert len(messages) == 1
    assert ("the output is right" in messages[0]) == (kind == "lossless")
    assert ("segments" in messages[0]) == (kind == "semantic")
