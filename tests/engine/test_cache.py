"""Users' reports about caches: windows, rollback, chat turns (their numbers are in the test names)."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.helpers import (
    CACHE,
    EXACT,
    VERSION,
    WEAK_DRAFTS,
    Forwards,
    Recorder,
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
from tests.models import DRAFTS, VOCAB, draft_of, prompts, tiny

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


def stateful(kind: str) -> PreTrainedModel:
    """A recurrent model (flagged stateful) or a hybrid one (layers of a type that cannot be cut back)."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "hidden_size": 32, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    if kind == "flagged":
        return MambaForCausalLM(MambaConfig(**common, num_hidden_layers=2, state_size=4)).double().eval()
    config = Lfm2Config(
        **common,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        layer_types=["conv", "full_attention"],
    )
    return Lfm2ForCausalLM(config).double().eval()


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("kind", ["flagged", "layers"])
def test_ui35_models_that_cannot_be_rolled_back_are_refused_by_name(kind: str, side: str) -> None:
    odd, usual = stateful(kind), tiny("llama", 0)
    models = (odd, usual) if side == "target" else (usual, odd)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(*models, prompts((4,)), type(odd).__name__, generation_config=config)


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
