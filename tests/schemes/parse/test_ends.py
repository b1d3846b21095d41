"""How calls of parse end: stops inside a draft, time, strings and criteria, and without an EOS."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.callbacks import OnToken
from tests.helpers import WEAK_DRAFTS, Forwards, assisted, check_identities, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.schemes.parse.shared import ALL, KEPT

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


class After(StoppingCriteria):
    """True from its `calls`-th call on: a clock without a clock."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


@pytest.mark.parametrize("kept", ["all", "none"])
def test_ui18_a_stop_ends_the_call_once_the_answer_is_judged(kept: str) -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "near"), prompts((6,), seed=2)
    call = {"stopping_criteria": StoppingCriteriaList([After(5)])}
    with Forwards(target) as spy:
        output = assisted(target, draft, inputs, "parse", call=call, max_new_tokens=30, **KEPT[kept])
    assert spy.calls <= (1 if kept == "all" else 6)
    wanted = plain_rows(draft if kept == "all" else target, inputs, max_new_tokens=5)
    assert torch.equal(new_tokens(output, inputs), wanted)


def test_ui18_max_time_ends_inside_the_draft() -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "near"), prompts((6,), seed=2)
    with Forwards(draft) as spy:
        assisted(target, draft, inputs, "parse", revise_with=None, max_new_tokens=200, max_time=1e-6)
    assert spy.calls == 1


def test_ui14_stop_strings_and_criteria_end_an_answer() -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "far"), prompts((6,), seed=2)
    answer = plain_rows(draft, inputs, max_new_tokens=12)[0].tolist()
    stop = tokenizer().decode(answer[5:8])
    fields = {"max_new_tokens": 12, "return_dict_in_generate": True, **ALL}
    output = assisted(target, draft, inputs, "parse", stop_strings=[stop], **fields)
    assert new_tokens(output, inputs)[0].tolist() == answer[:8]
    call = {"stopping_criteria": StoppingCriteriaList([OnToken(answer[6])])}
    output = assisted(target, draft, inputs, "parse", call=call, **fields)
    assert new_tokens(output, inputs)[0].tolist() == answer[: answer.index(answer[6]) + 1]
    check_identities(output.stats)


@pytest.mark.parametrize("redrafts", [0, 2])
@pytest.mark.parametrize("kept", ["all", "none"])
def test_ui15_without_an_eos_all_rows_go_on_until_the_last_one_ends(kept: str, redrafts: int) -> None:
    target = tiny("llama", 4, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((4, 9, 6), seed=4)
    answers = plain_rows(draft, inputs, max_new_tokens=16)
    own = plain_rows(target, inputs, max_new_tokens=16)

    class Ends(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([12, 17, 14]) <= input_ids.shape[1]

    call = {"stopping_criteria": StoppingCriteriaList([Ends()])}
    fields = {"max_new_tokens": 16, "max_redrafts": redrafts, "return_dict_in_generate": True, **KEPT[kept]}
    output = assisted(target, draft, inputs, "parse", call=call, **fields)
    new, reference = new_tokens(output, inputs), answers if kept == "all" else own
    assert new.shape == (3, 8)
    for row, length in enumerate([3, 8, 5]):
        assert torch.equal(new[row, :length], reference[row, :length])
    check_identities(output.stats, [8, 8, 8])
