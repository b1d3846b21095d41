"""What `generate` promises, in calls of `semantic` that keep all, some or nothing of the drafted segments."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from hf_semspec import EASDConfig, LosslessConfig, SemSpecConfig, load_draft, record_stats
from hf_semspec.engine.hooks import call_for_hidden
from tests.helpers import (
    WEAK_DRAFTS,
    Forwards,
    Recorder,
    caught,
    check_against_one_pass,
    check_identities,
    new_tokens,
    plain_rows,
    refuses,
)
from tests.models import prompts, row_of, tiny, tokenizer
from tests.schemes.semantic.shared import ALWAYS, CHARACTERS, NEVER, NO_TEXT, SHORT, Twice, a_probe, call, three

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]

KEPT: dict[str, dict[str, Any]] = {
    "all": ALWAYS,
    "some": {"scorer": "random", "accept_rate": 0.5},
    "none": {"scorer": "none", **NEVER},
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("bonus", [True, False])
def test_ui50_scores_and_logits_are_those_of_a_teacher_forced_pass(kept: str, bonus: bool) -> None:
    """Of drafted tokens too, and the returned cache is plain decoding's."""
    target, draft, inputs = three()
    fields = {"max_new_tokens": 16, "repetition_penalty": 1.3}
    eos = [int(plain_rows(target, inputs, **fields)[0, 9])]
    torch.manual_seed(0)
    output = call(
        target,
        draft,
        inputs,
        eos_token_id=eos,
        output_scores=True,
        output_logits=True,
        bonus=bonus,
        **{**SHORT, **fields, **KEPT[kept]},
    )
    lengths = check_against_one_pass(target, output, inputs, eos=eos[0], penalty=1.3)
    check_identities(output.stats, lengths)
    assert (output.stats.accepted_segments > 0) == (kept != "none")


@pytest.mark.parametrize("scorer", ["probe", "likelihood"])
def test_greedy_rows_depend_neither_on_the_chunk_nor_on_the_batch(scorer: str, tmp_path: Any) -> None:
    target, draft, inputs = three("gemma3")
    fields = {**SHORT, "scorer": scorer, "max_new_tokens": 24, "accept_ratio": 0.5}
    fields["probe"] = a_probe(tmp_path / "probe") if scorer == "probe" else None
    outputs = [call(target, draft, inputs, **{**fields, "revise_chunk": chunk}) for chunk in (1, 3, 16)]
    assert all(torch.equal(output.sequences, outputs[0].sequences) for output in outputs)
    assert 0 < outputs[0].stats.accepted_segments < outputs[0].stats.segments
    for row in range(3):
        alone = row_of(inputs, row)
        output = call(target, draft, alone, **fields)
        assert torch.equal(new_tokens(output, alone)[0], new_tokens(outputs[0], inputs)[row])


def test_no_row_waits_for_one_that_is_revised() -> None:
    """With a chunk of one token the rows that draft go on while the target writes in another."""
    target, draft, inputs = three()
    forwards = {}
    for chunk in (1, 64):
        torch.manual_seed(5)
        fields = {**SHORT, **KEPT["some"], "max_segment_tokens": 8, "max_new_tokens": 32, "revise_chunk": chunk}
        with Forwards(target) as spy:
            call(target, draft, inputs, **fields)
        forwards[chunk] = [rows for rows, width in spy.shapes if width == 1]
    assert min(forwards[1]) < 3, "the target writes for some rows only"


@pytest.mark.parametrize("revise_with", [LosslessConfig(num_draft_tokens=2, num_chains=2), EASDConfig()])
@pytest.mark.parametrize("kept", ["some", "none"])
def test_the_target_can_write_by_a_token_level_scheme(kept: str, revise_with: Any) -> None:
    target, draft, inputs = three(noise=0.05)
    exact = revise_with
    if revise_with.name == "easd":
        exact = EASDConfig(target_entropy_threshold=math.inf, draft_entropy_threshold=math.inf)
    fields = {**SHORT, **KEPT[kept], "max_new_tokens": 24}
    torch.manual_seed(3)
    output = call(target, draft, inputs, revise_with=exact, **fields)
    check_identities(output.stats, [24] * 3)
    if kept == "none":
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=24))
    assert output.stats.bonus > 0


def test_the_target_can_write_by_ngrams() -> None:
    """What the text gives costs no forward of the draft, whose part of the cache is there when it writes again."""
    target, draft, inputs = three(noise=0.05)
    inputs["input_ids"][:, -3:] = inputs["input_ids"][0, -1]  # something that repeats
    fields = {**SHORT, "max_new_tokens": 32, "first_segment": "draft"}
    forwards = {}
    for source in ("model", "ngram", "ngram+model"):
        writes = LosslessConfig(draft=source)
        some = call(target, draft, inputs, revise_with=writes, do_sample=True, **fields, **KEPT["some"])
        check_identities(some.stats, [32] * 3)
        assert some.stats.accepted_segments > 0
        with Forwards(draft) as spy:
            never = call(target, draft, inputs, revise_with=writes, **fields, **KEPT["none"])
        assert torch.equal(new_tokens(never, inputs), plain_rows(target, inputs, max_new_tokens=32))
        forwards[source] = spy.calls
    assert forwards["ngram"] < forwards["ngram+model"] < forwards["model"]


@pytest.mark.parametrize("kept", ["all", "none"])
def test_ui12_eos_and_criteria_end_a_row_once_inside_a_segment(kept: str) -> None:
    target, draft, inputs = three()
    writer = draft if kept == "all" else target
    rows = plain_rows(writer, inputs, max_new_tokens=20)
    token = int(rows[1, 6])
    fields = {**SHORT, **KEPT[kept], "max_segment_tokens": 8, "bonus": False, "first_segment": "draft"}
    for end in ({"eos_token_id": [token]}, {"eos_token_id": [96]}):
        criterion = Twice(token)
        config = SemSpecConfig(
            "semantic", do_sample=False, max_new_tokens=20, return_dict_in_generate=True, **fields, **end
        )
        criteria = StoppingCriteriaList([criterion])
        output = target.generate(**inputs, assistant_model=draft, generation_config=config, stopping_criteria=criteria)
        expected = rows.clone()
        lengths = []
        for row in expected:
            ids = (token, *end["eos_token_id"])
            stop = next((t + 1 for t, x in enumerate(row.tolist()) if x in ids), 20)
            lengths.append(stop)
            row[stop:] = 0
        assert torch.equal(new_tokens(output, inputs), expected[:, : max(lengths)])
        check_identities(output.stats, lengths)
        assert criterion.widths == sorted(criterion.widths) or kept == "none"


def test_ui48_only_committed_tokens_are_streamed_in_order_and_once() -> None:
    target, draft, inputs = three()
    one = row_of(inputs, 1)
    for fields in KEPT.values():
        streamer = Recorder()
        torch.manual_seed(1)
        config = SemSpecConfig("semantic", do_sample=False, max_new_tokens=20, **{**SHORT, **fields})
        sequences = target.generate(**one, assistant_model=draft, generation_config=config, streamer=streamer)
        assert streamer.ids() == sequences[0].tolist()
        assert all(value.shape == (1,) for value in streamer.puts[1:])
        assert streamer.ends == 1


def test_ui54_a_seed_decides_the_tokens_and_moves_the_global_generator_by_one_draw() -> None:
    target, draft, inputs = three()
    fields = {**SHORT, "scorer": "likelihood", "do_sample": True, "top_k": 0, "max_new_tokens": 16}
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(call(target, draft, inputs, num_return_sequences=2, **fields).sequences)
        after = torch.rand(())
        torch.manual_seed(seed)
        torch.randint(2**63 - 1, ())
        assert torch.equal(after, torch.rand(()))
    assert found[0].shape[0] == 6
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[0][1]), "the sequences of a prompt are drawn apart"


def test_the_random_control_has_the_rate_it_is_given() -> None:
    target, draft, inputs = three()
    for rate in (0.0, 0.3, 1.0):
        torch.manual_seed(2)
        with record_stats() as calls:
            many = {name: value.repeat(20, 1) for name, value in inputs.items()}
            call(target, draft, many, scorer="random", accept_rate=rate, max_new_tokens=12, **SHORT)
        (stats,) = calls
        assert stats.segment_acceptance_rate == pytest.approx(rate, abs=0.1)
        assert stats.to_dict()["segments"] == stats.segments > 60


def test_the_reasoning_ends_by_the_target_and_its_answer_can_be_cut() -> None:
    target, draft, inputs = three()
    one = row_of(inputs, 2)
    text = plain_rows(draft, one, max_new_tokens=20)[0].tolist()
    mark = "".join(CHARACTERS[token] for token in text[5:7])
    assert mark not in "".join(CHARACTERS[token] for token in text[:6])
    fields = {**SHORT, **ALWAYS, "max_segment_tokens": 4, "first_segment": "draft", "bonus": False}
    output = call(target, draft, one, max_new_tokens=20, **{**fields, "think_end": mark})
    kept = text[:4]
    start = {"input_ids": torch.cat([one["input_ids"], torch.tensor([kept])], dim=1)}
    start["attention_mask"] = torch.ones_like(start["input_ids"])
    expected = kept + plain_rows(target, start, max_new_tokens=16)[0].tolist()
    assert new_tokens(output, one)[0].tolist() == expected
    assert output.segments[0][-1].rule == "finish"
    short = call(target, draft, one, max_new_tokens=20, max_finish_tokens=5, **{**fields, "think_end": mark})
    assert new_tokens(short, one)[0].tolist() == expected[:9]
    batch = call(target, draft, inputs, max_new_tokens=20, max_finish_tokens=5, **{**fields, "think_end": mark})
    assert new_tokens(batch, inputs)[2, :9].tolist() == expected[:9]
    check_identities(batch.stats)


def test_ui42_past_the_drafts_context_the_target_writes_alone() -> None:
    target, _, inputs = three()
    draft = tiny("llama", 5, positions=16, attention="sdpa")
    one = row_of(inputs, 1)
    with caught() as messages:
        output = call(target, draft, one, max_new_tokens=20, first_segment="draft", **{**SHORT, **ALWAYS})
    assert len([message for message in messages if "context" in message]) == 1
    assert output.segments[0][-1].rule == "finish"
    check_identities(output.stats, [20])


@pytest.mark.quantized
def test_a_quantized_draft_writes_segments(tmp_path: Any) -> None:
    target = tiny("llama", 1, hidden=64, dtype=torch.float32, attention="sdpa")
    draft = load_draft(target, quantization="nf4")
    fields = {**SHORT, "probe": a_probe(tmp_path / "probe", (64, 64)), "max_new_tokens": 16}
    output = call(target, draft, prompts((4, 9), seed=1), **fields)
    check_identities(output.stats, [16, 16])
    assert output.stats.segments > 0


def test_what_is_missing_is_said_before_any_forward(tmp_path: Any) -> None:
    target, draft, inputs = three()
    with pytest.raises(ValueError, match="compile_draft"):
        SemSpecConfig("semantic", revise_with=LosslessConfig(compile_draft=True))
    for words in ({"tokenizer": "gpt2"}, {"tokenizer": tokenizer(), "assistant_tokenizer": "gpt2"}):
        match = "tokenizer must be a loaded tokenizer, .* but is 'gpt2'"
        refuses(target, draft, inputs, match, generation_config=SemSpecConfig("semantic", scorer="none"), **words)
    for fields, match in (
        (NO_TEXT, "train_semantic_probe"),
        ({"scorer": "none"}, "pass tokenizer"),
        ({**NO_TEXT, "probe": str(tmp_path)}, "could not be read"),
        ({**NO_TEXT, "probe": a_probe(tmp_path / "probe", (64, 32))}, "size 64"),
        ({**NO_TEXT, "probe": a_probe(tmp_path / "other", (32, 64))}, "the draft model"),
    ):
        config = SemSpecConfig("semantic", max_new_tokens=4, **fields)
        refuses(target, draft, inputs, match, generation_config=config)
    a_probe(tmp_path / "warm", sampling={"do_sample": True, "temperature": 0.5}, segment_stop="x")
    with caught() as messages:
        call(target, draft, inputs, probe=str(tmp_path / "warm"), do_sample=True, max_new_tokens=4, **SHORT)
    (message,) = [message for message in messages if "other settings" in message]
    assert "temperature, segment_stop" in message
    with caught() as messages:
        call(target, draft, inputs, probe=a_probe(tmp_path / "probe"), max_new_tokens=4, **SHORT)
    assert messages == []


def test_an_empty_rest_of_the_text_needs_no_tokenizer() -> None:
    target, draft, inputs = three()
    expected = plain_rows(target, inputs, max_new_tokens=4)
    for fields, words in ((NO_TEXT, {}), ({}, {"tokenizer": tokenizer()})):
        config = SemSpecConfig("semantic", scorer="none", max_new_tokens=4, do_sample=False, **fields)
        output = target.generate(**inputs, assistant_model=draft, generation_config=config, **words)
        assert torch.equal(new_tokens(output, inputs), expected)


def test_a_probe_leaves_no_hooks_on_the_models(tmp_path: Path) -> None:
    """transformers leaves its own where it is asked for hidden states, and a model with them cannot be pickled."""
    target, draft, inputs = three()
    call(target, draft, inputs, **SHORT, scorer="probe", probe=a_probe(tmp_path), max_new_tokens=12)
    for model in (target, draft):
        assert not any(module._forward_hooks for module in model.modules())
        assert len(pickle.dumps(model)) > 0


def test_a_probe_gets_the_hidden_states_that_transformers_gives(tmp_path: Path) -> None:
    target, _, inputs = three()
    ids = inputs["input_ids"][1:2]
    output, hidden = call_for_hidden(target, {"input_ids": ids})
    asked = target(ids, output_hidden_states=True)
    assert torch.equal(output.logits, asked.logits)
    assert torch.equal(hidden, asked.hidden_states[-1])
    wrapped = torch.nn.Module()  # one of which nothing is known but how it is called
    wrapped.forward = target.forward
    assert torch.equal(call_for_hidden(wrapped, {"input_ids": ids})[1], hidden)


def test_the_probes_warning_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    target, draft, inputs = three()
    name = a_probe(tmp_path / "mine", sampling={"do_sample": True, "temperature": 0.3})
    with caught() as messages:
        call(target, draft, inputs, **SHORT, scorer="probe", probe=name, do_sample=True, max_new_tokens=4)
    assert ["mine" in message for message in messages] == [True]
    assert str(tmp_path) not in messages[0]
