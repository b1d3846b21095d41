"""A cache that comes with a call: turns of a chat, and rows that ended apart."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_semspec import SemSpecConfig
from tests.helpers import (
    CACHE,
    EXACT,
    VERSION,
    WEAK_DRAFTS,
    Forwards,
    Version,
    asked,
    assisted,
    cache_length,
    cache_of,
    caught,
    check_identities,
    new_tokens,
    plain,
    plain_rows,
    refuses,
    states,
)
from tests.models import PAD, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def second_turn(first: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The text of the first turn and three more tokens, with the first turn's cache."""
    rows = first.sequences.shape[0]
    ids = torch.cat([first.sequences, torch.tensor([[11, 23, 31]]).expand(rows, -1)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("lengths", [(5,), (3, 8, 6)])
@pytest.mark.parametrize("turns", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_ui38_chat_turns_with_a_filled_cache(
    shape: str, turns: tuple[int, int], lengths: tuple[int, ...], kind: str
) -> None:
    target = tiny(shape, 3, attention="sdpa")
    inputs = prompts(lengths, seed=3)
    for name in ("near", "far"):
        draft = draft_of(target, name)
        # A cache without a window for every layer: what plain decoding can go on from after any turn.
        call: dict[str, Any] = {CACHE: DynamicCache()}
        for turn in turns:
            given = call[CACHE]
            expected = plain(target, inputs, max_new_tokens=10)
            held = cache_length(given)
            with Forwards(target) as spy:
                fields = {"max_new_tokens": 10, "return_dict_in_generate": True}
                if turn:
                    output = assisted(target, draft, inputs, kind, num_draft_tokens=4, call=call, **fields)
                    check_identities(output.stats, [10] * len(lengths))
                else:
                    output = plain(target, inputs, call=call, **fields)
            assert torch.equal(output.sequences, expected), (name, turn)
            # parse reads the draft's answer and its questions on the way.
            more = 10 + asked(output) if turn and kind == "parse" else 4
            assert spy.widths[0] <= inputs["input_ids"].shape[1] - held + more, "only what the cache lacks is fed"
            assert cache_of(output) is given, "the caller's cache is extended in place"
            assert cache_length(given) == expected.shape[1] - 1
            inputs = second_turn(output, inputs)
            call = {CACHE: given}
        inputs = prompts(lengths, seed=3)


@pytest.mark.parametrize("shape", ["mistral", "qwen3"])
def test_ui38_a_cache_that_plain_decoding_made_with_windows(shape: str) -> None:
    """Its sliding layers hold their last columns only; that must do."""
    target = tiny(shape, 3, attention="sdpa")
    inputs = prompts((12,), seed=3)
    first = plain(target, inputs, max_new_tokens=10, return_dict_in_generate=True)
    inputs = second_turn(first, inputs)
    expected = plain(target, inputs, max_new_tokens=15)
    output = assisted(target, draft_of(target, "near"), inputs, call={CACHE: cache_of(first)}, max_new_tokens=15)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("kind", EXACT)
def test_ui38_the_draft_never_gets_the_targets_cache(kind: str) -> None:
    target = tiny("llama", 3)
    draft = draft_of(target, "near")
    inputs = prompts((6,), seed=3)
    first = assisted(target, draft, inputs, kind, max_new_tokens=10, return_dict_in_generate=True)
    given = cache_of(first)
    with Forwards(draft) as spy:
        assisted(target, draft, second_turn(first, inputs), kind, call={CACHE: given}, max_new_tokens=10)
    assert spy.calls > 0
    assert all(kwargs.get(CACHE) is not given for kwargs in spy.kwargs)
    assert spy.shapes[0][1] >= 18, "the draft reads the whole text once"


@pytest.mark.skipif(Version("5.8") > VERSION, reason="stock takes the whole text only")
def test_ui38_only_the_new_tokens_may_be_passed() -> None:
    target = tiny("llama", 3)
    draft = draft_of(target, "near")
    inputs = prompts((6,), seed=3)
    first = plain(target, inputs, max_new_tokens=10, return_dict_in_generate=True)
    whole = second_turn(first, inputs)
    expected = plain(target, whole, max_new_tokens=12)[:, 19:]
    suffix = {"input_ids": whole["input_ids"][:, 15:], "attention_mask": whole["attention_mask"]}
    with caught() as messages:
        output = assisted(target, draft, suffix, call={CACHE: cache_of(first)}, max_new_tokens=12)
    assert torch.equal(output[:, 4:], expected)
    assert len(messages) == 1


def test_a_supplied_cache_is_as_it_was_after_an_error() -> None:
    target = tiny("llama", 3)
    draft = draft_of(target, "near")
    inputs = prompts((6,), seed=3)
    first = plain(target, inputs, max_new_tokens=10, return_dict_in_generate=True)
    given = cache_of(first)
    before = [(keys.clone(), values.clone()) for keys, values in states(given)]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 7:
            raise RuntimeError("stop here")

    handle = draft.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        assisted(target, draft, second_turn(first, inputs), call={CACHE: given}, max_new_tokens=20)
    handle.remove()
    assert cache_length(given) == 15
    for now, then in zip(states(given), before, strict=True):
        assert torch.equal(now[0], then[0])
        assert torch.equal(now[1], then[1])


def test_a_filled_cache_with_several_sequences_is_refused_by_name() -> None:
    target = tiny("llama", 3)
    inputs = prompts((6,), seed=3)
    first = plain(target, inputs, max_new_tokens=10, return_dict_in_generate=True)
    config = SemSpecConfig("lossless", max_new_tokens=4, do_sample=True, num_return_sequences=2)
    call = {CACHE: cache_of(first), "generation_config": config}
    refuses(target, draft_of(target, "near"), second_turn(first, inputs), "num_return_sequences", **call)


@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "qwen3"])
@pytest.mark.parametrize("kind", EXACT)
def test_rows_that_ended_apart_go_on_from_a_cache_past_the_window(shape: str, kind: str) -> None:
    """A sliding layer keeps its last columns, padding included: what is missing there is read anew."""
    target = tiny(shape, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((5, 3, 7))
    rows = plain_rows(target, inputs, max_new_tokens=16)
    fields = {"eos_token_id": [int(rows[0, 2]), int(rows[2, 9])], "pad_token_id": PAD}
    first = assisted(target, draft, inputs, kind, max_new_tokens=16, return_dict_in_generate=True, **fields)
    new = new_tokens(first, inputs)
    assert len({int((row != PAD).sum()) for row in new}) > 1
    ids = torch.cat([first.sequences, torch.full((3, 2), 30)], dim=1)
    mask = torch.cat([inputs["attention_mask"], (new != PAD).long(), torch.ones(3, 2, dtype=torch.long)], dim=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    output = assisted(target, draft, turn, kind, call={CACHE: cache_of(first)}, max_new_tokens=8)
    assert torch.equal(new_tokens(output, turn), plain_rows(target, turn, max_new_tokens=8))


def test_new_ids_alone_beside_a_sliding_cache_that_lacks_tokens_are_refused() -> None:
    target = tiny("mistral", attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((5, 3, 7))
    fields = {"eos_token_id": [20, 21, 22, 23], "pad_token_id": PAD}
    first = assisted(target, draft, inputs, max_new_tokens=16, return_dict_in_generate=True, **fields)
    held = cache_of(first).get_seq_length()
    mask = torch.cat([inputs["attention_mask"], (new_tokens(first, inputs) != PAD).long()], dim=1)
    mask = torch.cat([mask[:, :held], torch.ones(3, 2, dtype=torch.long)], dim=1)
    turn = {"input_ids": torch.full((3, 2), 30), "attention_mask": mask}
    with pytest.raises(ValueError, match="sliding layers lack tokens"):
        assisted(target, draft, turn, call={CACHE: cache_of(first)}, max_new_tokens=8)


def test_finished_rows_in_a_returned_cache_can_be_continued() -> None:
    """Rows that ended apart: plain decoding goes on from the cache, padding and all, as from its own."""
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((3, 7), seed=4)
    rows = plain_rows(target, inputs, max_new_tokens=18)
    eos = [int(rows[0, 3]), int(rows[1, 11])]
    fields = {"max_new_tokens": 18, "eos_token_id": eos, "return_dict_in_generate": True}
    first = assisted(target, draft_of(target, "near"), inputs, **fields)
    ids = torch.cat([first.sequences, torch.tensor([[11, 23]]).expand(2, -1)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :7] = inputs["attention_mask"]
    mask[:, 7 : first.sequences.shape[1]] = (new_tokens(first, inputs) != 0).long()
    turn = {"input_ids": ids, "attention_mask": mask}
    expected = plain(target, turn, max_new_tokens=9)
    assert torch.equal(plain(target, turn, call={CACHE: cache_of(first)}, max_new_tokens=9), expected)


@pytest.mark.parametrize("kind", EXACT)
def test_a_long_conversation_over_one_cache(kind: str) -> None:
    """Ten turns, so that buffers grow; every turn equals plain decoding of the whole text."""
    target = tiny("gemma3", 4, attention="sdpa", positions=512)
    draft = draft_of(target, "near")
    cache = DynamicCache()
    inputs = prompts((5, 9), seed=4)
    for turn in range(10):
        fields = {"num_draft_tokens": 4, "max_new_tokens": 9, "return_dict_in_generate": True}
        output = assisted(target, draft, inputs, kind, call={CACHE: cache}, **fields).sequences
        if turn % 3 == 2:
            assert torch.equal(output, plain(target, inputs, max_new_tokens=9)), turn
        ids = torch.cat([output, torch.full((2, 2), 3 + turn)], dim=1)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("first", [True, False], ids=["made under autocast", "used under autocast"])
@pytest.mark.parametrize("kind", EXACT)
def test_edge_a_cache_of_another_precision(kind: str, first: bool) -> None:
    """As in plain decoding the wider of both is used."""
    target = tiny("llama", 6, attention="sdpa", dtype=torch.float32)
    draft, inputs = draft_of(target, "near", seed=6), prompts((9, 9), seed=6)
    written = []
    for run in (plain, partial(assisted, kind=kind)):
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            turn = plain(target, inputs, max_new_tokens=5, return_dict_in_generate=True)
        again = second_turn(turn, inputs)
        arguments = (target, again) if run is plain else (target, draft, again)
        with torch.autocast("cpu", torch.bfloat16, enabled=not first):
            output = run(*arguments, call={CACHE: turn[CACHE]}, max_new_tokens=8, return_dict_in_generate=True)
        written.append(output)
    assert torch.equal(written[0].sequences[:, :-7], written[1].sequences[:, :-7])
    expected, found = (states(cache_of(output)) for output in written)
    assert [(k.dtype, v.dtype) for k, v in found] == [(k.dtype, v.dtype) for k, v in expected]
