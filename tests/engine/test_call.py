"""What a call takes from its surroundings and leaves there: generators, threads, models in training."""

import threading
from typing import Any

import pytest
import torch

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, WEAK_DRAFTS, Forwards, assisted, exact, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def sampled(seed: int, kind: str, **fields: Any) -> torch.Tensor:
    target = tiny("llama", 0)
    torch.manual_seed(seed)
    return assisted(
        target, draft_of(target, "near"), prompts((5, 8)), kind, max_new_tokens=12, **{"do_sample": True, **fields}
    )


@pytest.mark.parametrize("kind", EXACT)
def test_ui54_the_seed_decides_the_tokens(kind: str) -> None:
    first = sampled(1, kind)
    sampled(77, kind)
    assert torch.equal(sampled(1, kind), first), "an unrelated call in between changes nothing"
    assert len({tuple(sampled(seed, kind).flatten().tolist()) for seed in range(10)}) > 3


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", [*EXACT, "random"])
def test_ui54_the_global_generator_moves_by_one_draw(kind: str, do_sample: bool) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    torch.manual_seed(5)
    torch.randint(2**63 - 1, ())
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    if kind == "random":
        config = SemSpecConfig("easd", trigger="random", trigger_rate=0.5, max_new_tokens=12, do_sample=do_sample)
        target.generate(**prompts((5, 8)), assistant_model=draft, generation_config=config)
    else:
        assisted(target, draft, prompts((5, 8)), kind, max_new_tokens=12, do_sample=do_sample)
    assert torch.equal(torch.get_rng_state(), expected)


def test_easd_in_exact_mode_is_lossless_bit_for_bit() -> None:
    for chains in (1, 3):
        fields = {"num_chains": chains, "num_draft_tokens": 4}
        for seed in range(3):
            lossless = sampled(seed, "lossless", verification="token", **fields)
            assert torch.equal(lossless, sampled(seed, "easd", **fields))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", ["near", "itself"])
def test_ui55_threads_may_share_the_models(kind: str, name: str) -> None:
    target = tiny("llama", 0)
    draft = target if name == "itself" else draft_of(target, name)
    inputs = [prompts((3 + i, 2 * i + 1), seed=i) for i in range(4)]
    serial = [plain_rows(target, one, max_new_tokens=20) for one in inputs]
    results: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(2):
            output = assisted(target, draft, inputs[index], kind, num_draft_tokens=2 + index, max_new_tokens=20)
            results[index] = new_tokens(output, inputs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(results, serial, strict=True))


@pytest.mark.parametrize("kind", EXACT)
def test_ui59_models_in_training_stay_so_and_new_weights_count_at_once(kind: str) -> None:
    target = tiny("llama", 0).train()
    draft = draft_of(target, "near").train()
    inputs = prompts((5, 8))
    expected = plain_rows(target, inputs, max_new_tokens=12)
    fields = {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    output = assisted(target, draft, inputs, kind, **fields)
    assert torch.equal(new_tokens(output, inputs), expected)
    assert all(part.training for model in (target, draft) for part in model.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())
    assert not any(scores.requires_grad for scores in output.scores)
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.roll(1, dims=0))
    changed = plain_rows(target, inputs, max_new_tokens=12)
    assert not torch.equal(changed, expected)
    assert torch.equal(new_tokens(assisted(target, draft, inputs, kind, **fields), inputs), changed)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_ui59_no_forward_records_a_graph(kind: str, hooked: bool) -> None:
    """Models with hooks of their own, like quantized ones, do not run in inference mode; no gradients there either."""
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            return super().forward(states)

    for part in (target, draft):
        part.lm_head.__class__ = Watched
        if hooked:
            part.register_forward_pre_hook(lambda *_: None)
    with torch.enable_grad():
        assisted(target, draft, prompts((5, 8)), kind, max_new_tokens=8)
        assert torch.is_grad_enabled()
    assert len(seen) > 4
    assert not any(seen)


@pytest.mark.parametrize("kind", EXACT)
def test_ui59_calls_leave_modes_configs_and_attention_as_they_were(kind: str) -> None:
    target = tiny("gemma3", 0, attention="eager")
    draft = draft_of(target, "near")
    before = [(part.config.to_dict(), part.generation_config.to_dict(), part.training) for part in (target, draft)]
    config = exact(kind, max_new_tokens=8)
    own = config.to_dict()
    with Forwards(target) as spy:
        target.generate(
            **prompts((5,)), assistant_model=draft, generation_config=config, tokenizer=tokenizer(chat=True)
        )
    assert spy.calls > 0
    assert [(p.config.to_dict(), p.generation_config.to_dict(), p.training) for p in (target, draft)] == before
    assert [part.config._attn_implementation for part in (target, draft)] == ["eager", "eager"]
    assert config.to_dict() == own
