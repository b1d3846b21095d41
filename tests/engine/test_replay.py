"""Processors with a state that can be started anew: exact under drafts, each row fed its own text in order."""

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_semspec import SemSpecConfig
from hf_semspec.engine.replay import Replayed, restarts
from tests.helpers import WEAK_DRAFTS, Forwards, assisted, exact, plain
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


class Automaton(LogitsProcessor):  # type: ignore[misc]
    """Like a grammar: it goes on by the last id alone, and an id that it did not allow is an error. From state s it
    allows ids that are s modulo 5, and its state is then the sum of what it has read, modulo 5."""

    def __init__(self) -> None:
        self.states: list[int] | None = None

    def fresh(self) -> "Automaton":
        return type(self)()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.states is None:
            self.states = [2] * len(input_ids)
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                if token % 5 != self.states[row]:
                    raise KeyError("no such transition")
                self.states[row] = (self.states[row] + token // 5) % 5
        masked = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(self.states):
            masked[row, state::5] = scores[row, state::5]
        return masked


@pytest.mark.parametrize("case", ["lossless", "easd", "parse", "smc", "chains", "ngram"])
@pytest.mark.parametrize("lengths", [(6,), (3, 8, 5)])
def test_it_gives_plain_decodings_text(lengths: tuple[int, ...], case: str) -> None:
    target, inputs = tiny("llama", 3, attention="sdpa"), prompts(lengths, seed=3)
    processor = Automaton()
    expected = plain(target, inputs, max_new_tokens=14, call={"logits_processor": [Automaton()]})
    call = {"logits_processor": [processor]}
    if case == "ngram":
        config = SemSpecConfig("lossless", draft="ngram", num_draft_tokens=4, max_new_tokens=14)
        output = target.generate(**inputs, **call, generation_config=config)
    elif case == "chains":
        fields = {"num_chains": 3, "max_new_tokens": 14}
        output = assisted(target, draft_of(target, "near"), inputs, "lossless", call=call, **fields)
    else:
        output = assisted(target, draft_of(target, "near"), inputs, case, call=call, max_new_tokens=14)
    assert torch.equal(output, expected)
    assert processor.states is None, "the caller's own object was asked"


def test_a_text_that_changes_is_read_anew_and_one_that_is_not_allowed_is_left_alone() -> None:
    function = Replayed(lambda row: Automaton(), 1)
    scores = torch.zeros(1, 20)

    def allowed(*ids: int) -> list[int]:
        return (function(torch.tensor([[0, *ids]]), scores)[0] > -torch.inf).nonzero().flatten().tolist()

    assert allowed() == [2, 7, 12, 17]
    assert allowed(7) == [3, 8, 13, 18]
    assert allowed(12) == [4, 9, 14, 19]
    assert allowed(7) == [3, 8, 13, 18]
    assert allowed(3) == list(range(20))
    assert allowed(12, 9) == [0, 5, 10, 15]


def test_a_mask_by_others_does_not_hide_what_it_allows() -> None:
    """Behind top-k or a smaller vocabulary an id may be masked that the text then holds."""
    function, scores = Replayed(lambda row: Automaton(), 1), torch.zeros(1, 20)
    narrow = scores.clone()
    narrow[0, 7] = -torch.inf
    function(torch.tensor([[0]]), narrow)
    answer = function(torch.tensor([[0, 7]]), scores)
    assert (answer[0] > -torch.inf).nonzero().flatten().tolist() == [3, 8, 13, 18]


def test_the_libraries_own_are_known_without_importing_them() -> None:
    class OutlinesLogitsProcessor:
        started = True

        def reset(self) -> None:
            self.started = False

    class Compiled(OutlinesLogitsProcessor):
        def __getstate__(self) -> Any:
            raise AssertionError("this would reset the original")

    OutlinesLogitsProcessor.__module__ = "outlines.processors.base_logits_processor"
    one = Compiled()
    fresh = restarts(one)
    assert fresh is not None
    assert (one.started, fresh(0).started) == (True, False)

    class Grammars:
        def __init__(self, compiled: Any) -> None:
            self.compiled_grammars = compiled if isinstance(compiled, list) else [compiled]

    Grammars.__name__, Grammars.__module__ = "LogitsProcessor", "xgrammar.contrib.hf"
    fresh = restarts(Grammars(["a", "b"]))
    assert fresh is not None
    assert [fresh(row).compiled_grammars for row in range(3)] == [["a"], ["b"], ["a"]]
    assert restarts(copy) is None


class Template(LogitsProcessor):  # type: ignore[misc]
    """Every seventh new token is one of two, what stands between follows from the last of these."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        masked = torch.full_like(scores, -torch.inf)
        count = input_ids.shape[1] - self.width
        for row, ids in enumerate(input_ids.tolist()):
            last = ids[self.width + (count // 7) * 7] if count % 7 else 0
            allowed = [20, 31] if count % 7 == 0 else [last + count % 7]
            masked[row, allowed] = scores[row, allowed]
        return masked


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("source", ["ngram", "model", "ngram+model"])
@pytest.mark.parametrize("scheme", ["lossless", "easd"])
@pytest.mark.parametrize("lengths", [(6,), (3, 8, 5)])
def test_forced_ids_take_no_forward(lengths: tuple[int, ...], scheme: str, source: str, sample: bool) -> None:
    target, inputs = tiny("llama", 3, attention="sdpa"), prompts(lengths, seed=3)
    call: dict[str, Any] = {"logits_processor": [Template(max(lengths))]}
    expected = plain(target, inputs, max_new_tokens=42, call=call)
    if source != "ngram":
        call["assistant_model"] = draft_of(target, "far")
    config = exact(scheme, draft=source, num_draft_tokens=2, max_new_tokens=42, do_sample=sample)
    with Forwards(target) as forwards:
        output = target.generate(**inputs, **call, generation_config=config)
    assert forwards.calls <= 1 + 42 // 7  # and the prompt's
    if not sample:
        assert torch.equal(output, expected)
    new = output[:, max(lengths) :].view(len(lengths), 6, 7)
    assert torch.isin(new[:, :, 0], torch.tensor([20, 31])).all()
    assert torch.equal(new, new[:, :, :1] + torch.arange(7))
