"""Caches: windows, rollback, and the cache that is returned."""

import pytest
import torch
from transformers import DynamicCache

from hf_semspec import SemSpecConfig
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    Forwards,
    Recorder,
    assisted,
    cache_length,
    cache_of,
    new_tokens,
    plain,
    plain_rows,
    refuses,
    states,
)
from tests.models import DRAFTS, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", ["mistral", "gemma3", "qwen3"])
def test_ui33_both_sides_of_the_sliding_window(shape: str, attention: str, kind: str) -> None:
    target = tiny(shape, 0, attention=attention)
    for lengths in ((3,), (2, 19)):
        inputs = prompts(lengths, seed=7)
        expected = plain_rows(target, inputs, max_new_tokens=40)
        for name in ("near",) if kind == "chains" else DRAFTS:
            output = assisted(target, draft_of(target, name), inputs, kind, num_draft_tokens=5, max_new_tokens=40)
            assert torch.equal(new_tokens(output, inputs), expected), (lengths, name)


def test_ui34_a_static_cache_is_refused_by_name() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4, cache_implementation="static")
    refuses(target, draft_of(target, "near"), prompts((4,)), "static", generation_config=config)
    assert not hasattr(target, "_cache")


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DRAFTS)
def test_ui34_few_distinct_target_widths(kind: str, name: str) -> None:
    """At most two besides prefill and the rounds whose room is shorter than a block."""
    target = tiny("llama", 0)
    draft = draft_of(target, name)
    written, seen = Recorder(), []
    with Forwards(target) as spy:
        handle = target.register_forward_pre_hook(lambda *_: seen.append(len(written.ids()) - 5))
        call = {"streamer": written}
        assisted(target, draft, prompts((5,)), kind, num_draft_tokens=4, call=call, max_new_tokens=50)
        handle.remove()
    roomy = {width for width, done in zip(spy.widths[1:], seen[1:], strict=True) if 50 - done > 5}
    assert len(roomy) <= 2


@pytest.mark.parametrize("side", ["target", "draft"])
def test_ui35_a_model_flagged_stateful_is_refused_by_name(side: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    flagged = target if side == "target" else draft

    class Flagged(type(flagged)):  # type: ignore[misc]
        _is_stateful = True

    flagged.__class__ = Flagged
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, draft, prompts((4,)), r"Flagged", generation_config=config)


@pytest.mark.parametrize("kind", EXACT)
def test_ui36_the_returned_cache_holds_all_but_the_last_token(kind: str) -> None:
    """At every length, so at every number of tokens to take back in the last round."""
    target = tiny("llama", 0)
    for name in DRAFTS:
        draft = draft_of(target, name)
        for limit in (1, 2, 3, 4, 5, 9):
            output = assisted(
                target,
                draft,
                prompts((5,)),
                kind,
                num_draft_tokens=4,
                max_new_tokens=limit,
                return_dict_in_generate=True,
            )
            assert cache_length(cache_of(output)) == 5 + limit - 1, (name, limit)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("lengths", [(5,), (3, 8, 6)])
def test_the_returned_cache_is_plain_generates(kind: str, lengths: tuple[int, ...]) -> None:
    target = tiny("llama", 1, attention="sdpa")
    inputs = prompts(lengths, seed=2)
    width = max(lengths)
    fields = {"max_new_tokens": 17, "return_dict_in_generate": True}
    expected = plain(target, inputs, **fields)
    output = assisted(target, draft_of(target, "near"), inputs, kind, **fields)
    assert type(cache_of(output)) is DynamicCache
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(lengths), 16, dtype=torch.long)], dim=1).bool()
    for ours, theirs in zip(states(cache_of(output)), states(cache_of(expected)), strict=True):
        for got, want in zip(ours, theirs, strict=True):
            assert got.shape == want.shape == (len(lengths), 2, width + 16, 8)
            assert torch.allclose(got.transpose(1, 2)[mask], want.transpose(1, 2)[mask], atol=1e-5)


def test_no_cache_is_built_that_nobody_asked_for() -> None:
    target = tiny("llama", 1)
    output = assisted(
        target,
        draft_of(target, "near"),
        prompts((5,)),
        max_new_tokens=5,
        return_dict_in_generate=True,
        use_cache=False,
    )
    assert cache_of(output) is None
