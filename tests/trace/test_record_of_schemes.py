"""What the record of a scheme holds beside tokens: verdicts, segments, particles."""

import math

import pytest
import torch

from hf_semspec.engine.recorder import Recorder
from tests.helpers import WEAK_DRAFTS
from tests.models import draft_of
from tests.trace.shared import by_position, check, run

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


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
