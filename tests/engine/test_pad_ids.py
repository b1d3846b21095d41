"""Pad ids that no model can embed: they fill what is returned, and nothing reads them."""

from typing import Any

import pytest
import torch

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, JUDGE, WEAK_DRAFTS, exact, new_tokens
from tests.models import VOCAB, draft_of, prompts, tiny, tokenizer

pytestmark = [WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:.*pad_token_id")]

SOURCES = ("ngram", "ngram+model")
KEPT = {"parse kept": {**JUDGE, "accept_threshold": 0.0}, "parse redrafts": {**JUDGE, "max_redrafts": 2}}


def run(kind: str, pad: int, do_sample: bool) -> tuple[torch.Tensor, torch.Tensor]:
    target, inputs = tiny("llama", 2), prompts((4, 9, 6), seed=2)
    common: dict[str, Any] = {"max_new_tokens": 19, "eos_token_id": list(range(2, 12)), "pad_token_id": pad}
    common |= {"do_sample": do_sample}
    call: dict[str, Any] = {"tokenizer": tokenizer()} if kind.startswith("parse") else {}
    if kind in SOURCES:
        config = SemSpecConfig("lossless", draft=kind, max_ngram=1, **common)
    elif kind in KEPT:
        config = SemSpecConfig("parse", **KEPT[kind], **common)
    else:
        config = exact(kind, **common)
    if kind != "ngram":
        call["assistant_model"] = draft_of(target, "near")
    torch.manual_seed(0)
    output = target.generate(**inputs, **call, generation_config=config)
    own = new_tokens(output, inputs)
    ended = torch.isin(own, torch.arange(2, 12)).long().cumsum(dim=1)
    return own, (ended - torch.isin(own, torch.arange(2, 12)).long()) > 0


@pytest.mark.parametrize("pad", [-1, VOCAB, 10**6])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", [*EXACT, *SOURCES, *KEPT])
def test_a_pad_id_that_no_model_has_fills_and_is_never_read(kind: str, do_sample: bool, pad: int) -> None:
    expected, behind = run(kind, 0, do_sample)
    assert behind.any()
    got, _ = run(kind, pad, do_sample)
    assert torch.equal(got, expected.masked_fill(behind, pad))
