"""Greedy `lossless` is `model.generate`, token for token: every shape, draft, draft length, batch and backend."""

import pytest
import torch

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, TESTING, WEAK_DRAFTS, assisted, new_tokens, plain, plain_rows
from tests.models import DRAFTS, SHAPES, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

# Not a multiple of any draft length + 1, so the last block is cut; the windows of 8 are crossed on the way.
NEW_TOKENS = 16
GAMMAS = (1, 3, 8)


def check_case(shape: str, attention: str, batch: int, seed: int) -> None:
    target = tiny(shape, seed, attention=attention)
    inputs = prompts((1 + 3 * (seed % 5),) if batch == 1 else (3, 7, 12, 5), seed=seed)
    expected = plain_rows(target, inputs, max_new_tokens=NEW_TOKENS)
    if attention == "sdpa":
        assert torch.equal(new_tokens(plain(target, inputs, max_new_tokens=NEW_TOKENS), inputs), expected)
    for kind in DRAFTS:
        draft = draft_of(target, kind, seed=seed)
        for gamma in GAMMAS:
            config = SemSpecConfig("lossless", num_draft_tokens=gamma, max_new_tokens=NEW_TOKENS)
            output = target.generate(**inputs, assistant_model=draft, generation_config=config)
            assert torch.equal(new_tokens(output, inputs), expected), f"{kind=} {gamma=}"
            assert torch.equal(output[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lossless_equals_generate(shape: str, attention: str, batch: int, seed: int) -> None:
    check_case(shape, attention, batch, seed)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lossless_equals_generate_grid(shape: str, attention: str, batch: int, seed: int) -> None:
    check_case(shape, attention, batch, seed)


def check_long(kind: str, seed: int) -> None:
    target = tiny("llama", seed)
    inputs = prompts((4,), seed=seed)
    expected = plain(target, inputs, max_new_tokens=60)
    for name in DRAFTS:
        draft = draft_of(target, name, seed=seed)
        for gamma in GAMMAS:
            output = assisted(target, draft, inputs, kind, num_draft_tokens=gamma, max_new_tokens=60)
            assert torch.equal(output, expected), f"{name=} {gamma=}"


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("kind", EXACT)
def test_ui06_exact_mode_is_plain_greedy_over_sixty_tokens(kind: str, seed: int) -> None:
    check_long(kind, seed)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", EXACT)
def test_ui06_exact_mode_is_plain_greedy_over_sixty_tokens_grid(kind: str, seed: int) -> None:
    check_long(kind, seed)


@pytest.mark.parametrize("kind", ["easd", "chains"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_exact_modes_on_every_shape(shape: str, kind: str) -> None:
    target = tiny(shape, 1, attention="sdpa")
    inputs = prompts((3, 7, 12, 5), seed=1)
    expected = plain_rows(target, inputs, max_new_tokens=NEW_TOKENS)
    for name in DRAFTS:
        output = assisted(target, draft_of(target, name), inputs, kind, num_draft_tokens=4, max_new_tokens=NEW_TOKENS)
        assert torch.equal(new_tokens(output, inputs), expected), name


@pytest.mark.parametrize("kind", [*TESTING, "parse"])
@pytest.mark.parametrize("name", DRAFTS)
def test_automatic_draft_length(kind: str, name: str) -> None:
    target = tiny("qwen3", 2)
    inputs = prompts((2, 9), seed=2)
    draft = draft_of(target, name)
    output = assisted(target, draft, inputs, kind, num_draft_tokens="auto", max_new_tokens=30)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=30))


@pytest.mark.parametrize("kind", EXACT)
def test_a_model_may_draft_for_itself(kind: str) -> None:
    target = tiny("llama", 3)
    inputs = prompts((5, 2), seed=3)
    output = assisted(target, target, inputs, kind, max_new_tokens=NEW_TOKENS)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=NEW_TOKENS))


def test_draft_of_another_architecture() -> None:
    target, draft = tiny("gemma3", 0), tiny("gpt2", 0, layers=1)
    inputs = prompts((5, 11), seed=4)
    output = assisted(target, draft, inputs, num_draft_tokens=4, max_new_tokens=NEW_TOKENS)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=NEW_TOKENS))
