"""`smc` through `generate`: against the transcription, against fresh forwards, its costs, its output, its ends."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    pipeline,
)

from hf_semspec import SemSpecConfig, SMCConfig, particles, record_stats
from hf_semspec.blocks import Block
from hf_semspec.cache import RaggedCache
from hf_semspec.particles import RESAMPLINGS
from hf_semspec.population import Population
from hf_semspec.schemes import smc
from tests import reference
from tests.helpers import (
    WEAK_DRAFTS,
    Forwards,
    Inputs,
    Recorder,
    RowLengths,
    cache_length,
    cache_of,
    caught,
    check_identities,
    new_tokens,
    plain,
    refuses,
    states,
)
from tests.models import PAD, VOCAB, draft_of, prompts, tiny, tokenizer
from tests.test_host_reads import HostReads

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:of .* particles hardly more")]


def sample(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """One call with the whole output."""
    config = SemSpecConfig("smc", **{"return_dict_in_generate": True, "pad_token_id": PAD, **fields})
    torch.manual_seed(seed)
    return target.generate(**inputs, **(call or {}), assistant_model=draft, generation_config=config)


def pair(seed: int = 0, noise: float = 0.02, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft near enough that some particles keep their weight and some do not."""
    target = tiny("llama", seed, attention="sdpa", **kwargs)
    return target, draft_of(target, "near", noise=noise)


class Laws:
    """log-probabilities after a text, by a forward over the whole of it."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.model, self.prompt = model, prompt
        self.known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, text: list[int]) -> list[float]:
        key = tuple(text)
        if key not in self.known:
            with torch.no_grad():
                logits = self.model(torch.cat([self.prompt, torch.tensor(text, dtype=torch.long)])[None]).logits
            for end in range(len(text) + 1):
                row = logits[0, len(self.prompt) - 1 + end].float().double().log_softmax(-1)
                self.known[key[:end]] = row.tolist()
        return self.known[key]


class Draws:
    """Every draw of a call while it is open, for each prompt."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.firsts: dict[int, list[int]] = {}
        self.rounds: dict[int, list[Any]] = {}
        judge, resample = Population.judge, smc.resample

        def judged(state: Population, block: Block, bonus: torch.Tensor) -> None:
            self.live = list(state.live)
            for row, ids, ends in zip(state.live, block.ids.tolist(), bonus.tolist(), strict=True):
                if row not in self.firsts:
                    self.firsts[row] = ends
                else:
                    self.rounds.setdefault(row, []).append([ids, ends, None])
            judge(state, block, bonus)

        def resampled(*args: Any) -> Any:
            for row, uniforms in zip(self.live, args[4].tolist(), strict=True):
                self.rounds[row][-1][2] = uniforms
            return resample(*args)

        patch.setattr(Population, "judge", judged)
        patch.setattr(smc, "resample", resampled)


@pytest.mark.parametrize("method", RESAMPLINGS)
@pytest.mark.parametrize(
    "fields", [{}, {"ess_threshold": 1.0}, {"ess_threshold": 0.0}, {"power": 2.0, "ess_threshold": 0.8}]
)
def test_a_call_is_the_algorithm_box(fields: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given its draws, the transcription with laws from fresh forwards finds the same texts, weights and ancestors."""
    target, draft = pair(1, noise=0.1)
    inputs, eos, room = prompts((3, 8), seed=2), [5, 6, 7, 8], 18
    draws = Draws(monkeypatch)
    output = sample(
        target,
        draft,
        inputs,
        num_particles=4,
        num_draft_tokens=3,
        resampling=method,
        max_new_tokens=room,
        eos_token_id=eos,
        **fields,
    )
    resamplings = 0
    for row in range(2):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        laws, alpha = Laws(target, prompt), fields.get("power", 1.0)
        texts, log_w, log_z, ess, ancestors = reference.smc(
            draws.firsts[row],
            draws.rounds.get(row, []),
            laws,
            Laws(draft, prompt),
            room=room,
            eos=set(eos),
            threshold=fields.get("ess_threshold", 0.5),
            method=method,
            alpha=alpha,
            log_z=0.0 if alpha == 1 else reference.log_sum([alpha * z for z in laws([])]),
        )
        padded = [text + [PAD] * (output.particles.shape[2] - 8 - len(text)) for text in texts]
        assert output.particles[row, :, 8:].tolist() == padded
        assert output.ancestors[row, : len(ess)].tolist() == ancestors
        assert output.ess[row, : len(ess)].tolist() == pytest.approx(ess, rel=1e-4)
        assert output.log_weights[row].tolist() == pytest.approx(log_w, abs=1e-4)
        assert float(output.log_evidence[row]) == pytest.approx(log_z, abs=1e-4)
        resamplings += sum(a != sorted(a) or len(set(a)) < 4 for a in ancestors)
    assert (resamplings == 0) == (fields.get("ess_threshold") == 0)


def watch_caches(patch: pytest.MonkeyPatch, target: PreTrainedModel, draft: PreTrainedModel) -> list[float]:
    """After every block, how far both models' laws are from those of fresh forwards over each particle's text."""
    gaps: list[float] = []
    score = Population.draft_and_score

    def scored(state: Population) -> Block:
        generated = [state.canvas.generated[row] for row in state.live]
        block = score(state)
        for i, row in enumerate(state.live):
            real = slice(state.canvas.prompt_width - state.canvas.prompt_lengths[row], None)
            for n in range(state.number):
                if bool(state.finished[i, n]):
                    continue
                count = block.counts[i]
                end = state.canvas.prompt_width + generated[i] + count
                text = state.canvas.shown[row, n, :end][real][None]
                with torch.no_grad():
                    fresh = target(text).logits[0, -count - 1 :].float()
                    own = draft(text).logits[0, -count - 1 : -1].float().double().log_softmax(-1)
                gaps.append(float((block.scores[i, n, : count + 1] - fresh).abs().max()))
                log_q = own.gather(1, block.ids[i, n, :count, None])[:, 0]
                if count:
                    gaps.append(float((block.log_q[i, n, :count] - log_q).abs().max()))
        return block

    patch.setattr(Population, "draft_and_score", scored)
    return gaps


@pytest.mark.parametrize("shape", ["llama", "gemma3", "gpt2"])
def test_both_caches_move_with_the_particles(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After many resamplings the copy's next laws are those of its text, in both models; without the copying not."""
    target = tiny(shape, 3, attention="sdpa")
    draft = draft_of(target, "near", noise=0.03)
    fields = {"num_particles": 5, "num_draft_tokens": 3, "ess_threshold": 1.0, "max_new_tokens": 40}
    gaps = watch_caches(monkeypatch, target, draft)
    output = sample(target, draft, prompts((3, 9), seed=3), **fields)
    assert output.stats.resamplings >= 15
    assert max(gaps) < 1e-4
    for broken in ("target", "draft"):
        gaps.clear()
        copy_rows = RaggedCache.copy_rows
        with pytest.MonkeyPatch.context() as patch:

            def forgets(cache: RaggedCache, *args: Any, spared: str = broken, copy: Any = copy_rows) -> None:
                if (cache.last_role == spared) is False:
                    copy(cache, *args)

            feed = Population.draft_and_score

            def named(state: Population, inner: Any = feed) -> Block:
                state.target.cache.last_role, state.drafter.decoder.cache.last_role = "target", "draft"
                return inner(state)

            patch.setattr(RaggedCache, "last_role", "", raising=False)
            patch.setattr(RaggedCache, "copy_rows", forgets)
            patch.setattr(Population, "draft_and_score", named)
            sample(target, draft, prompts((3, 9), seed=3), **fields)
        assert max(gaps) > 1e-2, broken


def test_resampling_copies_only_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair(1)
    copied: list[tuple[list[int], list[int], int, int]] = []
    copy_rows = RaggedCache.copy_rows

    def spy(cache: RaggedCache, sources: Any, rows: Any, start: int, end: int) -> None:
        copied.append((list(sources), list(rows), start, end))
        pointers = [layer.keys.data_ptr() for layer in cache.layers]
        copy_rows(cache, sources, rows, start, end)
        assert [layer.keys.data_ptr() for layer in cache.layers] == pointers, "in place"

    monkeypatch.setattr(RaggedCache, "copy_rows", spy)
    inputs = prompts((4, 9), seed=2)
    output = sample(target, draft, inputs, num_particles=4, num_draft_tokens=3, ess_threshold=0.9, max_new_tokens=30)
    changed = sum(int((row != torch.arange(4)).sum()) for row in output.ancestors.flatten(0, 1))
    assert sum(len(rows) for _, rows, _, _ in copied) == 2 * changed > 0, "both caches, no row that keeps its ancestor"
    for sources, rows, start, _ in copied:
        assert all(a != b and a // 4 == b // 4 for a, b in zip(sources, rows, strict=True))
        assert start == (4, 9)[rows[0] // 4], "the prompt is never copied"


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("lengths", [(7,), (4, 9)])
def test_forwards_of_a_call(lengths: tuple[int, ...], power: float) -> None:
    """γ draft forwards and one of the target a round; every prompt read once, by one row, not by N."""
    target, draft = pair(1)
    batch, width, number, gamma, rounds = len(lengths), max(lengths), 4, 5, 6
    limit = 1 + rounds * (gamma + 1)
    fields = {"num_particles": number, "num_draft_tokens": gamma, "max_new_tokens": limit, "power": power}
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = sample(target, draft, prompts(lengths, seed=2), **fields)
    rows = batch * number
    assert of_target.shapes == [(batch, width), *[(rows, gamma + 1)] * rounds]
    later = [(rows, 2), *[(rows, 1)] * (gamma - 1)] * (rounds - 1)
    first = [(batch, width + 1)] if power == 1 else [(batch, width), (rows, 1)]
    assert of_draft.shapes == first + [(rows, 1)] * (gamma - 1) + later
    assert all(shape[1] <= gamma + 1 for shape in of_target.logits + of_draft.logits)
    stats = output.stats
    assert (stats.target_forwards, stats.draft_forwards) == (1 + rounds, rounds * gamma + (power != 1))
    assert (stats.target_tokens, stats.draft_tokens) == (of_target.tokens, of_draft.tokens)
    assert output.ess.shape == (batch, rounds)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ess_threshold": 1.0, "num_return_sequences": 3},
        {"repetition_penalty": 1.2, "power": 2.0, "output_scores": True},
        {"top_k": 3},
    ],
)
@pytest.mark.parametrize("lengths", [(5,), (3, 9, 6)])
def test_one_host_read_a_round(lengths: tuple[int, ...], fields: dict[str, Any]) -> None:
    """What does not repeat (checks of arguments, the choice at the end, the record) is the same in a longer call."""
    counts = []
    for limit in (13, 49):
        target, draft = pair(1)
        with pytest.MonkeyPatch.context() as patch, HostReads(patch, target, draft) as reads:
            config = SemSpecConfig("smc", num_particles=4, num_draft_tokens=3, max_new_tokens=limit, **fields)
            inputs = prompts(lengths, seed=2)
            output = target.generate(**inputs, assistant_model=draft, generation_config=config)
        counts.append((reads.count, limit))
        assert output.shape[0] == len(lengths) * fields.get("num_return_sequences", 1)
    (short, _), (long, _) = counts
    assert long - short <= (49 - 13) // 4 + (36 if fields.get("top_k") else 0)


def test_the_record_of_a_call() -> None:
    target, draft = pair(1)
    inputs = prompts((3, 8, 5), seed=2)
    fields = {"num_particles": 4, "num_draft_tokens": 3, "max_new_tokens": 14, "eos_token_id": [5, 6, 7]}
    output = sample(target, draft, inputs, num_return_sequences=2, **fields)
    rounds = output.ess.shape[1]
    assert output.sequences.shape[0] == 6
    assert output.particles.shape[:2] == (3, 4)
    assert torch.equal(output.particles[:, :, :8], inputs["input_ids"][:, None].expand(-1, 4, -1))
    assert output.log_weights.shape == (3, 4)
    assert output.ancestors.shape == (3, rounds, 4)
    assert output.log_evidence.shape == (3,)
    assert output.sequence_log_weights.shape == (6,)
    for tensor in (output.log_weights, output.ess, output.log_evidence, output.sequence_log_weights):
        assert tensor.dtype == torch.float64
    assert output.particles.dtype == output.ancestors.dtype == torch.long
    names = {"particles", "log_weights", "ess", "ancestors", "log_evidence", "sequence_log_weights", "stats"}
    assert not names & set(output.keys()), "attributes, not items"
    valid = output.ess[~output.ess.isnan()]
    assert (valid >= 1).all() and (valid <= 4 + 1e-9).all()
    assert output.stats.mean_ess == pytest.approx(float(valid.mean()))
    check_identities(output.stats, lengths_of(output, inputs, {5, 6, 7}))
    assert output.stats.scheme == "smc"
    ids = target.generate(**inputs, assistant_model=draft, generation_config=SemSpecConfig("smc", max_new_tokens=4))
    assert isinstance(ids, torch.Tensor)


def lengths_of(output: Any, inputs: Inputs, eos: set[int]) -> list[int]:
    """New tokens of every row up to its EOS."""
    return [
        next((t + 1 for t, token in enumerate(row) if token in eos), len(row))
        for row in new_tokens(output, inputs).tolist()
    ]


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
    seen, commit = [0], Population.commit

    def committed(state: Population, *args: Any) -> None:
        commit(state, *args)
        layers = [layer for model in (state.target, state.drafter.decoder) for layer in model.cache.layers]
        seen.append(sum(part.nbytes for layer in layers for part in (layer.keys, layer.values)))

    with monkeypatch.context() as patch:
        patch.setattr(Population, "commit", committed)
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
    assert (row.plain, row.rounds, row.drafted, row.tested, row.accepted) == (1, 2, 8, 8, 8)
    assert (row.rejected, row.bonus, row.cut, row.emitted) == (0, 2, 3, 8)
    assert row.histogram == [0, 0, 0, 0, 2]
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


# Ends.


@pytest.mark.parametrize("number", [1, 4])
def test_finished_particles_are_absorbing(number: int) -> None:
    """EOS anywhere in a block ends its particle once: padding after it, its weight as it was."""
    target, draft = pair(1)
    inputs = prompts((3, 8), seed=2)
    offsets = set()
    for seed in range(8):
        eos = set(range(5, 13))
        output = sample(
            target,
            draft,
            inputs,
            seed=seed,
            num_particles=number,
            num_draft_tokens=3,
            ess_threshold=0.0,
            max_new_tokens=22,
            eos_token_id=sorted(eos),
        )
        for row in range(2):
            prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
            of_target, of_draft = Laws(target, prompt), Laws(draft, prompt)
            for n in range(number):
                text = output.particles[row, n, 8:].tolist()
                end = next((t + 1 for t, token in enumerate(text) if token in eos), 22)
                assert all(token == PAD for token in text[end:])
                offsets.add((end - 1) % 4)
                drafted = [t for t in range(1, min(end, len(text))) if t % 4]
                if end == 22:
                    drafted = [t for t in drafted if t != 21]  # the last block is cut so that its bonus comes last
                wanted = sum(of_target(text[:t])[text[t]] - of_draft(text[:t])[text[t]] for t in drafted)
                assert float(output.log_weights[row, n]) == pytest.approx(wanted, abs=1e-4)
        check_identities(output.stats, lengths_of(output, inputs, eos))
    assert offsets == {0, 1, 2, 3}, "every place of a block was seen"


def test_a_prompt_whose_particles_are_all_finished_leaves_the_batch() -> None:
    target, draft = pair(1)
    inputs = prompts((4, 8), seed=2)
    call = {"stopping_criteria": StoppingCriteriaList([RowLengths([8 + 6, 8 + 22])])}
    with Forwards(target) as spy:
        output = sample(
            target, draft, inputs, call=call, num_particles=3, num_draft_tokens=3, max_new_tokens=30, eos_token_id=96
        )
    assert output.particles[0, :, 8 + 6 :].eq(PAD).all()
    assert output.sequences.shape == (2, 8 + 22)
    rows = [shape[0] for shape in spy.shapes]
    assert rows[:3] == [2, 6, 6]
    assert set(rows[4:]) == {3}
    check_identities(output.stats, [6, 22])
    assert output.ess[0].isnan().sum() > output.ess[1].isnan().sum() == 0


def test_stop_strings_end_each_particle_on_its_own() -> None:
    target, draft = pair(1)
    inputs = prompts((5,), seed=2)
    call = {"tokenizer": tokenizer()}
    stops = [chr(code) for code in range(97, 110)]
    output = sample(
        target, draft, inputs, call=call, num_particles=6, num_draft_tokens=4, max_new_tokens=30, stop_strings=stops
    )
    ids = [tokenizer().encode(stop)[0] for stop in stops]
    ends = set()
    for text in output.particles[0, :, 5:].tolist():
        end = next((t + 1 for t, token in enumerate(text) if token in ids), len(text))
        assert all(token == PAD for token in text[end:])
        ends.add(end)
    assert len(ends) > 1


class OneAtATime(LogitsProcessor):
    """Allows ids that follow from the whole history: a penalty for what is in it, whatever row it stands in."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == self.rows, "blocks of the rows that generate prepared"
        return scores.scatter(1, input_ids, -torch.inf)


@pytest.mark.parametrize("particles_of_a_prompt", [4, 5])
@pytest.mark.parametrize("returned", [1, 2, 3])
def test_each_particle_has_its_own_history(returned: int, particles_of_a_prompt: int) -> None:
    """UI-19: no particle repeats a token, in prompts and drafts, also where the last block of rows is filled up."""
    target, draft = pair(1)
    inputs = prompts((3, 8), seed=2)
    call = {"logits_processor": LogitsProcessorList([OneAtATime(2 * returned)])}
    output = sample(
        target,
        draft,
        inputs,
        call=call,
        num_particles=particles_of_a_prompt,
        num_draft_tokens=4,
        ess_threshold=1.0,
        max_new_tokens=18,
        num_return_sequences=returned,
    )
    assert output.stats.collapses == 0
    for row in range(2):
        for text in output.particles[row].tolist():
            assert len(set(text[8:])) == 18
            assert not set(text[8:]) & set(inputs["input_ids"][row].tolist())


@pytest.mark.parametrize("returned", [1, 2])
def test_constraints_by_row_hold_for_every_particle(returned: int) -> None:
    """UI-21: a function of the prompt and its text sees both as plain decoding would show them."""
    target, draft = pair(1)
    inputs = prompts((3, 8), seed=2)

    def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
        row = int(not torch.equal(input_ids[:8], inputs["input_ids"][0]))
        # transformers 4 counts the rows that it prepared, 5 the prompts.
        assert batch_id in (row, *range(row * returned, (row + 1) * returned))
        return list(range(2 + row, VOCAB, 2))

    fields = {"num_particles": 4, "num_draft_tokens": 3, "max_new_tokens": 15, "num_return_sequences": returned}
    output = sample(target, draft, inputs, call={"prefix_allowed_tokens_fn": allowed}, **fields)
    for row in range(2):
        assert output.particles[row, :, 8:].remainder(2).eq(row).all()
    assert output.sequences.shape[0] == 2 * returned


# Collapses.


def test_truncation_kills_particles_and_the_stats_count_them() -> None:
    target, draft = pair(1, noise=0.3)
    inputs = prompts((3, 8), seed=2)
    fields = {"num_particles": 3, "num_draft_tokens": 4, "max_new_tokens": 30}
    output = sample(target, draft, inputs, top_k=2, **fields)
    assert output.stats.dead_particles > 0
    assert output.stats.collapses > 0
    assert (output.log_evidence == -torch.inf).any()
    assert not output.log_weights.isnan().any()
    check_identities(output.stats, [30, 30])
    assert sum(row.rejected for row in output.stats.rows) > 0
    whole = sample(target, draft, inputs, **fields)
    assert whole.stats.dead_particles == whole.stats.collapses == 0
    assert whole.log_evidence.isfinite().all()
    check_identities(whole.stats, [30, 30])


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("name", ["same", "near", "far"])
def test_one_token_left_is_greedy_decoding(name: str, number: int) -> None:
    """Every block that leaves the only possible text dies, and its prompt goes on from the target's own token."""
    target = tiny("llama", 2, attention="sdpa")
    inputs = prompts((4, 7), seed=2)
    fields = {"num_particles": number, "num_draft_tokens": 3, "max_new_tokens": 20}
    output = sample(target, draft_of(target, name), inputs, top_k=1, **fields)
    assert torch.equal(output.sequences, plain(target, inputs, max_new_tokens=20, do_sample=False))
    assert (output.log_evidence == 0).all() == (name == "same")
    assert (output.stats.collapses == 0) == (name == "same")


def test_a_target_without_a_law_is_reported_by_name() -> None:
    target, draft = pair(1)

    class Nothing(LogitsProcessor):
        def __init__(self, at: int) -> None:
            self.at = at

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= self.at else scores

    for at in (5, 9):
        call = {"logits_processor": LogitsProcessorList([Nothing(at)])}
        with pytest.raises(ValueError, match="target model"):
            sample(target, draft, prompts((5,)), call=call, num_particles=3, num_draft_tokens=3, max_new_tokens=12)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_is_reported_by_name(role: str) -> None:
    target, draft = pair(1)

    def spoil(module: Any, args: Any, output: Any) -> Any:
        output.logits[-1] = torch.nan
        return output

    (target if role == "target" else draft).register_forward_hook(spoil)
    with pytest.raises(ValueError, match=f"the {role} model .*nan"):
        sample(target, draft, prompts((4, 6)), num_particles=3, num_draft_tokens=3, max_new_tokens=12)


# Streams, seeds, limits.


def test_streams_only_what_all_lineages_share() -> None:
    """UI-48: nothing is retracted, the rest comes at the end, and the ids are those of the returned row."""
    target, draft = pair(1)
    inputs = prompts((5,), seed=2)
    for seed, eos in ((0, None), (1, [5, 6, 7, 8])):
        streamer = Recorder()
        fields = {"num_particles": 4, "num_draft_tokens": 3, "ess_threshold": 1.0, "max_new_tokens": 40}
        call = {"streamer": streamer}
        output = sample(target, draft, inputs, seed=seed, call=call, eos_token_id=eos, **fields)
        assert streamer.ids() == output.sequences[0].tolist()
        assert streamer.ends == 1
        assert [tuple(put.shape) for put in streamer.puts] == [(1, 5)] + [(1,)] * (len(streamer.puts) - 1)
    early: list[int] = []
    streamer = Recorder()
    handle = target.register_forward_pre_hook(lambda *_: early.append(len(streamer.ids())))
    sample(target, draft, inputs, call={"streamer": streamer}, **fields)
    handle.remove()
    assert early == sorted(early)
    assert 5 < early[-1] < 45, "some tokens were settled before the end, and not all"


def test_the_seed_decides_and_the_global_generator_moves_by_one_draw() -> None:
    target, draft = pair(1)
    inputs = prompts((5, 8), seed=2)
    fields = {"num_particles": 3, "num_draft_tokens": 3, "max_new_tokens": 12}
    first = sample(target, draft, inputs, seed=5, **fields)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(2**63 - 1, ())
    assert torch.equal(torch.get_rng_state(), after)
    sample(target, draft, inputs, seed=77, **fields)
    again = sample(target, draft, inputs, seed=5, **fields)
    for name in ("sequences", "particles", "log_weights", "ess", "ancestors"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    texts = {
        tuple(sample(target, draft, inputs, seed=seed, **fields).sequences.flatten().tolist()) for seed in range(9)
    }
    assert len(texts) == 9


def test_the_drafts_temperature_is_its_own() -> None:
    target, _ = pair(1)
    inputs = prompts((5,), seed=2)
    fields = {"num_particles": 64, "num_draft_tokens": 4, "max_new_tokens": 16}
    same = draft_of(target, "same")
    for temperature in (1.0, 0.7):
        own = sample(target, same, inputs, temperature=temperature, **fields)
        assert own.log_weights.abs().max() < 1e-4
        given = sample(target, same, inputs, temperature=temperature, draft_temperature=temperature, **fields)
        assert torch.equal(given.sequences, own.sequences)
        other = sample(target, same, inputs, temperature=temperature, draft_temperature=1.5, **fields)
        assert other.stats.mean_ess < 60


def test_weights_are_zero_where_draft_and_target_are_one() -> None:
    target = tiny("llama", 1, attention="sdpa")
    output = sample(target, draft_of(target, "same"), prompts((3, 8)), num_particles=4, max_new_tokens=20)
    assert output.log_weights.abs().max() < 1e-4
    assert output.log_evidence.abs().max() < 1e-4
    assert output.stats.resamplings == 0
    assert output.stats.mean_ess == pytest.approx(4, abs=1e-6)


def test_an_uneven_population_is_reported_once() -> None:
    """UI-30 for a scheme that accepts everything: the weights show a useless draft."""
    target = tiny("llama", 1, attention="sdpa")
    inputs = prompts((5,))
    fields = {"num_particles": 8, "num_draft_tokens": 4, "max_new_tokens": 40}
    with caught() as messages:
        for seed in range(5):
            sample(target, draft_of(target, "far"), inputs, seed=seed, **fields)
    assert len([message for message in messages if "mean_ess" in message]) == 1
    with caught() as messages:
        sample(target, draft_of(target, "near", noise=0.005), inputs, **fields)
    assert messages == []


# Refused.


@pytest.mark.deprecated
@pytest.mark.filterwarnings("ignore:.*generation_config.*")
def test_greedy_decoding_is_refused_by_name() -> None:
    target, draft = pair(1)
    inputs = prompts((4,))
    config = GenerationConfig(max_new_tokens=4, do_sample=False, semspec={"scheme": "smc"})
    refuses(target, draft, inputs, '"do_sample": true', generation_config=config)
    refuses(target, draft, inputs, '"do_sample": true', generation_config=SemSpecConfig("smc"), do_sample=False)
    config = GenerationConfig(max_new_tokens=4, do_sample=True, semspec={"scheme": "smc"})
    assert target.generate(**inputs, assistant_model=draft, generation_config=config).shape == (1, 8)


def test_more_rows_than_particles_are_refused_by_name() -> None:
    target, draft = pair(1)
    config = SemSpecConfig("smc", num_particles=3, num_return_sequences=4, max_new_tokens=4)
    refuses(target, draft, prompts((4,)), "num_return_sequences=4.*num_particles", generation_config=config)


def test_foreign_drafts_are_refused() -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1)
    call = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(permute=5)}
    config = SemSpecConfig("smc", max_new_tokens=4)
    refuses(target, draft, prompts((4,)), "tokenizer", generation_config=config, **call)


# Laws, through the whole call: B copies of one prompt are B independent runs.


def toy_models(noise: float, vocab: int = 4) -> tuple[PreTrainedModel, PreTrainedModel, Inputs]:
    target = tiny("llama", 4, vocab=vocab, hidden=16, layers=1, heads=2, initializer_range=0.25, pad=None)
    draft = draft_of(target, "near", noise=noise) if noise else draft_of(target, "same")
    return (
        target,
        draft,
        {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)},
    )


def law_of(target: PreTrainedModel, inputs: Inputs, length: int, eos: int) -> dict[tuple[int, ...], float]:
    """p of every text that ends at `eos` or at `length` tokens."""
    laws = Laws(target, inputs["input_ids"][0])
    law: dict[tuple[int, ...], float] = {}

    def walk(text: tuple[int, ...], weight: float) -> None:
        if text and (text[-1] == eos or len(text) == length):
            law[text] = weight
            return
        for y, log in enumerate(laws(list(text))):
            walk((*text, y), weight * math.exp(log))

    walk((), 1.0)
    return law


def runs(noise: float, batch: int = 1000, calls: int = 2, length: int = 4, **fields: Any) -> Any:
    """Texts, log-evidences and the exact law: `calls` calls of `batch` copies of one prompt."""
    target, draft, inputs = toy_models(noise)
    law = law_of(target, inputs, length, 0)
    many = {name: value.expand(batch, -1) for name, value in inputs.items()}
    texts, evidence = [], []
    for seed in range(calls):
        output = sample(
            target,
            draft,
            many,
            seed=seed,
            max_new_tokens=length,
            eos_token_id=0,
            **{"num_particles": 4, "num_draft_tokens": 2, **fields},
        )
        for row in new_tokens(output, many).tolist():
            end = next((t + 1 for t, token in enumerate(row) if token == 0), len(row))
            texts.append(tuple(row[:end]))
        evidence.append(output.log_evidence)
    return texts, torch.cat(evidence), law


def distance(texts: list[Any], law: dict[Any, float]) -> float:
    return 0.5 * math.fsum(abs(texts.count(text) / len(texts) - p) for text, p in law.items())


@pytest.fixture(params=["log p only", "without the EOS"])
def wrong_weights(request: Any) -> Iterator[None]:
    increments = smc.log_increments

    def wrong(log_p: Any, log_q: Any, bonus: Any, kept: Any, power: float, drafted: Any) -> Any:
        if request.param == "log p only":
            return increments(log_p, log_q * 0, bonus, kept, power, drafted)
        return increments(log_p, log_q, bonus, (kept - 1).clamp(min=0), power, drafted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smc, "log_increments", wrong)
        yield


def off_by(evidence: torch.Tensor, wanted: float) -> float:
    """How many standard errors the mean of exp(log-evidence) is from `wanted`."""
    values = evidence.exp()
    return abs(float(values.mean()) - wanted) / (float(values.std()) / math.sqrt(len(values)))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_the_evidence_of_calls_is_one_on_average(threshold: float) -> None:
    _, evidence, _ = runs(0.4, ess_threshold=threshold, num_draft_tokens=1, length=5)
    assert evidence.exp().std() > 0.1, "there is something to average"
    assert off_by(evidence, 1.0) < 4


def test_wrong_weights_do_not_average_to_one(wrong_weights: None) -> None:
    _, evidence, _ = runs(0.4, length=6, num_draft_tokens=3)
    assert off_by(evidence, 1.0) > 6


def test_the_evidence_of_a_power_in_calls() -> None:
    _, evidence, law = runs(0.4, power=2.0)
    wanted = math.fsum(p**2 for p in law.values())
    assert off_by(evidence, wanted) < 4
    assert off_by(evidence, 1.0) > 6


def test_equal_models_draw_the_targets_law() -> None:
    texts, _, law = runs(0.0, batch=1500, num_particles=3)
    assert distance(texts, law) < math.sqrt(len(law) / len(texts))
    wrong, _, _ = runs(0.8, batch=1500, num_particles=1)
    assert distance(wrong, law) > math.sqrt(len(law) / len(wrong))


def test_the_output_of_calls_comes_nearer_to_the_target_with_more_particles() -> None:
    distances = []
    for number in (1, 4, 16):
        texts, _, law = runs(0.8, num_particles=number, num_draft_tokens=3)
        distances.append(distance(texts, law))
    assert distances[0] > 1.3 * distances[1] > 1.5 * distances[2], distances


def test_every_returned_row_of_a_prompt_follows_one_law() -> None:
    """No place among the k rows is better than another."""
    target, draft, inputs = toy_models(0.4)
    many = {name: value.expand(800, -1) for name, value in inputs.items()}
    fields = {"num_particles": 4, "num_draft_tokens": 2, "max_new_tokens": 3, "num_return_sequences": 3}
    output = sample(target, draft, many, **fields)
    rows = new_tokens(output, many).view(800, 3, 3)[:, :, 1].tolist()
    counts = torch.tensor([[column.count(y) for y in range(4)] for column in zip(*rows, strict=True)]) / 800
    assert (counts - counts.mean(dim=0)).abs().max() < 0.06


def test_the_defaults_are_the_papers() -> None:
    config = SMCConfig()
    assert (config.num_particles, config.num_draft_tokens, config.ess_threshold) == (8, 8, 0.5)
    assert (config.resampling, config.power, config.select) == ("systematic", 1.0, "sample")
    assert particles.RESAMPLINGS[0] == config.resampling
