"""What calls of `smc` return: rows with their weights, scores and cache of their ancestry, memory, pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from hf_semspec import SemSpecConfig, record_stats
from hf_semspec.schemes.smc.population import Particles
from tests.helpers import WEAK_DRAFTS, Forwards, cache_length, cache_of, check_identities, new_tokens, plain, states
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.schemes.smc.shared import lengths_of, pair, sample

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:of .* particles hardly more")]


@pytest.mark.parametrize("select", ["sample", "best"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_returned_rows_are_particles_with_their_weights(number: int, select: str) -> None:
    target, draft = pair(1)
    inputs = prompts((3, 8), seed=2)
    output = sample(
        target,
        draft,
        inputs,
        num_particles=4,
        num_draft_tokens=3,
        ess_threshold=0.0,
        max_new_tokens=13,
        select=select,
        num_return_sequences=number,
    )
    assert output.sequences.shape == (2 * number, 8 + 13)
    for prompt in range(2):
        rows = output.sequences[prompt * number : (prompt + 1) * number]
        weights = output.sequence_log_weights[prompt * number : (prompt + 1) * number]
        for row, weight in zip(rows, weights, strict=True):
            slots = (output.particles[prompt] == row).all(dim=1)
            assert slots.any()
            assert weight in output.log_weights[prompt][slots]
        if select == "best":
            assert torch.equal(weights, output.log_weights[prompt].topk(number).values)
            assert len({tuple(row) for row in rows.tolist()}) == number
    check_identities(output.stats, [13] * 2 * number)


@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_scores_logits_and_cache_are_of_the_returned_rows_ancestry(resampling: str) -> None:
    """UI-50: what a row was scored by, through every slot it stood in, equals a teacher-forced pass over its text."""
    target, draft = pair(1)
    inputs = prompts((3, 8), seed=2)
    eos = {5, 6, 7, 8, 9}
    output = sample(
        target,
        draft,
        inputs,
        num_particles=6,
        num_draft_tokens=3,
        ess_threshold=1.0,
        resampling=resampling,
        max_new_tokens=26,
        eos_token_id=sorted(eos),
        temperature=0.7,
        top_k=40,
        num_return_sequences=3,
        output_scores=True,
        output_logits=True,
    )
    assert output.stats.resamplings > 2
    new = new_tokens(output, inputs)
    lengths = lengths_of(output, inputs, eos)
    assert len(output.scores) == len(output.logits) == new.shape[1] == max(lengths)
    cache = cache_of(output)
    assert cache_length(cache) == output.sequences.shape[1] - 1
    for row, length in enumerate(lengths):
        prompt = inputs["input_ids"][row // 3][inputs["attention_mask"][row // 3].bool()]
        with torch.no_grad():
            forced = target(torch.cat([prompt, new[row, :length]])[None])
        logits = forced.logits[0, len(prompt) - 1 : -1].float()
        assert torch.allclose(torch.stack(output.logits)[:length, row], logits, atol=1e-4)
        scores = torch.stack(output.scores)[:length, row]
        kept = scores > -torch.inf
        assert kept.sum(dim=1).eq(40).all()
        assert torch.allclose(scores[kept], (logits / 0.7)[kept], atol=1e-3)
        assert torch.stack(output.scores)[length:, row].eq(0).all()
        assert torch.stack(output.logits)[length:, row].eq(0).all()
        held = min(length, max(lengths) - 1)
        first = 8 - len(prompt)
        for ours, theirs in zip(states(cache), states(forced[1]), strict=True):
            for got, want in zip(ours, theirs, strict=True):
                assert torch.allclose(got[row, :, first : 8 + held], want[0, :, : len(prompt) + held], atol=1e-5)
    transition = target.compute_transition_scores(output.sequences, output.scores)
    assert transition.shape == new.shape


def test_a_filled_cache_is_gone_on_from() -> None:
    """UI-38: the second turn reads only what is new, and the caller's cache is extended by the returned row."""
    target, draft = pair(1)
    inputs = prompts((6,), seed=2)
    fields = {"num_particles": 4, "num_draft_tokens": 3, "ess_threshold": 1.0}
    first = sample(target, draft, inputs, max_new_tokens=10, **fields)
    ids = torch.cat([first.sequences, torch.tensor([[11, 23, 31]])], dim=1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = sample(target, draft, turn, max_new_tokens=10, output_logits=True, seed=3, **fields)
    name = next(name for name in ("cache", "past_key_values") if hasattr(first, name))
    given = cache_of(first)
    with Forwards(target) as spy:
        call = {name: given}
        again = sample(target, draft, turn, call=call, max_new_tokens=10, output_logits=True, seed=3, **fields)
    assert spy.shapes[0] == (1, 4)
    assert torch.equal(again.sequences, expected.sequences)
    assert cache_of(again) is given
    assert cache_length(given) == again.sequences.shape[1] - 1
    assert torch.allclose(torch.cat(again.logits), torch.cat(expected.logits), atol=1e-4)


def held_bytes(monkeypatch: pytest.MonkeyPatch, number: int, limit: int, lengths: tuple[int, ...] = (6, 9)) -> int:
    """The most bytes of keys and values that both caches of a call held after any round."""
    target, draft = pair(1, positions=1024)
    seen, commit = [0], Particles.commit

    def committed(state: Particles, *args: Any) -> None:
        commit(state, *args)
        layers = [layer for model in (state.rounds.target, state.drafter.decoder) for layer in model.cache.layers]
        seen.append(sum(part.nbytes for layer in layers for part in (layer.keys, layer.values)))

    with monkeypatch.context() as patch:
        patch.setattr(Particles, "commit", committed)
        sample(target, draft, prompts(lengths, seed=2), num_particles=number, ess_threshold=1.0, max_new_tokens=limit)
    return max(seen)


def test_memory_grows_with_particles_and_length_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values: prompts x particles x columns of both models, columns a power of two; no trace of the dead."""
    a_token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, head size, float64
    for number in (1, 2, 4):
        for limit, columns in ((20, 64), (100, 128), (200, 256)):
            found = held_bytes(monkeypatch, number, limit)
            assert found == 2 * 2 * number * columns * a_token, (number, limit)


def test_known_pattern_gives_exact_numbers() -> None:
    """UI-51: two whole blocks, the second cut by an EOS; then one block that is dropped."""
    for seed in range(100):
        target, inputs = tiny("llama", seed), prompts((5,), seed=seed)
        text = plain(target, inputs, max_new_tokens=20, do_sample=False)[0, 5:].tolist()
        if len(set(text[:8])) == 8:
            break
    fields = {"num_particles": 3, "num_draft_tokens": 4, "top_k": 1, "max_new_tokens": 20}
    output = sample(target, draft_of(target, "same"), inputs, eos_token_id=text[7], **fields)
    assert new_tokens(output, inputs)[0].tolist() == text[:8]
    (row,) = output.stats.rows
    assert (row.plain, row.rounds, row.drafted, row.tested, row.accepted) == (1, 2, 8, 6, 6)
    assert (row.rejected, row.bonus, row.cut, row.emitted) == (0, 1, 3, 8)
    assert row.histogram == [0, 0, 1, 0, 1]
    assert (output.stats.target_forwards, output.stats.draft_forwards) == (3, 8)

    draft = draft_of(target, "same")
    draft.lm_head.weight.data = draft.lm_head.weight.data.roll(1, dims=0)  # never the target's token
    output = sample(target, draft, inputs, **{**fields, "max_new_tokens": 3})
    (row,) = output.stats.rows
    assert (row.plain, row.rounds, row.drafted, row.tested, row.untested, row.accepted) == (2, 1, 1, 1, 0, 0)
    assert (row.rejected, row.residual, row.bonus, row.cut, row.emitted) == (1, 1, 0, 0, 3)
    assert (output.stats.collapses, output.stats.dead_particles) == (1, 3)


@pytest.mark.deprecated
def test_a_pipeline_and_a_model_folder_run_the_scheme(tmp_path: Path) -> None:
    """UI-26, UI-43, UI-46: a chat target with a list of EOS ids, its stored config, a base draft."""
    target = tiny("llama", 0, eos=[2, 7])
    draft = draft_of(target, "near")
    draft.config.eos_token_id = draft.generation_config.eos_token_id = 2
    target.generation_config = SemSpecConfig("smc", num_particles=3, num_draft_tokens=3, eos_token_id=[2, 7])
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    texts = []
    for model in (target, loaded):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), assistant_model=draft)
        torch.manual_seed(0)
        with record_stats() as stats:
            texts.append(pipe("Hello", max_new_tokens=12)[0]["generated_text"])
        assert [entry.scheme for entry in stats] == ["smc"]
        assert stats[0].draft_forwards > 0
    assert texts[0] == texts[1]
