"""`residual="exact"` of `semantic`: the committed law is the target's, and a call keeps what `generate` promises."""

import time
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_semspec import LosslessConfig, SemanticConfig, SemSpecConfig
from hf_semspec.schemes.semantic import residual as segment_residual
from tests.helpers import (
    CACHE,
    WEAK_DRAFTS,
    Recorder,
    cache_of,
    caught,
    check_identities,
    new_tokens,
    plain_rows,
    refuses,
)
from tests.models import PAD, draft_of, prompts, row_of, tiny, tokenizer
from tests.schemes.semantic.shared import CHARACTERS, NO_TEXT, Twice, a_probe, call, passed, three
from tests.statistics import deviations

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]

EXACT = {"scorer": "sequence", "residual": "exact", "do_sample": True, "top_k": 0}
SHORT = {**NO_TEXT, "max_segment_tokens": 4, "revise_chunk": 2}


def law_of(model: Any, prompt: list[int], length: int, eos: int, vocab: int) -> torch.Tensor:
    """Of the next `length` tokens, padded behind EOS, over all texts in the order of their ids."""
    law = torch.zeros([vocab] * length, dtype=torch.float64)

    def follow(new: list[int], weight: float) -> None:
        if len(new) == length or (new and new[-1] == eos):
            law[tuple(new + [PAD] * (length - len(new)))] += weight
            return
        for token, share in enumerate(passed(model, prompt + new)[0][-1].double().exp().tolist()):
            follow([*new, token], weight * share)

    follow([], 1.0)
    return law.flatten()


@pytest.mark.parametrize(("bonus", "floor"), [(True, 0.7), (False, 0.0)])
def test_the_law_of_several_segments_is_the_targets(bonus: bool, floor: float) -> None:
    """Segments of two tokens or one, which EOS or the last place may cut, scored by their own probabilities."""
    vocab, eos, length, n = 5, 3, 3, 800
    target = tiny("llama", 4, initializer_range=0.2, vocab=vocab, eos=eos)
    draft = draft_of(target, "far", seed=3)
    prompt = prompts((5,), seed=4, vocab=vocab)
    inputs = {name: value.expand(n, -1) for name, value in prompt.items()}
    fields = {**NO_TEXT, **EXACT, "max_segment_tokens": 2, "bonus": bonus, "accept_floor": floor}
    fields |= {"first_segment": "draft", "max_new_tokens": length, "eos_token_id": eos}
    ids = prompt["input_ids"][0].tolist()
    law, other = (law_of(model, ids, length, eos, vocab) for model in (target, draft))
    assert float(law.sum()) == pytest.approx(1)
    places = torch.tensor([vocab**t for t in reversed(range(length))])
    drawn = {}
    for residual in ("exact", "plain"):
        torch.manual_seed(0)
        outputs = [call(target, draft, inputs, **{**fields, "residual": residual}) for _ in range(2)]
        drawn[residual] = torch.cat([(new_tokens(output, inputs) * places).sum(dim=1) for output in outputs])
        assert (outputs[0].stats.redrawn_segments > 0) == (residual == "exact")
        check_identities(outputs[0].stats)
    assert deviations(drawn["exact"], law) == []
    assert deviations(drawn["plain"], law) != [] != deviations(drawn["exact"], other)


def test_what_ends_the_reasoning_has_the_targets_law_too() -> None:
    vocab, n = 16, 1200
    target = tiny("llama", 4, initializer_range=0.2, vocab=vocab)
    draft = draft_of(target, "far", seed=3)
    prompt = prompts((5,), seed=4, vocab=vocab)
    inputs = {name: value.expand(n, -1) for name, value in prompt.items()}
    p, q = (passed(model, prompt["input_ids"][0].tolist())[0][-1].double().exp() for model in (target, draft))
    often = int(torch.minimum(p, q).argmax())
    fields = {**EXACT, "segment_stop": None, "think_end": CHARACTERS[often], "max_segment_tokens": 1}
    torch.manual_seed(0)
    output = call(target, draft, inputs, max_new_tokens=2, first_segment="draft", bonus=False, **fields)
    first = new_tokens(output, inputs)[:, 0]
    assert deviations(first, p) == []
    ended = [row for row in range(n) if first[row] == often]
    assert 0 < len(ended) < n
    # Its last piece ends the reasoning, and nothing is drafted behind it.
    assert all([piece.source for piece in output.segments[row]] == ["target", "target"] for row in ended)


def test_one_model_and_one_probe_redraw_nothing(tmp_path: Any) -> None:
    target, _, inputs = three()
    probe = a_probe(tmp_path / "probe")
    fields = {**SHORT, **EXACT, "scorer": "likelihood", "max_new_tokens": 12, "first_segment": "draft"}
    output = call(target, target, inputs, **fields)
    assert output.stats.segment_acceptance_rate == 1 and output.stats.redrawn_segments == 0
    torch.manual_seed(0)
    with caught():  # probes that know nothing may have the target write until it is enough
        other = call(target, draft_of(target, "far", seed=3), inputs, **{**fields, "scorer": "probe", "probe": probe})
    assert other.stats.redrawn_segments > 0
    check_identities(other.stats, [12] * 3)


def test_scores_of_the_targets_choice_count_both_ways(tmp_path: Any, monkeypatch: Any) -> None:
    """Of a segment that the target wrote, P̂ and Q̂ are what whole forwards over it give either model."""
    seen: list[tuple[Any, ...]] = []
    scored = segment_residual.Residual._write

    def spied(self: Any, rows: Any, *others: Any) -> Any:
        found = scored(self, rows, *others)
        texts, own = self.call.canvas.texts(rows), map(list, found[0])
        seen.extend(zip(rows, texts, own, found[1].log_prob, found[2].log_prob, strict=True))
        return found

    monkeypatch.setattr(segment_residual.Residual, "_write", spied)
    target, draft, inputs = three(noise=0.5)
    torch.manual_seed(0)
    call(target, draft, inputs, max_new_tokens=16, **SHORT, **EXACT)
    assert len({row for row, *_ in seen}) > 1 and len(seen) > 6
    for _, text, ids, log_p, log_q in seen:
        for model, got in ((target, log_p), (draft, log_q)):
            laws = passed(model, text + ids)[0][len(text) - 1 :]
            want = sum(float(laws[t, token]) for t, token in enumerate(ids))
            assert float(got) == pytest.approx(want, abs=1e-6)


def test_a_call_keeps_its_promises() -> None:
    """Scores of a whole pass, EOS and criteria once, streaming of what is committed, seeds, identities."""
    target, draft, inputs = three(noise=0.1)
    fields = {**SHORT, **EXACT, "max_segment_tokens": 2, "max_new_tokens": 20, "temperature": 0.7}
    outputs = []
    for _ in range(2):
        torch.manual_seed(4)
        outputs.append(call(target, draft, inputs, output_logits=True, output_scores=True, **fields))
    output = outputs[0]
    assert torch.equal(output.sequences, outputs[1].sequences)
    assert output.stats.redrawn_segments > 0 and output.stats.accepted_segments > 0
    check_identities(output.stats, [20] * 3)
    for row in range(3):
        prompt, new = row_of(inputs, row)["input_ids"][0].tolist(), new_tokens(output, inputs)[row].tolist()
        laws = passed(target, prompt + new)[0][len(prompt) - 1 : -1]
        got = torch.stack([step[row] for step in output.logits]).log_softmax(dim=-1)
        assert torch.allclose(got, laws.to(got), atol=1e-4)
        assert torch.equal(
            torch.stack([step[row] for step in output.scores]),
            torch.stack([step[row] / 0.7 for step in output.logits]),
        )
        assert sum(piece.end - piece.start for piece in output.segments[row]) == 20
    token = int(new_tokens(output, inputs)[1, 9])
    for end in ({"eos_token_id": [token]}, {"eos_token_id": [96]}):
        torch.manual_seed(4)
        config = SemSpecConfig("semantic", return_dict_in_generate=True, **fields, **end)
        criterion = StoppingCriteriaList([Twice(token)])
        stopped = target.generate(
            **inputs, assistant_model=draft, generation_config=config, stopping_criteria=criterion
        )
        rows = new_tokens(stopped, inputs).tolist()
        lengths = [next((t + 1 for t, x in enumerate(row) if x in (token, *end["eos_token_id"])), 20) for row in rows]
        check_identities(stopped.stats, lengths)
    streamer = Recorder()
    one = row_of(inputs, 1)
    config = SemSpecConfig("semantic", **fields)
    sequences = target.generate(**one, assistant_model=draft, generation_config=config, streamer=streamer)
    assert streamer.ids() == sequences[0].tolist() and streamer.ends == 1


def test_a_score_that_keeps_nothing_is_said_and_ends(monkeypatch: Any) -> None:
    monkeypatch.setitem(segment_residual.MOST_DRAWS, "sequence", 3)
    monkeypatch.setattr(segment_residual, "residual_keep_probability", lambda p, q, stands: torch.zeros_like(p))
    target, draft, inputs = three()
    with caught() as messages:
        output = call(target, draft, inputs, max_new_tokens=8, accept_floor=1e9, **SHORT, **EXACT)
    assert len([message for message in messages if "none of 3 segments" in message]) == 1
    assert output.stats.redrawn_segments == 2 * output.stats.segments > 0
    check_identities(output.stats, [8] * 3)


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_a_call_goes_on_wherever_it_began_and_stops_by_text(shape: str) -> None:
    """A stop in the text, sequences of one prompt, a trace, and the returned cache, from which a call goes on."""
    target, draft, inputs = three(shape, noise=0.1)
    one = row_of(inputs, 1)
    fields = {**EXACT, "segment_stop": CHARACTERS[20], "think_end": None, "max_segment_tokens": 3, "temperature": 0.7}
    torch.manual_seed(1)
    output = call(target, draft, one, max_new_tokens=12, num_return_sequences=2, trace=True, **fields)
    assert output.stats.redrawn_segments > 0
    check_identities(output.stats, [12, 12])
    for row, events in enumerate(output.trace.rows):
        assert events.counts()["residual"] == output.stats.rows[row].residual
    first = call(target, draft, one, max_new_tokens=8, **fields)
    asked = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    found = []
    for cache in ({CACHE: cache_of(first)}, {}):
        torch.manual_seed(2)
        found.append(call(target, draft, {**asked, **cache}, max_new_tokens=8, **fields).sequences)
    assert torch.equal(*found)


class Together(LogitsProcessor):
    """Behind an id from 10 on, only such an id at every second place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = (input_ids[:, -1:] >= 10) & bool(input_ids.shape[1] % 2)
        return scores.masked_fill(rows & (torch.arange(scores.shape[1]) < 10), -torch.inf)


def test_what_the_draft_cannot_write_is_kept() -> None:
    """Where a text of the target's leaves the draft no id at all, Q̂ is 0, and that is no error."""
    target, draft = tiny("llama", 1, vocab=16, initializer_range=0.2), tiny("llama", 2, vocab=10)
    inputs = {name: value.expand(40, -1) for name, value in prompts((4,), seed=1, vocab=10).items()}
    fields = {**SHORT, **EXACT, "max_segment_tokens": 2, "bonus": False}
    config = SemSpecConfig("semantic", return_dict_in_generate=True, max_new_tokens=8, **fields)
    torch.manual_seed(0)
    together = LogitsProcessorList([Together()])
    with caught():
        output = target.generate(**inputs, assistant_model=draft, generation_config=config, logits_processor=together)
    new = new_tokens(output, inputs)
    assert ((new[:, ::2] >= 10) <= (new[:, 1::2] >= 10)).all()
    fell = [
        (new[row, piece.start : piece.end])
        for row in range(40)
        for piece in output.segments[row]
        if piece.rule == "rejected"
    ]
    assert any((ids[:-1] >= 10).any() for ids in fell), "the draft has no law inside some of them"


def test_a_near_draft_is_drawn_for_as_often_as_it_is_drafted() -> None:
    """One draw on average, however seldom one is kept: most of what the target writes is what stands anyway."""
    target = tiny("llama", 4, initializer_range=0.2, vocab=16)
    draft, n = draft_of(target, "near", noise=0.01), 400
    inputs = {name: value.expand(n, -1) for name, value in prompts((5,), seed=4, vocab=16).items()}
    fields = {**NO_TEXT, **EXACT, "max_segment_tokens": 1, "bonus": False, "first_segment": "draft"}
    torch.manual_seed(0)
    stats = call(target, draft, inputs, max_new_tokens=4, **fields).stats
    fell = stats.segments - stats.accepted_segments
    assert stats.segment_acceptance_rate > 0.9 and fell > 20
    assert fell + stats.redrawn_segments == pytest.approx(stats.segments, rel=0.5)


def test_a_floor_out_of_reach_draws_once() -> None:
    target, draft, inputs = three()
    output = call(target, draft, inputs, max_new_tokens=8, accept_floor=float("inf"), **SHORT, **EXACT)
    assert output.stats.redrawn_segments == 0 < output.stats.segments
    assert output.stats.accepted_segments == 0


def test_what_it_cannot_be_exact_with_is_refused() -> None:
    for fields, match in (
        ({"scorer": "random"}, "scorer='random'"),
        ({"scorer": "none"}, "scorer='none'"),
        ({"scorer": "likelihood", "top_k_accept": 2}, "top_k_accept=2"),
        ({"scorer": "likelihood", "revise_with": LosslessConfig()}, "revise_with=LosslessConfig"),
    ):
        with pytest.raises(ValueError, match=match):
            SemanticConfig(residual="exact", **fields)
    with pytest.raises(ValueError, match="`residual` must be one of"):
        SemanticConfig(residual="none")
    target, draft, inputs = three()
    config = SemSpecConfig("semantic", scorer="sequence", residual="exact", do_sample=False, max_new_tokens=4)
    refuses(target, draft, inputs, "do_sample=True", generation_config=config, tokenizer=tokenizer())
    assert plain_rows(target, inputs, max_new_tokens=4).shape == (3, 4)


def test_max_time_ends_the_draws_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no segment is ever kept, the time is over long before the draws are."""
    monkeypatch.setattr(segment_residual, "residual_keep_probability", lambda *_: torch.zeros(3))
    monkeypatch.setitem(segment_residual.MOST_DRAWS, "sequence", 10**6)
    target, draft, inputs = three()
    fields = {**EXACT, **SHORT, "accept_floor": 1e9, "first_segment": "draft", "max_new_tokens": 30}
    began = time.perf_counter()
    with caught() as messages:
        output = call(target, draft, inputs, **fields, max_time=0.4)
    assert time.perf_counter() - began < 4
    assert messages == []
    assert output.stats.redrawn_segments > 0
    assert 0 < new_tokens(output, inputs).shape[1] < 30
