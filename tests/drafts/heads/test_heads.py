"""EAGLE-3 heads: three layouts, drafts over true features, the target's law, and errors before any forward."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig, load_draft
from hf_semspec.drafts.heads.generator import HeadGenerator
from hf_semspec.drafts.heads.module import EagleHead
from hf_semspec.engine.draft import Draft
from hf_semspec.engine.hooks import call_for_states, is_hooked
from tests.drafts.heads.shared import LAYERS, LAYOUTS, weights, write
from tests.helpers import WEAK_DRAFTS, assisted, new_tokens, plain, plain_rows, refuses
from tests.models import SHAPES, draft_of, prompts, row_of, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]
NEW = 14


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(layers=4)


def loaded(target: Any, folder: Path, layout: str = "speculators", vocabulary: int = 97) -> EagleHead:
    head: Any = load_draft(write(folder, layout, weights(target, vocabulary)), target=target)
    return head


@pytest.fixture(scope="module")
def learned(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    """A head that knows the target's answers to two prompts by heart."""
    head = loaded(target, tmp_path_factory.mktemp("learned"))
    texts = [plain(target, row_of(prompts((5, 5)), row), max_new_tokens=30) for row in (0, 1)]
    ids = torch.cat(texts)
    states = call_for_states(target, {"input_ids": ids}, LAYERS)[1].detach()
    head.requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(60):
        features, loss = head.features(states[:, :-1]), torch.zeros(())
        for step in range(3):  # its own output stands for the feature one place on
            output = head(ids[:, 1 + step : -1], features[:, : ids.shape[1] - 2 - step])
            loss = loss + torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids[:, 2 + step :].flatten())
            features = output.hidden_states[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


@pytest.fixture
def patterns(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafts with the target's own tokens up to a place that changes from round to round and row to row; before that
    the head's law must be the one that it has over the whole text. Returns the checks made."""
    checked: list[int] = []
    propose = HeadGenerator.propose

    def forced(self: HeadGenerator, canvas: Any, live: Any, counts: list[int]) -> Draft:
        draft = propose(self, canvas, live, counts)
        for place, (row, text) in enumerate(zip(live, canvas.texts(live), strict=True)):
            if not counts[place]:
                continue  # it goes along with the others, not read for its own sake
            ids = torch.tensor([text])
            states = call_for_states(target, {"input_ids": ids}, self.taps)[1]
            logits = self.head(ids[:, 1:], self.head.features(states[:, :-1])).logits[0, -1]
            wanted = torch.full((97,), -torch.inf).index_put((self.head.ids(),), logits.float().log_softmax(-1))
            assert draft.log_q is not None
            torch.testing.assert_close(draft.log_q[place, 0, 0], wanted, atol=1e-5, rtol=1e-5)
            right = plain(target, {"input_ids": ids}, max_new_tokens=counts[place])[0, len(text) :]
            wrong = (len(checked) + row) % (len(right) + 1)
            draft.ids[place, 0, : len(right)] = right
            if wrong < len(right):
                draft.ids[place, 0, wrong] = (right[wrong] + 1) % 97
            checked.append(wrong)
        draft.valid = None if draft.valid is None else torch.ones_like(draft.valid)
        canvas.write(live, 0, draft.ids)
        return draft

    monkeypatch.setattr(HeadGenerator, "propose", forced)
    return checked


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(5,), (3, 9, 6)])
def test_greedy_text_is_the_targets(
    layout: str, lengths: tuple[int, ...], target: PreTrainedModel, tmp_path: Path, patterns: list[int]
) -> None:
    head, inputs = loaded(target, tmp_path, layout, 32), prompts(lengths)
    output = assisted(target, head, inputs, "easd", max_new_tokens=NEW)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=NEW))
    assert set(patterns) == {0, 1, 2, 3}
    assert not is_hooked(target)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "llama"])
def test_other_shapes(shape: str, tmp_path: Path) -> None:
    target = tiny(shape, layers=4)
    head, inputs = loaded(target, tmp_path), prompts((3, 9))
    output = assisted(target, head, inputs, max_new_tokens=NEW)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=NEW))


def test_several_chains(target: PreTrainedModel, learned: EagleHead) -> None:
    inputs = prompts((3, 9, 6))
    output = assisted(target, learned, inputs, "chains", max_new_tokens=NEW)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=NEW))


def test_layouts_draft_the_same(target: PreTrainedModel, tmp_path: Path) -> None:
    features, ids = torch.randn(2, 5, 96, dtype=torch.float64), torch.randint(2, 97, (2, 5))
    outputs = []
    for layout in LAYOUTS:
        head = loaded(target, tmp_path / layout, layout)
        outputs.append(head(ids, head.features(features)).logits)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def accepted(target: Any, head: Any, inputs: Any) -> tuple[torch.Tensor, float]:
    output = assisted(target, head, inputs, max_new_tokens=20, return_dict_in_generate=True)
    return output.sequences, output.stats.acceptance_rate


def test_a_shifted_feature_is_accepted_less(
    target: PreTrainedModel, learned: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prompts((5, 5))
    whole, rate = accepted(target, learned, inputs)
    for row in (0, 1):
        alone, _ = accepted(target, learned, row_of(inputs, row))
        assert torch.equal(alone[0], whole[row])
    assert rate > 0.8
    see = HeadGenerator.see
    monkeypatch.setattr(HeadGenerator, "see", lambda self, states, starts: see(self, states.roll(1, dims=1), starts))
    shifted, lower = accepted(target, learned, inputs)
    assert lower < rate - 0.2
    assert torch.equal(shifted, whole)


def test_the_sampled_law_with_a_smaller_vocabulary(target: PreTrainedModel, tmp_path: Path) -> None:
    head, rows = loaded(target, tmp_path, vocabulary=32), 3000
    inputs = {name: value.expand(rows, -1) for name, value in prompts((4,)).items()}
    config = SemSpecConfig("lossless", num_draft_tokens=1, max_new_tokens=3, do_sample=True, top_k=4, temperature=2.0)
    torch.manual_seed(0)
    drawn = new_tokens(target.generate(**inputs, assistant_model=head, generation_config=config), inputs)
    statistic, cells = 0.0, 0
    first = top(target, inputs["input_ids"][:1])
    for token, p in first.items():
        after = top(target, torch.cat((inputs["input_ids"][:1], torch.tensor([[token]])), dim=1))
        for other, q in after.items():
            expected = rows * p * q
            seen = int(((drawn[:, 0] == token) & (drawn[:, 1] == other)).sum())
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    assert cells == 16
    assert statistic < 37.7  # chi-square of 15 degrees of freedom, 0.1 %


def top(target: Any, ids: torch.Tensor) -> dict[int, float]:
    """The four likeliest next tokens at temperature 2, and their law."""
    best = (target(ids).logits[0, -1] / 2).topk(4)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


def test_what_the_file_leaves_open_is_probed(target: PreTrainedModel, learned: EagleHead, tmp_path: Path) -> None:
    state = {name: value for name, value in learned.state_dict().items() if not name.startswith("rotary")}
    state["t2d"] = torch.ones(97, dtype=torch.bool)
    head: Any = load_draft(write(tmp_path, "specforge", state, residual=None), target=target)
    assert len(head.conventions["probed"]) == 4
    assert head.conventions["layer_ids"] in (LAYERS, [index - 1 for index in LAYERS])
    best = max(head.conventions["probed"], key=head.conventions["probed"].get)
    assert best == f"layer_ids={list(head.taps)}, norm_before_residual={head.config.norm_before_residual}"


def spoiled(folder: Path, how: str, target: Any) -> None:
    state = weights(target)
    if how == "lacks":
        del state["fc.weight"]
    elif how == "shape":
        state["midlayer.self_attn.o_proj.weight"] = state["midlayer.self_attn.o_proj.weight"][:5].clone()
    elif how == "ids":
        state["d2t"] = state["d2t"] + 5
    write(folder, "specforge", state)
    path, config = folder / "model.safetensors", folder / "config.json"
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:200])
    elif how == "no weights":
        path.unlink()
    elif how in ("vocab_size", "layers"):
        entries = json.loads(config.read_text())
        more = {"vocab_size": 99} if how == "vocab_size" else {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
        config.write_text(json.dumps({**entries, "eagle_config": {}, **more}))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("lacks", "lacks fc.weight"),
        ("shape", "o_proj.weight of shape"),
        ("ids", "another target"),
        ("damaged", "damaged"),
        ("no weights", "has no weights"),
        ("vocab_size", "vocab_size 99"),
        ("layers", "the target has 4 layers"),
    ],
)
def test_a_bad_file_is_one_clear_error(
    how: str, match: str, target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(tmp_path, how, target)
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("a forward ran"))
    with pytest.raises(ValueError, match=match):
        load_draft(tmp_path, target=target)


def test_where_a_head_cannot_draft(target: PreTrainedModel, learned: EagleHead, tmp_path: Path) -> None:
    inputs = prompts((4,))
    for scheme in ("smc", "semantic", "parse"):
        refuses(target, learned, inputs, "writes? by itself", generation_config=SemSpecConfig(scheme))
    config = SemSpecConfig("lossless", draft="ngram+model")
    refuses(target, learned, inputs, "drafts alone", generation_config=config)
    other = tiny(seed=1, layers=4)
    refuses(other, learned, inputs, "loaded for another model", generation_config=SemSpecConfig("lossless"))
    with pytest.raises(ValueError, match="target=model"):
        load_draft(write(tmp_path, "safeailab", weights(target)))
    with pytest.raises(ValueError, match="is for EAGLE-3 heads"):
        load_draft(draft_of(target, "near"), target=target, dtype=torch.float32)
    shutil.rmtree(tmp_path)


def test_no_hook_is_left_after_an_error(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.lm_head, "forward", lambda states: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call_for_states(target, {"input_ids": torch.tensor([[5, 6]])}, LAYERS)
    assert not any(module._forward_hooks for module in target.modules())
