"""easd as users see it: what it records, and what it leaves alone."""

import math
from typing import Any

import pytest
import torch

from hf_semspec import EASDConfig, SemSpecConfig
from hf_semspec.engine.acceptance import entropy
from tests.helpers import WEAK_DRAFTS, new_tokens, plain_rows
from tests.models import draft_of, prompts, row_of, tiny

pytestmark = WEAK_DRAFTS
OFTEN = {"target_entropy_threshold": 1.0, "draft_entropy_threshold": 1.0, "overlap_threshold": 0.3}


def run(model: Any, draft: Any, inputs: Any, scheme: Any = "easd", seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = SemSpecConfig(scheme, return_dict_in_generate=True, **{"max_new_tokens": 20, **fields})
    return model.generate(**inputs, assistant_model=draft, generation_config=config)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chains", [1, 2])
def test_a_greedy_row_is_what_it_is_alone(seed: int, chains: int) -> None:
    """Also with triggers on, and also its last tokens, where other rows still have room for longer drafts."""
    model = tiny("llama", seed, attention="sdpa", initializer_range=0.15)
    draft = draft_of(model, "near", seed=seed)
    inputs = prompts((5, 8, 3), seed=seed)
    fields = {**OFTEN, "num_draft_tokens": 4, "num_chains": chains, "max_new_tokens": 14}
    batch = run(model, draft, inputs, **fields)
    assert batch.stats.triggered > 0
    for row in range(3):
        alone = run(model, draft, row_of(inputs, row), **fields)
        assert torch.equal(new_tokens(batch, inputs)[row], alone.sequences[0, -14:])
        assert torch.equal(batch.triggers[row], alone.triggers[0])


def test_triggers_behind_the_end_are_neither_recorded_nor_counted() -> None:
    """Without an EOS a stopping criterion ends all rows at once, inside a block whose last token a trigger drew."""
    model = tiny("llama", 2)
    draft, inputs = draft_of(model, "near"), prompts((5, 3, 7))
    fields = {"trigger": "random", "trigger_rate": 0.5, "num_draft_tokens": 4, "max_new_tokens": 20}
    whole = run(model, draft, inputs, **fields)
    for length in range(2, 12):
        config = SemSpecConfig("easd", return_dict_in_generate=True, **fields)
        ends = [lambda ids, scores, width=7 + length: torch.full(ids.shape[:1], ids.shape[1] >= width)]
        torch.manual_seed(0)
        output = model.generate(**inputs, assistant_model=draft, generation_config=config, stopping_criteria=ends)
        assert output.triggers.shape == (3, length)
        assert torch.equal(output.triggers, whole.triggers[:, :length])
        assert output.stats.resampled == int(output.triggers.sum())


def test_plain_penalty_never_changes_greedy_text() -> None:
    model = tiny("llama", 1)
    draft, inputs = draft_of(model, "near"), prompts((4, 9))
    output = run(model, draft, inputs, penalty=1.0, **OFTEN)
    assert output.stats.triggered > 0
    assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=20))


def test_excluded_tokens_do_change_greedy_text() -> None:
    """The control of the test above."""
    model = tiny("llama", 1)
    draft, inputs = draft_of(model, "near"), prompts((4, 9))
    output = run(model, draft, inputs, penalty=0.0, **OFTEN)
    assert not torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=20))


@pytest.mark.parametrize("do_sample", [False, True])
def test_recorded_entropies_are_those_of_the_text(do_sample: bool) -> None:
    model = tiny("llama", 2)
    draft, inputs = draft_of(model, "near"), prompts((4, 9), seed=2)
    output = run(model, draft, inputs, do_sample=do_sample, top_k=0, **OFTEN)
    for row in range(2):
        ids = torch.cat([row_of(inputs, row)["input_ids"][0], new_tokens(output, inputs)[row]])
        for one, recorded in ((model, output.target_entropies), (draft, output.draft_entropies)):
            with torch.no_grad():
                logits = one(input_ids=ids[None]).logits[0, -21:-1].float()
            expected = entropy(logits.log_softmax(dim=-1))
            known = ~recorded[row].isnan()
            assert known.any()
            assert torch.allclose(recorded[row][known], expected[known], atol=1e-5)
    assert bool((output.target_entropies[output.triggers] >= 1.0).all())
    assert bool((output.draft_entropies[output.triggers] >= 1.0).all())
    known = ~output.target_entropies.isnan()
    assert output.stats.mean_target_entropy == pytest.approx(float(output.target_entropies[known].mean()), rel=1e-6)


def test_random_triggers_come_at_their_rate_and_leave_other_draws_alone() -> None:
    model = tiny("llama", 3)
    inputs = prompts((6,) * 8)
    control = {"trigger": "random", "max_new_tokens": 60, "num_draft_tokens": 4}
    rates = [run(model, model, inputs, trigger_rate=rate, **control).stats for rate in (0.0, 0.25)]
    assert rates[0].triggered == 0
    passed = rates[1].accepted + rates[1].triggered
    assert abs(rates[1].trigger_rate - 0.25) < 4 * math.sqrt(0.25 * 0.75 / passed)
    sampled = {"do_sample": True, "max_new_tokens": 30}
    lossless = run(model, draft_of(model, "near"), inputs, "lossless", verification="token", **sampled)
    never = run(model, draft_of(model, "near"), inputs, trigger="random", trigger_rate=0.0, **sampled)
    assert torch.equal(lossless.sequences, never.sequences)


def test_other_sampling_settings_than_the_calibrated_ones_warn_once() -> None:
    model = tiny("llama", 5)
    inputs = prompts((5,))
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    config = EASDConfig(calibrated_for=settings)
    with pytest.warns(UserWarning, match="temperature") as caught:
        for _ in range(2):
            run(model, model, inputs, config, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    assert len(caught) == 1
    run(model, model, inputs, config, **settings)
