"""The record of a call: the events add up to the statistics, and spell what was returned."""

import copy
import json
import math

import pytest
import torch

from hf_semspec import EASDConfig, SemSpecConfig
from hf_semspec.engine.recorder import Recorder
from hf_semspec.trace import COMMITTED, DROPPED, KINDS, Trace
from tests.encoder_models import encoder_decoder, sources
from tests.helpers import JUDGE, WEAK_DRAFTS, check_identities, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

LENGTHS = (5, 3, 7)
SEGMENTS = {"scorer": "none", "max_segment_tokens": 4, "segment_stop": None, "think_end": None}
CONFIGS = {
    "lossless": ("lossless", {"num_draft_tokens": 3}),
    "easd": ("easd", {"num_draft_tokens": 3, "trigger": "random", "trigger_rate": 0.3}),
    "chains": ("lossless", {"num_draft_tokens": 3, "num_chains": 3}),
    "easd chains": ("easd", {"num_draft_tokens": 3, "num_chains": 3, "trigger": "random", "trigger_rate": 0.3}),
    "auto": ("lossless", {"num_draft_tokens": "auto"}),
    "ngram": ("lossless", {"num_draft_tokens": 3, "draft": "ngram"}),
    "ngram first": ("lossless", {"draft": "ngram+model"}),
    "parse": (
        "parse",
        {**JUDGE, "max_redrafts": 2, "prefix_threshold": 0.3, "accept_threshold": 0.9, "revise_with": "easd"},
    ),
    "parse plain": ("parse", {**JUDGE, "draft_ngram": True, "boundary": "random"}),
    "semantic": ("semantic", {**SEGMENTS, "top_k_accept": 20}),
    "semantic bare": ("semantic", {**SEGMENTS, "top_k_accept": 25, "bonus": False, "salvage": True}),
    "semantic revised": (
        "semantic",
        {**SEGMENTS, "top_k_accept": 15, "revise_with": "easd", "first_segment": "draft"},
    ),
    "smc": ("smc", {"num_particles": 4, "num_draft_tokens": 3, "ess_threshold": 0.9}),
    "smc power": ("smc", {"num_particles": 3, "num_draft_tokens": 2, "power": 2.0}),
}


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def draft(target):
    return draft_of(target, "near", noise=0.15)


def run(target, draft, kind, *, call=None, lengths=LENGTHS, **fields):
    scheme, own = CONFIGS[kind]
    torch.manual_seed(fields.pop("seed", 3))
    config = SemSpecConfig(scheme, **{"trace": True, "max_new_tokens": 18, **own, **fields})
    inputs = prompts(lengths)
    models = {} if own.get("draft") == "ngram" else {"assistant_model": draft}
    output = target.generate(**inputs, **(call or {}), **models, tokenizer=tokenizer(), generation_config=config)
    return output, inputs


def check(output, inputs):
    """Every count of the statistics is a count of events, and the tokens are those returned."""
    trace = output.trace
    assert len(trace.rows) == len(output.sequences) == len(output.stats.rows)
    check_identities(output.stats)
    for row, stats, ids in zip(trace.rows, output.stats.rows, new_tokens(output, inputs).tolist(), strict=True):
        counts = row.counts()
        assert counts == {name: getattr(stats, name) for name in counts}
        assert row.tokens == ids[: row.length]
        assert row.length == stats.emitted
        committed = [event for event in row.events if event.kind in COMMITTED]
        assert [event.position for event in committed] == list(range(len(committed)))
        assert all(event.cut == (event.position >= row.length) for event in committed)
        assert not any(event.cut for event in row.events if event.kind in DROPPED)
    assert json.loads(json.dumps(trace.to_dict(), allow_nan=False))["scheme"] == output.stats.scheme


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


def by_position(row, *kinds):
    return {event.position: event for event in row.events if event.kind in kinds and not event.cut}


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


def test_the_record_of_parse_is_its_verdicts(target, draft):
    output, _ = run(target, draft, "parse", do_sample=True)
    attempts = 0
    for i, row in enumerate(output.trace.rows):
        pairs = [(a.start + p.length, p.confidence) for a in row.answers for p in a.prefixes]
        said = zip(output.boundaries[i].tolist(), output.verdicts[i].tolist(), strict=True)
        assert len(pairs) == sum(length >= 0 for length in output.boundaries[i].tolist())
        for (length, confidence), (boundary, verdict) in zip(pairs, said, strict=False):
            assert length == boundary
            assert confidence == pytest.approx(verdict) or (math.isnan(confidence) and math.isnan(verdict))
        assert sum(answer.kept for answer in row.answers) == int(output.kept_tokens[i])
        for answer in row.answers:
            own = row.events[answer.first_event : answer.first_event + answer.written]
            assert [event.kind for event in own] == ["kept"] * answer.kept + ["unkept"] * (
                answer.written - answer.kept
            )
        attempts += len(row.answers)
    assert attempts > len(row.answers)


def test_the_record_of_semantic_is_its_segments(target, draft):
    output, _ = run(target, draft, "semantic", do_sample=True)
    seen = set()
    for row, segments in zip(output.trace.rows, output.segments, strict=True):
        assert [(span.start, span.stop) for span in row.spans] == [(one.start, one.end) for one in segments]
        assert [span.numbers["rule"] for span in row.spans] == [one.rule for one in segments]
        for span in row.spans:
            assert row.events[span.next_event - 1].position == span.stop - 1
        seen |= {one.rule for one in segments}
    assert {"top_k", "rejected"} <= seen


def test_rejected_segments_are_what_the_draft_wrote(target, draft):
    """Greedy, by the token rule with k = 1: the first token that is dropped is none that the target would write."""
    output, _ = run(target, draft, "semantic", do_sample=False, top_k_accept=1, salvage=True)
    seen = 0
    for row in output.trace.rows:
        rejected = by_position(row, "rejected")
        for position, event in by_position(row, "residual").items():
            assert rejected[position].token != event.token
            assert rejected[position].log_p < event.log_p
            seen += 1
    assert seen > 3


def test_the_record_of_smc_is_its_particles(target, draft):
    """Weights, ESS and ancestors round by round; the tokens of every particle, walked back, spell it."""
    output, inputs = run(target, draft, "smc", do_sample=True, num_return_sequences=2)
    width = inputs["input_ids"].shape[1]
    assert any(entry.resampled for one in output.trace.populations for entry in one.rounds)
    for prompt, population in enumerate(output.trace.populations):
        weighted = [entry for entry in population.rounds if entry.log_weights is not None]
        ess = [value for value in output.ess[prompt].tolist() if not math.isnan(value)]
        assert [entry.ess for entry in weighted] == pytest.approx(ess)
        for entry in weighted:
            share = torch.tensor(entry.log_weights, dtype=torch.float64).softmax(0)
            assert float(1 / share.square().sum()) == pytest.approx(entry.ess)
            assert entry.resampled or entry.ancestors == list(range(4))
        assert population.log_weights == pytest.approx(output.log_weights[prompt].tolist())
        for slot in range(4):
            text, at = [], slot
            for entry in reversed(population.rounds):
                at = entry.ancestors[at]
                text = entry.tokens[at] + text
            assert text == output.particles[prompt, slot, width : width + len(text)].tolist()
    assert [row.slot for row in output.trace.rows] == [s for one in output.trace.populations for s in one.returned]


def test_a_collapse_is_recorded(target, draft):
    """Where the target excludes every particle's block, it is dropped: rejected, replaced by one token each."""
    output, inputs = run(target, draft_of(target, "far"), "smc", do_sample=True, top_k=1, draft_temperature=50.0)
    check(output, inputs)
    assert output.stats.collapses == sum(e.collapsed for one in output.trace.populations for e in one.rounds)
    assert output.stats.rejected > 0


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


def test_a_scheme_that_decides_by_the_segment_records_runs_and_spans():
    """What is taken by hand: tokens of one kind, and the stretch that was decided on."""
    recorder = Recorder(2)
    recorder.tokens(1, 0, [5, 6, 7], "accepted")
    recorder.span(1, 0, 3, "by the draft", True, p_hat=0.8, rule="ratio")
    recorder.tokens(1, 3, [8, 9], "rejected")
    recorder.span(1, 3, 5, "rejected", False, p_hat=0.1)
    recorder.tokens(1, 3, [4, 3], "plain")
    trace = recorder.finish("lossless", {}, [[1], [2]], [0, 4])
    row = trace.rows[1]
    assert row.tokens == [5, 6, 7, 4]
    assert row.counts()["cut"] == 1
    assert [(span.start, span.stop, span.stands, span.next_event) for span in row.spans] == [
        (0, 3, True, 3),
        (3, 5, False, 5),
    ]
    assert trace.to_dict()["rows"][1]["spans"][0]["numbers"] == {"p_hat": 0.8, "rule": "ratio"}
    assert trace.rows[0].events == []
