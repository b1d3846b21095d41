"""Processors that keep a state are refused by name before any forward, whoever drafts; functions of the text pass."""

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from hf_semspec import SemSpecConfig
from tests.helpers import WEAK_DRAFTS, assisted, plain, refuses
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


class Alternate(LogitsProcessor):  # type: ignore[misc]
    """Allows even and odd ids in turns, by the text's length."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        masked = scores.clone()
        masked[:, (input_ids.shape[1] + 1) % 2 :: 2] = -torch.inf
        return masked


class Memo(Alternate):
    """The same, with a note of its answers that changes none."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.seen[input_ids.shape[1]] = self.seen.get(input_ids.shape[1], 0) + 1
        return super().__call__(input_ids, scores)


class Locked(Alternate):
    """Cannot be copied, and says that it keeps no state."""

    stateless = True

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Undeclared(Alternate):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Itself(Alternate):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Budget(LogitsProcessor):  # type: ignore[misc]
    """After `calls` calls only id 1 is allowed."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.left -= 1
        masked = scores.clone()
        if self.left < 0:
            masked[:, 2:] = -torch.inf
        return masked


class Automaton(LogitsProcessor):  # type: ignore[misc]
    """Follows a text by its last id alone, as grammars do, and loses its way where that id is not allowed."""

    def __init__(self) -> None:
        self.state: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.state is None:
            self.state = 0
        elif int(input_ids[0, -1]) % 3 == self.state:
            self.state = (self.state + 1) % 3
        else:
            raise KeyError("no such transition")
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.state :: 3] = scores[:, self.state :: 3]
        return masked


def counting() -> Any:
    calls = [0]

    def bar(input_ids: Any, scores: Any) -> Any:
        calls[0] += 1
        return scores - calls[0] * torch.arange(scores.shape[1])

    return bar


STATEFUL: dict[str, Any] = {
    "Budget": lambda: Budget(20),
    "Automaton": Automaton,
    "bar": counting,
    "Undeclared": Undeclared,
    "Itself": Itself,
    "SynthIDTextWatermarkLogitsProcessor": lambda: SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu"
    ),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda: UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.5, tiny("llama", 0)
    ),
}


@pytest.mark.parametrize("kind", ["lossless", "easd", "parse", "smc"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_is_refused_by_name_before_any_forward(name: str, kind: str) -> None:
    target, processor = tiny("llama", 0), STATEFUL[name]()
    before = None if name in ("Undeclared", "bar") else copy.deepcopy(vars(processor))
    config = SemSpecConfig(kind, max_new_tokens=4, do_sample=kind == "smc")
    refuses(
        target, draft_of(target, "near"), prompts((4,)), name, generation_config=config, logits_processor=[processor]
    )
    if isinstance(processor, (Budget, Automaton)):
        assert vars(processor) == before, "the caller's own object was asked"


@pytest.mark.parametrize("name", ["Budget", "Automaton"])
def test_drafts_without_a_model_pass_the_same_gate(name: str) -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", draft="ngram", max_new_tokens=4)
    with pytest.raises(ValueError, match=name):
        target.generate(**prompts((4,)), generation_config=config, logits_processor=[STATEFUL[name]()])


@pytest.mark.parametrize("make", [Alternate, Memo, Locked])
def test_functions_of_the_text_pass(make: Any) -> None:
    target, inputs = tiny("llama", 3, attention="sdpa"), prompts((3, 8), seed=3)
    expected = plain(target, inputs, max_new_tokens=12, call={"logits_processor": [make()]})
    assert not torch.equal(expected, plain(target, inputs, max_new_tokens=12))
    call = {"logits_processor": [make()]}
    output = assisted(target, draft_of(target, "near"), inputs, "lossless", call=call, max_new_tokens=12)
    assert torch.equal(output, expected)
