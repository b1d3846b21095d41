"""The seam: plain `generate` is what it was before, between and after; `unregister` puts every original back."""

import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.pipelines import base as pipelines_base

import hf_semspec
from hf_semspec import DecodingStats, SemSpecConfig, SemSpecOutput, record_stats, register, unregister
from tests.helpers import EXACT, SINGLE, WEAK_DRAFTS, Forwards, assisted, exact, plain
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def everything(output: Any) -> list[torch.Tensor]:
    return [output.sequences, *output.scores, *output.logits]


def plain_calls(target: Any, draft: Any) -> list[torch.Tensor]:
    """Greedy, sampled and stock assisted decoding (itself a user of deprecated calls), with all their forwards."""
    found = []
    fields = {"max_new_tokens": 8, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    with Forwards(target, draft) as spy:
        found += everything(plain(target, prompts((4,)), **fields))
        torch.manual_seed(1)
        found += everything(plain(target, prompts((4, 6)), do_sample=True, **fields))
        found += everything(plain(target, prompts((4,)), call={"assistant_model": draft}, **fields))
        found += [torch.get_rng_state(), torch.tensor(spy.shapes)]
    return found


@pytest.mark.deprecated
def test_plain_generate_is_the_same_before_between_and_after() -> None:
    target = tiny("llama", 0, attention="sdpa")
    draft = draft_of(target, "near")
    unregister()
    try:
        runs = [plain_calls(target, draft)]
    finally:
        register()
    runs.append(plain_calls(target, draft))
    for kind in EXACT:
        assisted(target, draft, prompts((4, 6)), kind, max_new_tokens=8)
        runs.append(plain_calls(target, draft))
    unregister()
    try:
        runs.append(plain_calls(target, draft))
    finally:
        register()
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(runs[0], run, strict=True))


def patched() -> dict[str, Any]:
    """Everything in transformers that `register` touches."""
    found = {f"GenerationMixin.{name}": value for name, value in vars(GenerationMixin).items()}
    found |= {f"GenerationConfig.{name}": value for name, value in vars(GenerationConfig).items()}
    found |= {f"pipelines.{name}": value for name, value in vars(pipelines_base).items()}
    found |= {f"mode.{name}": value for name, value in GENERATION_MODES_MAPPING.items()}
    return found


def test_register_is_idempotent_and_unregister_restores_every_original() -> None:
    with_us = patched()
    register()
    assert patched() == with_us
    unregister()
    try:
        without = patched()
        unregister()
        assert patched() == without
    finally:
        register()
    added = with_us.keys() - without.keys()
    changed = {name for name in without if with_us.get(name) is not without[name]}
    assert added == {"mode.semspec", "GenerationMixin._semspec_decoding"}
    assert {"GenerationConfig.get_generation_mode", "GenerationMixin._validate_generation_mode"} < changed
    encodes = "GenerationMixin._maybe_prepare_encoder_kwargs_for_generation"  # since 5.24
    assert len(changed) == 4 + (encodes in without)
    assert all(
        getattr(value, "__module__", "").startswith("transformers")
        for name, value in without.items()
        if name in changed
    )
    again = patched()
    assert again.keys() == with_us.keys()


@pytest.mark.deprecated
def test_without_the_seam_a_scheme_config_is_no_trap() -> None:
    """Once unregistered, stock ignores the key and decodes with its own assisted loop."""
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    expected = plain(target, prompts((4,)), max_new_tokens=8)
    unregister()
    try:
        with record_stats() as stats:
            output = assisted(target, draft, prompts((4,)), max_new_tokens=8)
    finally:
        register()
    assert torch.equal(output, expected)
    assert stats == []


@pytest.mark.parametrize("scheme", SINGLE)
def test_the_output_is_generates_with_stats_beside_it(scheme: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    output = assisted(target, draft, prompts((4, 6)), scheme, max_new_tokens=8, return_dict_in_generate=True)
    assert isinstance(output, SemSpecOutput)
    assert isinstance(output.stats, DecodingStats)
    assert output.stats.scheme == scheme
    assert set(output.keys()) == set(
        plain(target, prompts((4, 6)), max_new_tokens=8, return_dict_in_generate=True).keys()
    )
    assert output.scores is None
    assert output.logits is None
    if scheme == "easd":
        assert output.triggers.shape == (2, 8)
        assert not output.triggers.any()


def test_record_stats_sees_every_call_that_starts_inside_from_any_thread() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")

    def call() -> None:
        assisted(target, draft, prompts((4,)), max_new_tokens=5)

    with record_stats() as outer:
        call()
        with record_stats() as inner:
            threads = [threading.Thread(target=call) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        call()
        plain(target, prompts((4,)), max_new_tokens=5)
    call()
    assert (len(outer), len(inner)) == (5, 3)
    assert all(stats.emitted == 5 for stats in outer)


def test_dispatch_is_on_the_key_not_on_the_class() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    config = GenerationConfig(max_new_tokens=8, semspec=exact("lossless").semspec)
    with record_stats() as stats:
        target.generate(**prompts((4,)), assistant_model=draft, generation_config=config)
    assert len(stats) == 1
    assert type(SemSpecConfig("lossless").semspec) is dict


def test_public_names() -> None:
    assert hf_semspec.__all__ == sorted(hf_semspec.__all__)
    assert all(hasattr(hf_semspec, name) for name in hf_semspec.__all__)


@pytest.mark.parametrize("place", ["model", "call"])
@pytest.mark.parametrize("kind", EXACT)
def test_b14_token_healing_decodes_its_one_token_plainly(kind: str, place: str) -> None:
    """`generate` calls itself there, without the draft, under the model's own generation config."""
    target, words = tiny("llama", 0), tokenizer()
    words.bos_token = "<eos>"
    ids = words("Hello <", return_tensors="pt")["input_ids"]
    call = {"tokenizer": words, "token_healing": True}
    expected = target.generate(ids, max_new_tokens=6, **call)
    draft = draft_of(target, "near")
    if place == "model":
        target.generation_config = exact(kind, max_new_tokens=6)
        assert torch.equal(target.generate(ids, semspec=None, **call), expected)
        assert torch.equal(target.generate(ids, assistant_model=draft, **call), expected)
    else:
        scheme = exact(kind, max_new_tokens=6, token_healing=True)
        output = target.generate(ids, assistant_model=draft, tokenizer=words, generation_config=scheme)
        assert torch.equal(output, expected)
