"""`semantic` against a slow transcription of its algorithm, its limits, and the law of what it commits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemanticConfig
from hf_semspec.schemes.semantic import reading as segment_turns
from hf_semspec.schemes.semantic.probe import SemanticProbe
from tests.helpers import WEAK_DRAFTS, caught, check_identities, new_tokens, plain_rows
from tests.models import PAD, VOCAB, draft_of, prompts, row_of, tiny
from tests.schemes.semantic.laws import committed_law
from tests.schemes.semantic.shared import ALWAYS, CHARACTERS, NEVER, NO_TEXT, a_probe, call, passed
from tests.statistics import deviations

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]


def slow_ratio(
    target: PreTrainedModel, draft: PreTrainedModel, text: list[int], drafted: list[int], config: SemanticConfig
) -> float:
    """P̂/Q̂ of a drafted segment, by whole forwards."""
    places = range(len(text) - 1, len(text) + len(drafted) - 1)
    sides = []
    for model in (target, draft):
        log_law, hidden = passed(model, text + drafted)
        own = torch.stack([log_law[at, token] for at, token in zip(places, drafted, strict=True)]).double()
        sides.append((own, hidden[list(places)].mean(dim=0, keepdim=True)))
    (log_p, f_p), (log_q, f_q) = sides
    if config.scorer == "probe":
        probe = SemanticProbe.from_pretrained(str(config.probe))
        return float(probe.target(f_p) / probe.draft(f_q))
    if config.scorer == "sequence":
        return math.exp(float(log_p.sum() - log_q.sum()))
    return math.exp(float(log_p.mean() - log_q.mean()))


def slow_semantic(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: list[int],
    room: int,
    config: SemanticConfig,
    eos: list[int],
) -> tuple[list[int], list[tuple[int, int, str, str]]]:
    """The algorithm for one row, greedily and by whole forwards: new tokens, and (start, end, source, rule) of each
    segment."""
    new: list[int] = []
    found: list[tuple[int, int, str, str]] = []
    head, phase, begun, rule = "", config.first_segment, 0, "first"

    def best(model: PreTrainedModel, ids: list[int]) -> int:
        return int(passed(model, prompt + ids)[0][-1].argmax())

    def over(ids: list[int]) -> bool:
        return len(ids) == room or bool(ids and ids[-1] in eos)

    def holds(mark: str | None, ids: list[int]) -> bool:
        text = head + "".join(CHARACTERS[token] for token in ids)
        return mark is not None and mark in text[max(len(head) - len(mark) + 1, 0) :]

    while not over(new):
        if phase == "draft":
            drafted: list[int] = []
            while not (holds(config.segment_stop, drafted) or holds(config.think_end, drafted)) and not over(
                new + drafted
            ):
                drafted.append(best(draft, new + drafted))
                if len(drafted) == config.max_segment_tokens:
                    break
            if holds(config.think_end, drafted):
                phase, begun, rule = "finish", len(new), "finish"
                continue
            laws = passed(target, prompt + new + drafted)[0][len(prompt + new) - 1 :]
            ranks = [int((law > law[token]).sum()) for law, token in zip(laws, drafted, strict=False)]
            ratio = 0.0 if config.scorer == "none" else slow_ratio(target, draft, prompt + new, drafted, config)
            by_score = config.scorer != "none" and ratio >= max(config.accept_floor, config.accept_ratio)
            by_tokens = config.top_k_accept > 0 and max(ranks) < config.top_k_accept
            if by_score or by_tokens:
                found.append((len(new), len(new) + len(drafted), "draft", "score" if by_score else "top_k"))
                new += drafted
                head = ""
                if config.bonus and not over(new):
                    new.append(best(target, new))
                    found.append((len(new) - 1, len(new), "target", "bonus"))
                    head = CHARACTERS[new[-1]]
                    if config.think_end is not None and config.think_end in head:
                        phase, begun, rule = "finish", len(new), "finish"
            else:
                phase, begun, rule = "target", len(new), "rejected"
            continue
        new.append(best(target, new))
        own = new[begun:]
        ended = phase == "target" and (holds(config.segment_stop, own) or len(own) == config.max_segment_tokens)
        thought = phase == "target" and holds(config.think_end, own)
        if thought or ended or over(new):
            found.append((begun, len(new), "target", rule))
            head, begun, phase, rule = "", len(new), "finish" if thought else "draft", "finish"
    return new, found


@pytest.mark.parametrize(
    ("shape", "scorer", "first"),
    [
        ("llama", "likelihood", "target"),
        ("llama", "likelihood", "draft"),
        ("llama", "none", "target"),
        ("llama", "none", "draft"),
        ("gemma3", "sequence", "target"),
        ("gemma3", "sequence", "draft"),
        ("gemma3", "probe", "target"),
        ("gemma3", "probe", "draft"),
    ],
)
def test_every_row_follows_the_algorithm(shape: str, scorer: str, first: str, tmp_path: Path) -> None:
    """Rows of a padded batch, each in its own phase, with a stop of two tokens, and an end of the reasoning in one."""
    target = tiny(shape, 1, attention="sdpa")
    noise = 0.15 if shape == "gemma3" else 0.08
    draft, inputs = draft_of(target, "near", noise=noise), prompts((4, 9, 6), seed=1)
    rows = plain_rows(target, inputs, max_new_tokens=26).tolist()
    fields: dict[str, Any] = {
        "scorer": scorer,
        "first_segment": first,
        "max_segment_tokens": 5,
        "accept_ratio": 0.42 if scorer == "probe" else 0.5,
        "segment_stop": "".join(CHARACTERS[token] for token in rows[0][7:9]),
        "think_end": CHARACTERS[rows[1][20]],
        "bonus": scorer != "sequence",
        "top_k_accept": 5 if scorer == "none" else 0,
        "revise_chunk": 2,
        "probe": a_probe(tmp_path / "probe") if scorer == "probe" else None,
    }
    with caught():
        output = call(target, draft, inputs, max_new_tokens=26, eos_token_id=[rows[2][15]], **fields)
    config, sources = SemanticConfig(**fields), set()
    lengths = []
    for row in range(3):
        prompt = row_of(inputs, row)["input_ids"][0].tolist()
        text, segments = slow_semantic(target, draft, prompt, 26, config, [rows[2][15]])
        new = new_tokens(output, inputs)[row]
        assert new[: len(text)].tolist() == text, row
        assert new[len(text) :].eq(PAD).all()
        records = output.segments[row]
        assert [(record.start, record.end, record.source, record.rule) for record in records] == segments
        assert [a.end for a in records[:-1]] == [b.start for b in records[1:]], "they cover the text"
        sources |= {(record.source, record.rule) for record in records}
        lengths.append(len(text))
    check_identities(output.stats, lengths)
    assert {source for source, _ in sources} == {"target", "draft"}, "some segments stand, some do not"
    assert ("target", "rejected") in sources
    assert 0 < output.stats.accepted_segments < output.stats.segments


def pair(shape: str, kind: str, **fields: Any) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, torch.Tensor]]:
    target = tiny(shape, 2, attention="sdpa")
    return target, draft_of(target, kind, **fields), prompts((4, 9, 6), seed=2)


@pytest.mark.parametrize("first", ["target", "draft"])
@pytest.mark.parametrize("scorer", ["likelihood", "random", "none"])
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_floor_out_of_reach_is_plain_decoding(shape: str, scorer: str, first: str) -> None:
    target, draft, inputs = pair(shape, "near")
    expected = plain_rows(target, inputs, max_new_tokens=20)
    fields = {**NO_TEXT, "max_segment_tokens": 4, "max_new_tokens": 20, "first_segment": first, "scorer": scorer}
    output = call(target, draft, inputs, **fields, **NEVER)
    assert torch.equal(new_tokens(output, inputs), expected)
    assert output.stats.accepted_segments == 0 < output.stats.segments
    if scorer == "random":
        assert not torch.equal(new_tokens(call(target, draft, inputs, **fields), inputs), expected), "the control"


@pytest.mark.parametrize("shape", ["llama", "gemma3", "gpt2"])
def test_accepting_all_without_a_bonus_is_the_drafts_own_decoding(shape: str) -> None:
    target, draft, inputs = pair(shape, "far")
    for eos in (None, [int(plain_rows(draft, inputs, max_new_tokens=20)[0, 9])]):
        expected = plain_rows(draft, inputs, max_new_tokens=20, eos_token_id=eos)
        fields = {**NO_TEXT, **ALWAYS, "max_segment_tokens": 6, "max_new_tokens": 20, "eos_token_id": eos}
        output = call(target, draft, inputs, first_segment="draft", bonus=False, **fields)
        assert torch.equal(new_tokens(output, inputs), expected)
        assert output.stats.tokens_by_target == 0
        lengths = [next((t + 1 for t, x in enumerate(row) if x in (eos or [])), 20) for row in expected.tolist()]
        check_identities(output.stats, lengths)
        with_bonus = call(target, draft, inputs, first_segment="draft", **fields)
        assert not torch.equal(new_tokens(with_bonus, inputs)[:, :7], expected[:, :7]), "the control"


@pytest.mark.parametrize("kind", ["near", "far"])
def test_the_best_token_alone_is_plain_decoding(kind: str) -> None:
    target, draft, inputs = pair("llama", kind, noise=0.02)
    expected = plain_rows(target, inputs, max_new_tokens=24)
    fields = {**NO_TEXT, "scorer": "none", "max_segment_tokens": 2, "max_new_tokens": 24}
    output = call(target, draft, inputs, top_k_accept=1, **NEVER, **fields)
    assert torch.equal(new_tokens(output, inputs), expected)
    assert (output.stats.accepted_segments > 0) == (kind == "near")
    if kind == "far":
        loose = call(target, draft, inputs, top_k_accept=VOCAB // 2, **NEVER, **fields)
        assert not torch.equal(new_tokens(loose, inputs), expected), "the control"


@pytest.mark.parametrize("sample", [False, True])
def test_a_token_rule_as_wide_as_the_vocabulary_accepts_all(sample: bool) -> None:
    target, draft, inputs = pair("llama", "far")
    fields = {**NO_TEXT, "scorer": "none", "max_segment_tokens": 4, "max_new_tokens": 20, "do_sample": sample}
    output = call(target, draft, inputs, top_k_accept=VOCAB, top_k=0, **fields)
    assert output.stats.accepted_segments == output.stats.segments > 0
    assert all(record.rule == "top_k" for row in output.segments for record in row if record.source == "draft")


def test_a_pair_of_one_model_and_one_probe_rejects_nothing(tmp_path: Path) -> None:
    target, _, inputs = pair("llama", "same")
    probe = SemanticProbe.from_pretrained(a_probe(tmp_path / "probe"))
    probe.networks["draft"] = probe.networks["target"]
    probe.save_pretrained(tmp_path / "one")
    fields = {**NO_TEXT, "max_segment_tokens": 4, "max_new_tokens": 24, "do_sample": True, "top_k": 0}
    for sample in (True, False):
        output = call(target, target, inputs, probe=str(tmp_path / "one"), **{**fields, "do_sample": sample})
        assert output.stats.accepted_segments == output.stats.segments > 0
    control = call(target, target, inputs, probe=a_probe(tmp_path / "probe"), **fields)
    assert control.stats.accepted_segments < control.stats.segments


@pytest.mark.parametrize("revise_with", [None, "lossless"])
def test_salvage_changes_no_token_and_saves_forwards(revise_with: str | None) -> None:
    target, draft, inputs = pair("llama", "near", noise=0.05)
    fields = {**NO_TEXT, **NEVER, "max_segment_tokens": 6, "max_new_tokens": 30, "revise_with": revise_with}
    one = row_of(inputs, 0)
    kept, dropped = (call(target, draft, one, scorer="none", salvage=salvage, **fields) for salvage in (True, False))
    assert torch.equal(kept.sequences, dropped.sequences)
    assert kept.stats.target_forwards < dropped.stats.target_forwards
    assert kept.stats.accepted > 0
    assert dropped.stats.accepted == 0 or revise_with


def test_pooled_features_are_those_of_a_fresh_pass_and_know_nothing_of_the_last_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of both models, in a ragged batch, over cached text, read in chunks or at once."""
    target = tiny("gemma3", 2, attention="sdpa")
    draft, inputs = draft_of(target, "near", noise=0.1), prompts((4, 9, 6), seed=2)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk in (128, 2):
        monkeypatch.setattr(segment_turns, "CHECK_TOKENS", chunk)
        seen.clear()
        features: dict[str, list[torch.Tensor]] = {"target": [], "draft": []}
        for role, values in features.items():
            monkeypatch.setattr(
                SemanticProbe, role, lambda self, f, values=values: (values.append(f.clone()), torch.ones(len(f)))[1]
            )
        output = call(
            target,
            draft,
            inputs,
            probe=a_probe(tmp_path / "probe"),
            **{**NO_TEXT, "max_segment_tokens": 5, "max_new_tokens": 24, "first_segment": "draft"},
        )
        rounds = len(features["target"])
        assert rounds == 4 == len(features["draft"])
        for row in range(3):
            prompt = row_of(inputs, row)["input_ids"][0].tolist()
            text = new_tokens(output, inputs)[row].tolist()
            drafted = [record for record in output.segments[row] if record.source == "draft"]
            for index, record in enumerate(drafted):
                places = list(range(len(prompt) + record.start - 1, len(prompt) + record.end - 1))
                for role, model in (("target", target), ("draft", draft)):
                    whole = prompt + text[: record.end]
                    for last in (whole[-1], 5):
                        hidden = passed(model, [*whole[:-1], last])[1]
                        assert torch.allclose(features[role][index][row], hidden[places].mean(dim=0), atol=1e-9)
                    wrong = hidden[[at + 1 for at in places]].mean(dim=0)
                    assert not torch.allclose(features[role][index][row], wrong, atol=1e-3)


def test_the_law_of_one_committed_token_and_a_wrong_one() -> None:
    """Segments of one token, scored by their own probabilities: the token's law is the page's, neither p nor q."""
    target = tiny("llama", 4, initializer_range=0.2, vocab=16)
    draft, n = draft_of(target, "far", seed=3), 700
    prompt = prompts((5,), seed=4, vocab=16)
    inputs = {name: value.expand(n, -1) for name, value in prompt.items()}
    fields = {**NO_TEXT, "scorer": "sequence", "max_segment_tokens": 1, "bonus": False, "first_segment": "draft"}
    torch.manual_seed(0)
    outputs = [call(target, draft, inputs, max_new_tokens=1, do_sample=True, top_k=0, **fields) for _ in range(2)]
    drawn = torch.cat([new_tokens(output, inputs)[:, 0] for output in outputs])
    p, q = (passed(model, prompt["input_ids"][0].tolist())[0][-1].double().exp() for model in (target, draft))
    law = committed_law(p, q, (p / q).clamp(max=1))
    assert deviations(drawn, law) == []
    assert deviations(drawn, p) != [] != deviations(drawn, q)
    stood = sum(output.stats.accepted_segments for output in outputs)
    assert stood / (2 * n) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.04)
