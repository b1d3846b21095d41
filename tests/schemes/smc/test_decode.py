"""`smc` through `generate`: against the transcription, against fresh forwards, its costs, its output, its ends."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.engine.cache import RaggedCache
from hf_semspec.schemes.smc import decode as smc
from hf_semspec.schemes.smc.ends import Judged, Scored
from hf_semspec.schemes.smc.population import Particles
from hf_semspec.schemes.smc.weights import RESAMPLINGS
from tests.helpers import WEAK_DRAFTS, Forwards, check_identities
from tests.host_reads import HostReads
from tests.models import PAD, draft_of, prompts, tiny
from tests.schemes.smc import reference
from tests.schemes.smc.shared import Laws, lengths_of, pair, sample

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:of .* particles hardly more")]


class Draws:
    """Every draw of a call while it is open, for each prompt."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.firsts: dict[int, list[int]] = {}
        self.rounds: dict[int, list[Any]] = {}
        judge, resample = Particles.judge, smc.resample

        def judged(state: Particles, scored: Scored, bonus: torch.Tensor) -> Judged:
            self.live = list(state.live)
            for row, ids, ends in zip(state.live, scored.ids.tolist(), bonus.tolist(), strict=True):
                if row not in self.firsts:
                    self.firsts[row] = ends
                else:
                    self.rounds.setdefault(row, []).append([ids, ends, None])
            return judge(state, scored, bonus)

        def resampled(*args: Any) -> Any:
            for row, uniforms in zip(self.live, args[4].tolist(), strict=True):
                self.rounds[row][-1][2] = uniforms
            return resample(*args)

        patch.setattr(Particles, "judge", judged)
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
    score = Particles.draft_and_score

    def scored(state: Particles) -> Scored:
        generated = [state.canvas.generated[row] for row in state.live]
        found = score(state)
        for i, row in enumerate(state.live):
            real = slice(state.canvas.prompt_width - state.canvas.prompt_lengths[row], None)
            for n in range(state.number):
                if bool(state.finished[i, n]):
                    continue
                count = found.counts[i]
                end = state.canvas.prompt_width + generated[i] + count
                text = state.canvas.shown[row, n, :end][real][None]
                with torch.no_grad():
                    fresh = target(text).logits[0, -count - 1 :].float()
                    own = draft(text).logits[0, -count - 1 : -1].float().double().log_softmax(-1)
                gaps.append(float((found.block.scores[i, n, : count + 1] - fresh).abs().max()))
                log_q = own.gather(1, found.ids[i, n, :count, None])[:, 0]
                if count:
                    gaps.append(float((found.log_q[i, n, :count] - log_q).abs().max()))
        return found

    patch.setattr(Particles, "draft_and_score", scored)
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

            feed = Particles.draft_and_score

            def named(state: Particles, inner: Any = feed) -> Scored:
                state.rounds.target.cache.last_role, state.drafter.decoder.cache.last_role = "target", "draft"
                return inner(state)

            patch.setattr(RaggedCache, "last_role", "", raising=False)
            patch.setattr(RaggedCache, "copy_rows", forgets)
            patch.setattr(Particles, "draft_and_score", named)
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
    fields["use_cache"] = False  # the padding of a cache to return would be fed at the end
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
