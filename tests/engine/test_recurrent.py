"""Models with recurrent layers: their states are put back to what stands of a block."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from examples.benchmarks.recurrent_models import FAMILIES, REFUSED, recurrent
from hf_semspec import SemSpecConfig, load_draft, register_scheme
from hf_semspec.bench.costs import forward_seconds
from hf_semspec.engine.model import CachedModel
from hf_semspec.engine.recurrent import RecurrentCache
from hf_semspec.schemes import Acceptance, Block, TokenLevelConfig, next_law, stop, within
from tests.drafts.heads.shared import weights, write
from tests.helpers import EXACT, WEAK_DRAFTS, Forwards, assisted, cache_of, new_tokens, plain, plain_rows, refuses
from tests.models import draft_of, prompts, tiny
from tests.own_schemes import left_as_found
from tests.statistics import deviations

pytestmark = WEAK_DRAFTS
RAGGED = (3, 8, 6)


# Whose layers are those of another family.
ALIKE = ("qwen3_next", "qwen3_5_moe_text", "lfm3", "lfm2_moe", "lara_mini", "kimi_linear", "bailing_hybrid")


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=pytest.mark.grid) if f in ALIKE else f for f in FAMILIES]
)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return recurrent(request.param)


def accepts(pattern: str, width: int) -> Iterator[list[int]]:
    """How many of `width` drafted tokens stand in each of three rows, round by round."""
    turn = 0
    while True:
        turn += 1
        yield {
            "all": [width] * 3,
            "none": [0] * 3,
            "alternating": [width * (turn % 2)] * 3,
            "a row each": [0, width, turn % (width + 1)],
        }[pattern]


def read_in_blocks(model: PreTrainedModel, text: torch.Tensor, pattern: str, width: int) -> list[float]:
    """The differences of logits at places that stand from those of single steps, when `text` (3, tokens) is drafted
    with wrong tokens behind the accepted ones, rows going on as far as they got."""
    single, reader = (CachedModel(model, 3, text.shape[1]) for _ in range(2))
    total = text.shape[1]
    expected = torch.cat([single.feed(text[:, t : t + 1], [t + 1] * 3, 1) for t in range(total)], dim=1)
    lengths = [5, 2, 4]  # tokens known, the last of which was not fed
    prompt = torch.stack([torch.cat([row[: 4 - n + 1], row[: n - 1]]) for row, n in zip(text, lengths, strict=True)])
    reader.feed(prompt, [n - 1 for n in lengths], 1)
    found = []
    for kept in accepts(pattern, width):
        if max(lengths) + width >= total:
            return found
        block = torch.stack([row[n - 1 : n + width] for row, n in zip(text, lengths, strict=True)])
        for row, stand in enumerate(kept):
            block[row, stand + 1 :] = (block[row, stand + 1 :] + 1) % 97
        logits = reader.feed(block, [n + width for n in lengths], width + 1)
        for row, (n, stand) in enumerate(zip(lengths, kept, strict=True)):
            found.append(float((logits[row, : stand + 1] - expected[row, n - 1 : n + stand]).abs().max()))
        lengths = [n + stand + 1 for n, stand in zip(lengths, kept, strict=True)]
        reader.settle([n - 1 for n in lengths])
        assert isinstance(reader.cache, RecurrentCache)
        assert len(reader.cache.readings) <= 2  # nothing grows with the text
    raise AssertionError


@pytest.mark.parametrize("pattern", ["all", "none", "alternating", "a row each"])
def test_what_stands_of_a_block_is_what_single_steps_read(target: PreTrainedModel, pattern: str) -> None:
    text = torch.randint(2, 97, (3, 36), generator=torch.Generator().manual_seed(4))
    assert max(read_in_blocks(target, text, pattern, width=4)) < 1e-3


@pytest.mark.grid
@pytest.mark.parametrize("width", range(1, 7))
@pytest.mark.parametrize("pattern", ["all", "none", "alternating", "a row each"])
def test_what_stands_of_300_tokens_is_what_single_steps_read(
    target: PreTrainedModel, pattern: str, width: int
) -> None:
    text = torch.randint(2, 97, (3, 300), generator=torch.Generator().manual_seed(width))
    assert max(read_in_blocks(target, text, pattern, width)) < 5e-3


def test_without_putting_states_back_the_logits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.randint(2, 97, (3, 36), generator=torch.Generator().manual_seed(4))
    models = [recurrent(family) for family in ("qwen3_5_text", "falcon_h1", "lfm2")]
    for model in models:
        CachedModel(model, 1, 8)
    monkeypatch.setattr(RecurrentCache, "_put_back", lambda self, starts: None)
    for model in models:
        assert max(read_in_blocks(model, text, "none", width=4)) > 0.1, type(model)


def test_every_family_writes_what_plain_decoding_writes(target: PreTrainedModel) -> None:
    writes_plain(target, "lossless")


@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind != "lossless"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_every_scheme_writes_what_plain_decoding_writes(family: str, kind: str) -> None:
    writes_plain(recurrent(family), kind)


@pytest.mark.grid
@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind != "lossless"])
def test_every_scheme_with_every_family(target: PreTrainedModel, kind: str) -> None:
    writes_plain(target, kind)


def writes_plain(target: PreTrainedModel, kind: str) -> None:
    for lengths in ((5,), RAGGED):
        inputs = prompts(lengths, seed=2)
        expected = plain_rows(target, inputs, max_new_tokens=16)
        output = assisted(target, draft_of(target, "near"), inputs, kind, max_new_tokens=16)
        assert torch.equal(new_tokens(output, inputs), expected), lengths
        ends = {"eos_token_id": int(expected[0, 9]), "pad_token_id": 0}
        output = assisted(target, target, inputs, kind, max_new_tokens=16, **ends)
        expected = plain_rows(target, inputs, pad=0, max_new_tokens=16, **ends)
        assert torch.equal(new_tokens(output, inputs), expected), lengths


@pytest.mark.parametrize("fields", [{"num_draft_tokens": n} for n in (1, 2, 6)] + [{"draft": "ngram+model"}])
def test_drafts_of_any_length_and_from_the_text(fields: dict[str, Any]) -> None:
    for family in ("qwen3_5_text", "lfm2"):
        target = recurrent(family)
        for draft in (draft_of(target, "near"), tiny("llama", 0)):
            inputs = prompts(RAGGED, seed=5)
            config = SemSpecConfig("lossless", max_new_tokens=30, **fields)
            output = target.generate(**inputs, assistant_model=draft, generation_config=config)
            assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=30))


@pytest.mark.parametrize("kind", ["lossless", "chains", "smc", "semantic"])
def test_a_recurrent_draft_of_an_attention_only_target(kind: str) -> None:
    target = tiny("llama", 0, attention="sdpa")
    inputs = prompts(RAGGED, seed=5)
    expected = plain_rows(target, inputs, max_new_tokens=30)
    for family in ("qwen3_5_text", "mamba2"):
        output = assisted(target, recurrent(family), inputs, kind, max_new_tokens=30)
        assert torch.equal(new_tokens(output, inputs), expected)


def test_no_forward_is_wider_and_none_is_added() -> None:
    """As many forwards as rounds, each of γ + 1 tokens, whatever was rejected."""
    target = recurrent("qwen3_5_text")
    draft = draft_of(target, "near")
    assisted(target, draft, prompts((5,)), max_new_tokens=4)  # the models are tried once
    with Forwards(target) as spy:
        output = assisted(
            target,
            draft,
            prompts((5,)),
            num_draft_tokens=4,
            max_new_tokens=60,
            return_dict_in_generate=True,
            use_cache=False,
        )
    row = output.stats.rows[0]
    assert 0 < row.accepted < row.tested
    assert set(spy.widths[1:-4]) == {5}
    assert spy.calls == 1 + row.emitted - row.accepted - row.plain + (row.plain - 1)


@dataclass(frozen=True, kw_only=True)
class PlayedConfig(TokenLevelConfig):
    """Accepts each draft with probability `rate`, whatever the models say."""

    rate: float = within(0.5, 0, 1)


def played(block: Block, config: PlayedConfig) -> Acceptance:
    assert block.uniforms is not None
    num_accepted, outcome = stop(block.uniforms < config.rate, block.valid)
    return Acceptance(num_accepted, outcome, law=next_law(block.log_p, block.log_q, num_accepted, outcome))


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 0.95])
def test_as_many_tokens_a_forward_as_with_attention_alone(rate: float) -> None:
    """At the same acceptance, played from the same seed, both kinds of target take the same forwards of the same
    widths."""
    with left_as_found():
        register_scheme("played", PlayedConfig, accept=played)
        config = SemSpecConfig(
            "played", rate=rate, num_draft_tokens=4, max_new_tokens=40, do_sample=True, use_cache=False
        )
        found = []
        for target in (recurrent("falcon_h1"), tiny("llama", 0, attention="sdpa")):
            draft, inputs = draft_of(target, "near"), prompts(RAGGED, seed=1)
            target.generate(**inputs, assistant_model=draft, generation_config=config)
            torch.manual_seed(0)
            with Forwards(target) as spy:
                target.generate(**inputs, assistant_model=draft, generation_config=config)
            found.append(spy.shapes)
    assert found[0] == found[1]
    assert len(found[0]) > 40 / 5


def kept(cache: Any) -> list[torch.Tensor]:
    """All that a cache of transformers' keeps."""
    found = []
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            found += [layer.keys, layer.values]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += [state for state in states.values() if state is not None]
    return found


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "nemotron_h"])
def test_the_returned_cache_is_plain_generates(family: str, kind: str) -> None:
    target = recurrent(family)
    inputs = prompts((6, 6), seed=2)
    end = int(plain(target, inputs, max_new_tokens=14)[0, 6 + 5])
    fields = {"max_new_tokens": 14, "return_dict_in_generate": True, "eos_token_id": end, "pad_token_id": 0}
    expected = plain(target, inputs, **fields)
    output = assisted(target, draft_of(target, "near"), inputs, kind, **fields)
    for ours, theirs in zip(kept(cache_of(output)), kept(cache_of(expected)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_a_second_turn_with_the_returned_cache(family: str) -> None:
    target = recurrent(family)
    draft, inputs = draft_of(target, "near"), prompts((6, 6), seed=2)
    first = assisted(target, draft, inputs, max_new_tokens=10, return_dict_in_generate=True)
    more = torch.cat([first.sequences, torch.full((2, 3), 7)], dim=1)
    before = copy.deepcopy(cache_of(first))
    expected = target.generate(more, cache=copy.deepcopy(before), max_new_tokens=10, do_sample=False)
    assert torch.equal(
        assisted(target, draft, {"input_ids": more}, call={"cache": cache_of(first)}, max_new_tokens=10), expected
    )
    assert len(kept(before)) == len(kept(cache_of(first)))


def test_a_filled_cache_that_does_not_tell_its_length_is_refused() -> None:
    target = recurrent("mamba2")
    inputs = prompts((6,), seed=2)
    first = assisted(target, target, inputs, max_new_tokens=4, return_dict_in_generate=True)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, target, inputs, "recurrent states alone", generation_config=config, cache=cache_of(first))


def test_samples_follow_the_targets_law() -> None:
    target = recurrent("qwen3_5_text")
    draft = draft_of(target, "near", noise=0.3)
    inputs = prompts((4,), seed=3)
    ids, runs = inputs["input_ids"].repeat(800, 1), {"do_sample": True, "top_k": 3, "max_new_tokens": 3}
    torch.manual_seed(0)
    ours = assisted(target, draft, {"input_ids": ids}, num_draft_tokens=2, **runs)[:, 4:]
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, mass in laws.items():
            row = torch.cat([inputs["input_ids"], torch.tensor([text], dtype=torch.long)], dim=1)
            best = target(row).logits[0, -1].detach().topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
                longer[(*text, token)] = mass * share
        laws = longer
    cells = {text: place for place, text in enumerate(laws)}
    law = torch.tensor(list(laws.values()))
    places = torch.tensor([cells[tuple(row)] for row in ours.tolist()])
    assert not deviations(places, law)
    theirs = draft.generate(ids, **runs)[:, 4:].tolist()
    wrong = torch.tensor([cells[tuple(row)] for row in theirs if tuple(row) in cells])
    assert len(wrong) < len(ids) or deviations(wrong, law)


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("family", REFUSED)
def test_ui35_layers_that_cannot_be_put_back_are_refused_by_name(family: str, side: str) -> None:
    odd, usual = recurrent(family), tiny("llama", 0)
    models = (odd, usual) if side == "target" else (usual, odd)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{type(odd).__name__} cannot be rolled back"):
            models[0].generate(**prompts((4,)), assistant_model=models[1], generation_config=config)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in odd.modules())


def test_half_precision_tells_the_two_kinds_apart() -> None:
    for family in ("qwen3_5_text", "granitemoehybrid", "zamba2", "mamba2"):
        CachedModel(recurrent(family, dtype=torch.bfloat16), 1, 8)
    for family in REFUSED:
        with pytest.raises(ValueError, match="cannot be rolled back"):
            CachedModel(recurrent(family, dtype=torch.bfloat16), 1, 8)


def test_fixed_buffers_are_refused_by_name() -> None:
    target = recurrent("qwen3_5_text")
    config = SemSpecConfig("lossless", compile_draft=True, max_new_tokens=4)
    refuses(target, target, prompts((4,)), "recurrent state", generation_config=config)


def test_the_first_layers_draft() -> None:
    target = recurrent("qwen3_5_text")
    inputs = prompts(RAGGED, seed=2)
    for layers in (1, 2):
        output = assisted(target, load_draft(target, layers=layers), inputs, max_new_tokens=20)
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_head_drafts(family: str, tmp_path: Path) -> None:
    target = recurrent(family)
    head = load_draft(write(tmp_path, "specforge", weights(target)), target=target)
    inputs = prompts(RAGGED, seed=2)
    expected = plain_rows(target, inputs, max_new_tokens=16)
    for kind in ("lossless", "chains"):
        output = assisted(target, head, inputs, kind, max_new_tokens=16)
        assert torch.equal(new_tokens(output, inputs), expected)


def test_costs_are_measured_with_what_putting_back_takes() -> None:
    target = recurrent("qwen3_5_text", dtype=torch.float32)
    with Forwards(target) as spy:
        seconds = forward_seconds({"one": (target, 1), "five": (target, 5)}, batch=2, context=6, repeats=2)
    assert sorted(seconds) == ["five", "one"] and min(seconds.values()) > 0
    assert spy.widths[-6:] == [1, 5] * 3


def test_no_hook_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = recurrent("qwen3_5_text")
    assisted(target, target, prompts((4,)), max_new_tokens=2)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(target.model.layers[1].mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="broken"):
        assisted(target, target, prompts((4,)), max_new_tokens=8)
    assert not any(module._forward_pre_hooks for module in target.modules())


@pytest.mark.seam
def test_ui35_a_recurrent_model_of_an_older_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.Cache, "get_conv_state", raising=False)
    odd = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2))
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(tiny("llama", 0), odd.eval(), prompts((4,)), "MambaForCausalLM keeps a rec", generation_config=config)
