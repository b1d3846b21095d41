"""The record of a call: the events add up to the statistics, and spell what was returned."""

import copy
import json

import pytest
import torch

from hf_semspec import EASDConfig, SemSpecConfig
from hf_semspec.trace import COMMITTED, KINDS, Trace
from tests.encoder_models import encoder_decoder, sources
from tests.helpers import WEAK_DRAFTS, new_tokens, plain_rows
from tests.models import draft_of, prompts, tokenizer
from tests.trace.shared import CONFIGS, by_position, check, run

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize(
    ("kind", "sample"), [(kind, sample) for kind in CONFIGS for sample in (False, True) if sample or "smc" not in kind]
)
def test_events_add_up_to_the_statistics(target, draft, kind, sample):
    output, inputs = run(target, draft, kind, do_sample=sample, num_return_sequences=2 if sample else 1)
    check(output, inputs)


@pytest.mark.parametrize("kind", ["lossless", "easd chains", "parse", "smc"])
def test_rows_that_end_inside_a_block(target, draft, kind):
    """Each row's own EOS, far apart: rows leave while others go on, and what a block held behind it is cut."""
    sample = kind == "smc"
    plain, inputs = run(target, draft, kind, do_sample=sample)
    ids = new_tokens(plain, inputs).tolist()
    cut, lengths = 0, set()
    for places in ((6, 11, 17), (5, 9, 13), (2, 8, 15)):
        eos = [row[at] for row, at in zip(ids, places, strict=True)]
        output, inputs = run(target, draft, kind, do_sample=sample, eos_token_id=eos, pad_token_id=0)
        check(output, inputs)
        cut += sum(row.counts()["cut"] for row in output.trace.rows)
        lengths |= {row.length for row in output.trace.rows}
    assert cut > 0
    assert len(lengths) > 1


def test_without_eos_rows_that_went_on_are_cut_at_the_end(target, draft):
    """A stopping criterion ends all rows at the last one's end; what the others have beyond it is not in the text."""
    output, inputs = run(target, draft, "lossless", call={"stopping_criteria": [lambda ids, scores: ids[:, -1] >= 0]})
    check(output, inputs)
    assert {row.length for row in output.trace.rows} == {1}


@pytest.mark.parametrize(
    ("kind", "sample"),
    [("lossless", True), ("chains", False), ("easd", True), ("parse", True), ("parse plain", False), ("smc", True)],
)
def test_recording_changes_nothing(target, draft, kind, sample):
    """Same text, same statistics but for the clock; and without it there is no record."""
    sample = {"do_sample": sample}
    with_trace, _ = run(target, draft, kind, **sample)
    without, _ = run(target, draft, kind, trace=False, return_dict_in_generate=True, **sample)
    with pytest.raises(AttributeError, match="trace=True"):
        _ = without.trace
    assert torch.equal(with_trace.sequences, without.sequences)
    pair = [
        {name: value for name, value in output.stats.to_dict().items() if "seconds" not in name and name != "drafting"}
        for output in (with_trace, without)
    ]
    assert pair[0] == pair[1]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_numbers_are_those_of_the_laws(target, draft, sample):
    """log p and H(p) of every token against `scores`; the draft's entropies against easd's own record."""
    output, _ = run(target, draft, "easd", do_sample=sample, output_scores=True, temperature=0.7 if sample else None)
    laws = torch.stack(output.scores, dim=1).log_softmax(-1)
    seen = 0
    for i, row in enumerate(output.trace.rows):
        for position, event in by_position(row, *COMMITTED).items():
            law = laws[i, position]
            assert event.log_p == pytest.approx(float(law[event.token]), abs=1e-5)
            assert event.target_entropy == pytest.approx(float(-(law.exp() * law).nansum()), abs=1e-4)
        for position, event in by_position(row, "accepted", "rejected", "triggered").items():
            assert event.draft_entropy == pytest.approx(float(output.draft_entropies[i, position]), abs=1e-5)
            assert event.target_entropy == pytest.approx(float(output.target_entropies[i, position]), abs=1e-5)
            assert event.log_p == pytest.approx(float(laws[i, position][event.token]), abs=1e-5)
            assert event.log_q <= 0
            seen += 1
    assert seen > 20


def test_resampled_tokens_are_the_triggers_on_the_output(target, draft):
    output, _ = run(target, draft, "easd chains", do_sample=True)
    marked = {tuple(place) for place in output.triggers.nonzero().tolist()}
    events = {(i, at) for i, row in enumerate(output.trace.rows) for at in by_position(row, "resampled")}
    assert events == marked
    assert events
    for row in output.trace.rows:
        replaced = by_position(row, "triggered")
        assert all(replaced[at].token != event.token for at, event in by_position(row, "resampled").items())


def test_a_rejected_token_stands_before_its_replacement(target, draft):
    output, _ = run(target, draft, "lossless", do_sample=False)
    seen = 0
    for row in output.trace.rows:
        rejected = by_position(row, "rejected")
        for position, event in by_position(row, "residual").items():
            assert rejected[position].token != event.token
            assert rejected[position].round == event.round
            seen += 1
    assert seen


def test_greedy_events_follow_from_plain_decoding(target, draft):
    """The accepted token is the target's choice, the rejected one is not."""
    output, inputs = run(target, draft, "chains", do_sample=False)
    plain = plain_rows(target, inputs, max_new_tokens=18)
    for row, ids in zip(output.trace.rows, plain.tolist(), strict=True):
        for event in row.events:
            if event.kind in ("accepted", "rejected") and event.position < row.length:
                assert (event.token == ids[event.position]) == (event.kind == "accepted")
    assert any(event.others for row in output.trace.rows for event in row.events)


def test_a_wrong_record_is_noticed(target, draft):
    """The identities are no empty words: a lost, moved or renamed event breaks them."""
    output, inputs = run(target, draft, "easd", do_sample=True)
    row = output.trace.rows[1]
    events = list(row.events)
    first, second = [i for i, event in enumerate(events) if event.kind in COMMITTED][:2]
    swapped = list(events)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    for spoiled in (events[1:], events[:-1], swapped):
        row.events = spoiled
        with pytest.raises(AssertionError):
            check(output, inputs)
    for kind in KINDS[:5]:
        changed = copy.copy(events[0])
        object.__setattr__(changed, "kind", kind)
        row.events = [changed, *events[1:]]
        if kind != events[0].kind:
            with pytest.raises(AssertionError):
                check(output, inputs)


class TestTheOption:
    def test_turns_the_output_object_on(self):
        assert SemSpecConfig("lossless", trace=True).return_dict_in_generate is True
        assert not SemSpecConfig("lossless").return_dict_in_generate

    def test_a_contradiction_is_refused_before_any_forward(self, target, draft):
        with pytest.raises(ValueError, match="return_dict_in_generate"):
            run(target, draft, "lossless", return_dict_in_generate=False)

    @pytest.mark.parametrize("value", ["yes", 1, None])
    def test_is_a_bool(self, value):
        with pytest.raises(ValueError, match="`trace`"):
            SemSpecConfig("lossless", trace=value)
        config = SemSpecConfig("lossless")
        with pytest.raises(ValueError, match="`trace`"):
            config.trace = value

    def test_is_never_stored(self, tmp_path):
        config = SemSpecConfig("easd", trace=True)
        config.save_pretrained(tmp_path)
        assert "trace" not in json.loads((tmp_path / "generation_config.json").read_text())
        assert SemSpecConfig.from_pretrained(tmp_path).trace is False
        assert SemSpecConfig.from_pretrained(tmp_path, trace=True).trace is True
        assert copy.deepcopy(config).trace is True

    def test_a_file_cannot_turn_it_on(self):
        with pytest.raises(ValueError, match="'trace' cannot be an entry"):
            SemSpecConfig.from_dict({"semspec": {"scheme": "lossless"}, "trace": True})

    def test_a_scheme_config_takes_it_beside(self, target, draft):
        inputs = prompts((4,))
        config = SemSpecConfig(EASDConfig(num_draft_tokens=2), trace=True, max_new_tokens=6)
        trace = target.generate(**inputs, assistant_model=draft, generation_config=config).trace
        assert isinstance(trace, Trace)
        assert trace.settings["num_draft_tokens"] == 2
        assert trace.stats["emitted"] == 6


def test_saved_json_is_what_to_dict_says(target, draft, tmp_path):
    output, _ = run(target, draft, "smc", do_sample=True)
    output.trace.save_json(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    assert saved == output.trace.to_dict()
    kinds = [dict(zip(saved["event_fields"], event, strict=True))["kind"] for event in saved["rows"][0]["events"]]
    assert set(kinds) <= set(KINDS)


@pytest.mark.parametrize("kind", ["lossless", "parse plain"])
def test_a_draft_with_another_tokenizer_is_traced_in_the_targets_ids(target, draft, kind):
    output, inputs = run(target, draft, kind, do_sample=True, call={"assistant_tokenizer": tokenizer(permute=3)})
    check(output, inputs)
    assert sum(row.counts()["drafted"] + row.counts()["written"] for row in output.trace.rows) > 0


def test_an_encoder_decoder_is_traced():
    """The prompt of its record is what the decoder began with."""
    target = encoder_decoder("t5")
    config = SemSpecConfig("easd", trace=True, max_new_tokens=12, num_draft_tokens=3)
    output = target.generate(
        **sources((4, 9, 6), seed=1), assistant_model=draft_of(target, "near"), generation_config=config
    )
    check(output, {"input_ids": output.sequences[:, :1]})
    assert [row.prompt for row in output.trace.rows] == output.sequences[:, :1].tolist()
