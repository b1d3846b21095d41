"""The probes of `semantic`: the file, the fit, the labels, and the trainer on a tiny pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hf_semspec import SemanticConfig, SemSpecConfig, train_semantic_probe
from hf_semspec.calibration.continuations import Continuer
from hf_semspec.calibration.probe_fitting import Samples, fit, measure, reliability
from hf_semspec.schemes.semantic.probe import DESCRIPTION, WEIGHTS, ProbeNetwork, SemanticProbe
from tests.helpers import WEAK_DRAFTS, check_identities
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.schemes.semantic.shared import CHARACTERS, a_probe, passed

pytestmark = WEAK_DRAFTS

STOP = CHARACTERS[20]
SEGMENTS = SemanticConfig(segment_stop=STOP, max_segment_tokens=4, think_end=None)


def test_a_saved_probe_is_the_same_and_loading_runs_no_code(tmp_path: Path) -> None:
    probe = SemanticProbe.from_pretrained(a_probe(tmp_path / "probe", (8, 6)))
    assert sorted(path.name for path in (tmp_path / "probe").iterdir()) == [DESCRIPTION, WEIGHTS]
    probe.networks["target"].standardise(torch.randn(50, 8) * 3 + 1)
    probe.save_pretrained(tmp_path / "again")
    again = SemanticProbe.from_pretrained(str(tmp_path / "again"))
    features = torch.randn(5, 8), torch.randn(5, 6)
    assert torch.equal(again.target(features[0]), probe.target(features[0]))
    assert torch.equal(again.draft(features[1]), probe.draft(features[1]))
    assert again.description == probe.description
    before = SemanticProbe.from_pretrained(str(tmp_path / "probe"))
    assert not torch.equal(again.target(features[0]), before.target(features[0])), "the standardisation is kept"


@pytest.mark.parametrize("fault", ["absent", "json", "key", "format", "shape", "weights"])
def test_a_broken_probe_is_named(fault: str, tmp_path: Path) -> None:
    name = a_probe(tmp_path / "probe")
    description = tmp_path / "probe" / DESCRIPTION
    content = json.loads(description.read_text())
    if fault == "absent":
        name = str(tmp_path)
    elif fault == "json":
        description.write_text("{")
    elif fault == "key":
        description.write_text(json.dumps({"format": 1}))
    elif fault == "format":
        description.write_text(json.dumps({**content, "format": 99}))
    elif fault == "shape":
        description.write_text(json.dumps({**content, "hidden": [9]}))
    else:
        tensors = load_file(tmp_path / "probe" / WEIGHTS)
        save_file({key: value for key, value in tensors.items() if "mean" not in key}, tmp_path / "probe" / WEIGHTS)
    with pytest.raises(ValueError, match=f"probe='{name}'"):
        SemanticProbe.from_pretrained(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("widths", [1]),
        ("widths", {"target": 6}),
        ("widths", {"target": 10**13, "draft": 6}),
        ("hidden", 8),
        ("hidden", ["x"]),
        ("hidden", [10**13]),
        ("hidden", [-1]),
        ("sampling", None),
        ("segment_stop", 5),
        ("models", 3),
    ],
)
def test_a_description_of_other_kinds_is_named_before_anything_is_made(key: str, value: Any, tmp_path: Path) -> None:
    name = a_probe(tmp_path / "probe")
    description = tmp_path / "probe" / DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), key: value}))
    with pytest.raises(ValueError, match=f"probe='{name}'.*probe.json"):
        SemanticProbe.from_pretrained(name)


@pytest.mark.parametrize("file", [WEIGHTS, DESCRIPTION])
def test_a_truncated_file_is_named(file: str, tmp_path: Path) -> None:
    name = a_probe(tmp_path / "probe")
    (tmp_path / "probe" / file).write_bytes(b"[" * 100_000 if file == DESCRIPTION else b"abc")
    with pytest.raises(ValueError, match=f"probe='{name}' could not be read"):
        SemanticProbe.from_pretrained(name)


def test_a_folder_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(ValueError, match=r"probe='/no/such' could not be read \(there is no such folder\)"):
        SemanticProbe.from_pretrained("/no/such")


def made_up(seed: int, wrong: bool = False) -> Samples:
    """Features whose first entry says the label; with `wrong`, the target's labels on draft text are unrelated."""
    generator = torch.Generator().manual_seed(seed)
    target, draft, crossed = (torch.randn(400, 6, generator=generator) for _ in range(3))
    labels = [torch.sigmoid(2 * x[:, 0]) for x in (target, draft, crossed)]
    if wrong:
        labels[2] = 1 - labels[2]
    return Samples(target, draft, crossed, *labels)


def test_the_fit_learns_what_can_be_learnt_and_the_metrics_say_so() -> None:
    metrics = measure(fit(made_up(0), "cross", (16,), 150, 0), made_up(1), 0.9999)
    assert all(value > 0.7 for value in metrics["r2"].values())
    assert metrics["predicted_acceptance"] == pytest.approx(metrics["labelled_acceptance"], abs=0.05)
    assert sum(point["segments"] for point in metrics["reliability"]["draft"]) == 400
    untrained = measure(fit(made_up(0), "cross", (16,), 0, 0), made_up(1), 0.9999)
    assert untrained["r2"]["target"] < 0.3, "the control"


def test_cross_labels_reach_the_targets_probe_and_own_ones_do_not() -> None:
    """On draft text everything is the other way round: a probe that has seen it is torn between two lessons."""
    train, test = made_up(0, wrong=True), made_up(1, wrong=True)
    cross, own = (measure(fit(train, labels, (16,), 150, 0), test, 0.9999)["r2"] for labels in ("cross", "own"))
    assert own["target"] > 0.7 > cross["target"]
    assert own["target on draft text"] < cross["target on draft text"] - 0.5
    assert own["draft"] > 0.7 < cross["draft"]


def test_reliability_bins_hold_every_segment_once() -> None:
    guesses, labels = torch.tensor([0.05, 0.06, 0.55, 1.0]), torch.tensor([0.0, 0.2, 0.5, 1.0])
    curve = reliability(guesses, labels)
    assert [point["segments"] for point in curve] == [2, 1, 1]
    assert [point["label"] for point in curve] == pytest.approx([0.1, 0.5, 1.0])


def test_features_of_continuations_are_those_of_a_fresh_pass() -> None:
    """Of ragged prefixes, each read once for all its continuations."""
    target = tiny("gemma3", 1, attention="sdpa")
    draft = draft_of(target, "near", noise=0.3)
    sampling = {"temperature": 0.7, "top_k": 0, "top_p": 1.0}
    continuer = Continuer(target, draft, tokenizer(), SEGMENTS, sampling, [1], 0)
    prefixes = [[5, 6, 7], [8, 9, 10, 11, 12]]
    torch.manual_seed(0)
    found = continuer(prefixes, 3)
    assert len(found) == 2
    ids = {text: token for token, text in enumerate(CHARACTERS)}
    for prefix, continued in zip(prefixes, found, strict=True):
        for i in range(3):
            for texts, features, model in (
                (continued.target_texts, continued.target, target),
                (continued.draft_texts, continued.draft, draft),
                (continued.draft_texts, continued.crossed, target),
            ):
                tokens = [ids[character] for character in texts[i]]
                assert 0 < len(tokens) <= 4
                assert STOP not in texts[i][:-1]
                hidden = passed(model, prefix + tokens)[1]
                # A segment that an EOS has ended has one place more, which its text does not show.
                first, size = len(prefix) - 1, len(tokens)
                means = [hidden[first : first + n].mean(dim=0) for n in (size, size + 1)]
                assert any(torch.allclose(features[i], mean, atol=1e-9) for mean in means)
                assert not torch.allclose(features[i], hidden[-len(tokens) :].mean(dim=0), atol=1e-3)


def trained(folder: Path | None = None, **fields: Any) -> SemanticProbe:
    target = tiny("llama", 1, hidden=32, dtype=torch.float32, attention="sdpa")
    draft = draft_of(target, "near", noise=0.3)
    asked = [{"input_ids": prompts((5,), seed=seed)["input_ids"]} for seed in range(3)]
    options = {"num_continuations": 4, "max_prefixes": 2, "max_new_tokens": 10, "epochs": 2, "progress": False}
    return train_semantic_probe(
        target, draft, asked, config=SEGMENTS, tokenizer=tokenizer(), folder=folder, **{**options, **fields}
    )


def test_training_can_be_interrupted_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    whole = trained()
    assert torch.equal(before, torch.get_rng_state())
    calls = []
    original = Continuer.__call__

    def counted(self: Continuer, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Continuer, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "work")
    resumed = trained(tmp_path / "work")
    assert len(calls) == 4, "the first prompt is not continued again"
    features = torch.randn(4, 32)
    assert torch.equal(resumed.target(features), whole.target(features))
    assert resumed.report == whole.report
    other = trained(tmp_path / "work", labels="own")
    assert len(calls) == 4, "labels are another reading of the same continuations"
    assert other.description["labels"] == "own"
    with pytest.raises(ValueError, match="other settings"):
        trained(tmp_path / "work", num_continuations=5)


def test_a_trained_probe_decodes_and_describes_itself(tmp_path: Path) -> None:
    probe = trained(
        equivalence=lambda one, other: one[:1] == other[:1],
        generation_config=GenerationConfig(do_sample=True, temperature=0.7, top_k=0),
    )
    probe.save_pretrained(tmp_path / "probe")
    described = json.loads((tmp_path / "probe" / DESCRIPTION).read_text())
    assert described["sampling"] == {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    assert described["widths"] == {"target": 32, "draft": 32} and described["segment_stop"] == STOP
    assert set(probe.report["r2"]) == {"target", "draft", "target on draft text"}
    assert 0 <= probe.report["predicted_acceptance"] <= 1
    target = tiny("llama", 1, hidden=32, dtype=torch.float32, attention="sdpa")
    config = SemSpecConfig(
        "semantic",
        probe=str(tmp_path / "probe"),
        segment_stop=STOP,
        max_segment_tokens=4,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )
    output = target.generate(
        **prompts((5, 7)),
        assistant_model=draft_of(target, "near", noise=0.3),
        generation_config=config,
        tokenizer=tokenizer(),
    )
    check_identities(output.stats, [12, 12])
    pytest.importorskip("matplotlib")
    probe.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"equivalence": "close"}, "`equivalence`"),
        ({"labels": "both"}, "`labels`"),
        ({"num_continuations": 1}, "`num_continuations`"),
        ({"max_prefixes": 0}, "`max_prefixes`"),
        ({"held_out": 1.0}, "`held_out`"),
        ({"generation_config": GenerationConfig(do_sample=False)}, "decodes greedily"),
    ],
)
def test_bad_values_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        trained(**fields)


def test_one_prompt_is_too_few() -> None:
    target = tiny()
    with pytest.raises(ValueError, match="at least two"):
        train_semantic_probe(target, target, [prompts((5,))], tokenizer=tokenizer())


def test_a_network_standardises_a_constant_feature() -> None:
    network = ProbeNetwork(3, (4,))
    network.standardise(torch.ones(5, 3))
    assert network(torch.ones(2, 3)).isfinite().all()
