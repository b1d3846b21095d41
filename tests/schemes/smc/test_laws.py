"""Laws of whole calls of `smc`, on toy models whose texts can be enumerated."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SMCConfig
from hf_semspec.schemes.smc import decode as smc
from hf_semspec.schemes.smc import weights as particles
from tests.helpers import WEAK_DRAFTS, Inputs, new_tokens
from tests.models import draft_of, tiny
from tests.schemes.smc.shared import Laws, sample

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:of .* particles hardly more")]


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
