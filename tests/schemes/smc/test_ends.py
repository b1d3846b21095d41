"""How calls of `smc` end, collapse, stream and refuse."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_semspec import SemSpecConfig
from tests.helpers import WEAK_DRAFTS, Forwards, Recorder, caught, check_identities, plain, refuses
from tests.models import PAD, VOCAB, draft_of, prompts, tiny, tokenizer
from tests.schemes.smc.shared import Laws, lengths_of, pair, sample

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:of .* particles hardly more")]


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


class EndsAt(LogitsProcessor):
    """Leaves row `i` the id `eos` alone once it has `widths[i]` columns, and nowhere else."""

    def __init__(self, widths: list[int], eos: int) -> None:
        self.widths, self.eos = widths, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = torch.tensor(self.widths).eq(input_ids.shape[1])[:, None]
        is_eos = torch.arange(scores.shape[1]).eq(self.eos)
        return scores.masked_fill(is_eos != last, -torch.inf)


def test_a_prompt_whose_particles_are_all_finished_leaves_the_batch() -> None:
    target, draft = pair(1)
    inputs = prompts((4, 8), seed=2)
    call = {"logits_processor": LogitsProcessorList([EndsAt([8 + 5, 8 + 21], 96)])}
    fields = {"num_particles": 3, "num_draft_tokens": 3, "max_new_tokens": 30, "eos_token_id": 96, "use_cache": False}
    with Forwards(target) as spy:
        output = sample(target, draft, inputs, call=call, **fields)
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


def test_best_says_where_it_returns_a_particle_without_weight() -> None:
    """Three particles of which fewer have weight at the end, and three are asked for; a drawn one always has some."""
    target, draft = pair(1, noise=0.05)
    inputs = prompts((3, 8), seed=2)
    fields = {"num_particles": 3, "num_return_sequences": 3, "num_draft_tokens": 4, "max_new_tokens": 8, "top_k": 5}
    for select, returned in (("best", True), ("sample", False)):
        with caught() as messages:
            output = sample(target, draft, inputs, select=select, ess_threshold=0.0, **fields)
        assert (output.log_weights == -torch.inf).any()
        lost = int((output.sequence_log_weights == -torch.inf).sum())
        assert (lost > 0) == returned
        told = [message for message in messages if "without weight" in message]
        assert len(told) == returned
        assert not told or told[0].startswith(f"{lost} of the 6 rows")
