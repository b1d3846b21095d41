"""What `generate` promises, in calls of `parse` that keep all, some or nothing of the draft's answers."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_semspec import LosslessConfig
from tests.callbacks import ForceAt, parity
from tests.helpers import (
    CACHE,
    WEAK_DRAFTS,
    Forwards,
    Recorder,
    asked,
    assisted,
    cache_length,
    caught,
    check_against_one_pass,
    check_identities,
    new_tokens,
    plain_rows,
)
from tests.models import PAD, VOCAB, draft_of, prompts, row_of, tiny
from tests.schemes.parse.shared import ALL, KEPT, SCRIPTED, Script

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


def partly(kept: str, patch: pytest.MonkeyPatch, rows: int) -> dict[str, Any]:
    """Fields for a call that keeps all, some (of each row another share) or nothing."""
    if kept == "some":
        Script(patch, [2, 1, 3][:rows], [False] * rows)
        return SCRIPTED
    return KEPT[kept]


def fill(logits: torch.Tensor, value: float) -> None:
    logits.fill_(value)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("lengths", [(6,), (4, 9, 6)])
def test_ui50_scores_and_logits_are_those_of_a_teacher_forced_pass(
    lengths: tuple[int, ...], single: bool, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the judged tokens too, and the returned cache is plain decoding's."""
    target = tiny("llama", 1, attention="sdpa")
    draft, inputs = draft_of(target, "near", noise=0.2), prompts(lengths, seed=1)
    if kept == "some" and not single:
        pytest.skip("the script stands for one pass")
    fields = {"max_new_tokens": 16, "repetition_penalty": 1.3}
    eos = [int(plain_rows(draft, inputs, **fields)[0, 7])]
    output = assisted(
        target,
        draft,
        inputs,
        "parse",
        eos_token_id=eos,
        single_pass=single,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **fields,
        **partly(kept, monkeypatch, len(lengths)),
    )
    ended = check_against_one_pass(target, output, inputs, eos=eos[0], penalty=1.3)
    check_identities(output.stats, ended)


def test_ui53_the_logits_of_the_prompt_are_not_asked_for() -> None:
    target = tiny("llama", 1)
    with Forwards(target) as spy:
        assisted(
            target,
            draft_of(target, "near"),
            prompts((60,)),
            "parse",
            max_new_tokens=6,
            output_scores=True,
            return_dict_in_generate=True,
        )
    assert spy.widths[0] > 60
    assert spy.logits[0][1] < 20


@pytest.mark.parametrize("kept", KEPT)
def test_ui48_nothing_is_streamed_before_the_verdict(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "near", noise=0.2), prompts((6,), seed=2)
    streamer, before = Recorder(), []
    handles = [model.register_forward_pre_hook(lambda *_: before.append(len(streamer.ids()))) for model in (target,)]
    handles.append(draft.register_forward_pre_hook(lambda *_: before.append(len(streamer.ids()))))
    fields = partly(kept, monkeypatch, 1)
    output = assisted(
        target,
        draft,
        inputs,
        "parse",
        call={"streamer": streamer},
        max_new_tokens=18,
        return_dict_in_generate=True,
        **fields,
    )
    assert before[:19] == [6] * 19, "18 of the draft and the judging one see the prompt alone"
    assert streamer.ids() == output.sequences[0].tolist()
    assert streamer.ends == 1
    assert [tuple(value.shape) for value in streamer.puts[1:]] == [(1,)] * 18
    kept_tokens = int(output.kept_tokens[0])
    assert (0 < kept_tokens < 18) == (kept == "some")
    if kept_tokens < 18:
        assert before[19] == 6 + kept_tokens, "the kept prefix is streamed at once"


@pytest.mark.parametrize("limit", range(1, 8))
def test_ui16_limits_of_an_answer_that_is_kept(limit: int) -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "far"), prompts((4, 6), seed=2)
    with Forwards(draft) as spy:
        output = assisted(
            target, draft, inputs, "parse", max_new_tokens=limit, return_dict_in_generate=True, max_redrafts=2, **ALL
        )
    assert torch.equal(new_tokens(output, inputs), plain_rows(draft, inputs, max_new_tokens=limit))
    assert spy.calls == limit, "the draft writes no token that cannot be returned"
    check_identities(output.stats, [limit] * 2)


def test_ui12_an_answer_that_is_nothing_but_eos() -> None:
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "near"), prompts((4, 6), seed=2)
    eos = 50
    draft.register_forward_hook(lambda m, a, output: fill(output.logits[..., eos], 1e4))
    fields = {"max_new_tokens": 12, "eos_token_id": eos, "return_dict_in_generate": True}
    output = assisted(target, draft, inputs, "parse", **fields, **ALL)
    assert new_tokens(output, inputs).tolist() == [[eos], [eos]]
    check_identities(output.stats, [1, 1])
    assert output.boundaries.tolist() == [[0], [0]]
    output = assisted(target, draft, inputs, "parse", **fields, max_redrafts=2)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=12, eos_token_id=eos)), (
        "and where it is refused, the target writes all"
    )


def test_an_eos_of_a_prefix_that_is_kept_whole_but_not_accepted_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prefixes pass, the answer as a whole does not: the target decides whether it ends there."""
    target = tiny("llama", 2)
    draft, inputs = draft_of(target, "far"), prompts((6,), seed=2)
    eos = [int(plain_rows(draft, inputs, max_new_tokens=12)[0, 9])]
    fields = {"max_new_tokens": 16, "eos_token_id": eos}
    answer = plain_rows(draft, inputs, **fields)
    output = assisted(
        target,
        draft,
        inputs,
        "parse",
        accept_threshold=2.0,
        prefix_threshold=0.0,
        return_dict_in_generate=True,
        **fields,
    )
    kept = answer[:, :-1]
    assert output.kept_tokens.tolist() == [kept.shape[1]]
    text = torch.cat([inputs["input_ids"], kept], dim=1)
    alone = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    rest = plain_rows(target, alone, max_new_tokens=16 - kept.shape[1], eos_token_id=eos)
    assert torch.equal(new_tokens(output, inputs), torch.cat([kept, rest], dim=1))


@pytest.mark.parametrize("kept", ["all", "none"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_ui21_constraints_hold_in_what_the_draft_wrote(kept: str, do_sample: bool) -> None:
    target = tiny("llama", 5, attention="sdpa")
    draft, inputs = draft_of(target, "near"), prompts((4, 9, 6), seed=5)
    fields = {"max_new_tokens": 12, "do_sample": do_sample, **KEPT[kept]}
    force: LogitsProcessor = ForceAt(9 + 6, 7)
    for call in ({"prefix_allowed_tokens_fn": parity}, {"logits_processor": LogitsProcessorList([force])}):
        new = new_tokens(assisted(target, draft, inputs, "parse", call=call, **fields), inputs)
        if "logits_processor" in call:
            assert new[:, 6].eq(7).all()
        else:
            assert new[0].remainder(2).eq(0).all()
            assert new[1].remainder(2).eq(1).all()
            assert (new[2, 1:] - 2).remainder(7).eq(new[2, :-1].remainder(7)).all()


def test_ui54_seeds_decide_a_sampled_answer() -> None:
    target = tiny("llama", 5)
    draft, inputs = draft_of(target, "near"), prompts((4, 9), seed=5)
    texts = []
    for seed in (0, 1, 2, 0):
        torch.manual_seed(seed)
        output = assisted(target, draft, inputs, "parse", max_new_tokens=12, do_sample=True, top_k=0, **ALL)
        texts.append(output.tolist())
    assert texts[0] == texts[-1]
    assert texts[0] != texts[1] != texts[2]


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_ui42_an_answer_ends_at_the_drafts_context_and_the_target_goes_on(shape: str) -> None:
    target, draft = tiny("llama", 0), tiny(shape, 1, positions=16)
    inputs = prompts((4, 12, 20)) if shape == "llama" else prompts((4, 12))
    with caught() as messages:
        output = assisted(
            target, draft, inputs, "parse", prefix_threshold=0.0, max_new_tokens=24, return_dict_in_generate=True
        )
    assert len([message for message in messages if "16" in message]) == 1
    for row, length in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        alone = row_of(inputs, row)
        kept = plain_rows(draft, alone, max_new_tokens=17 - length) if length < 17 else torch.zeros(1, 0).long()
        assert output.kept_tokens[row] == kept.shape[1]
        text = torch.cat([alone["input_ids"], kept], dim=1)
        rest = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        rest = plain_rows(target, rest, max_new_tokens=24 - kept.shape[1])
        assert torch.equal(new_tokens(output, inputs)[row], torch.cat([kept, rest], dim=1)[0])
    assert output.stats.full_accepts == 0
    check_identities(output.stats, [24] * len(inputs["input_ids"]))


@pytest.mark.parametrize("lengths", [(5,), (3, 8, 6)])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_ui38_a_second_turn_over_the_callers_cache(
    shape: str, kept: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny(shape, 3, attention="sdpa")
    draft, inputs = draft_of(target, "near", noise=0.2), prompts(lengths, seed=3)
    cache = DynamicCache()
    for turn in range(3):
        fields = {"max_new_tokens": 16, "return_dict_in_generate": True, **partly(kept, monkeypatch, len(lengths))}
        expected = assisted(target, draft, inputs, "parse", **fields).sequences
        with Forwards(target) as spy:
            output = assisted(target, draft, inputs, "parse", call={CACHE: cache}, **fields)
        assert torch.equal(output.sequences, expected), turn
        assert cache_length(cache) == expected.shape[1] - 1
        held = 0 if turn == 0 else inputs["input_ids"].shape[1] - 3
        read = inputs["input_ids"].shape[1] - held + 16 + asked(output)
        assert spy.widths[0] == read, "only what the cache lacks is fed"
        ids = torch.cat([output.sequences, torch.tensor([[11, 23]]).expand(len(lengths), -1)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        inputs = {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("size", [97, 128])
def test_ui23_a_draft_of_another_vocabulary_size_writes_answers(size: int) -> None:
    target = tiny("llama", 0, vocab=225 - size)
    draft, inputs = tiny("llama", 1, vocab=size), prompts((4, 9))
    draft.lm_head.weight.data[97:] = 0
    with caught():
        output = assisted(target, draft, inputs, "parse", max_new_tokens=16, **ALL)
    assert torch.equal(new_tokens(output, inputs), plain_rows(draft, inputs, max_new_tokens=16))
    assert int(output.max()) < VOCAB


@pytest.mark.parametrize("do_sample", [False, True])
def test_ui22_nan_of_the_draft_is_reported_by_name(do_sample: bool) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    draft.register_forward_hook(lambda m, a, output: fill(output.logits, torch.nan))
    with Forwards(target) as spy, pytest.raises(ValueError, match=r"draft model.*nan"):
        assisted(target, draft, prompts((4, 9)), "parse", max_new_tokens=8, do_sample=do_sample)
    assert spy.calls == 0


def test_the_additions_are_no_items_of_the_output() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    fields = {"max_new_tokens": 12, "revise_with": LosslessConfig(num_draft_tokens=2)}
    output = assisted(target, draft, prompts((4, 9)), "parse", return_dict_in_generate=True, **fields)
    assert not {"stats", "verdicts", "boundaries", "kept_tokens"} & set(output.keys())
    assert output.verdicts.shape == output.boundaries.shape
    assert output.verdicts.dtype == torch.float32
    assert output.boundaries.dtype == output.kept_tokens.dtype == torch.int64
    assert output.kept_tokens.shape == (2,)
    assert output.stats.judging == "packed"
    assert output.stats.to_dict()["drafting"]["emitted"] == output.stats.written == 24
    assert isinstance(assisted(target, draft, prompts((4, 9)), "parse", **fields), torch.Tensor)
    assert target.generation_config.pad_token_id == PAD


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_a_question_that_cannot_fit_is_not_fed(single: bool, scored: bool) -> None:
    target = tiny("llama", 1, attention="sdpa", positions=64)
    inputs = prompts((6, 4), seed=2)
    fields = {"max_new_tokens": 12, "single_pass": single, "return_dict_in_generate": True, "output_scores": scored}
    long = {"judge_prompt": "?" * 100, "full_judge_prompt": "!" * 200}
    with Forwards(target) as spy, caught() as messages:
        output = assisted(target, draft_of(target, "near"), inputs, "parse", **fields, **long)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=12))
    assert len(messages) == 1
    assert "does not fit into the target's context" in messages[0]
    assert output.verdicts.isnan().all()
    assert max(spy.widths) <= 6 + 12
