"""Drafts of pipelines: by name, quantized, with other end tokens, of another model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, pipeline
from transformers.pipelines import base as pipelines_base

from hf_semspec import SemSpecConfig, load_draft, record_stats
from tests.encoder_models import speech, whisper
from tests.helpers import TESTING, WEAK_DRAFTS, assisted, plain, plain_rows
from tests.models import draft_of, tiny, tokenizer

pytestmark = WEAK_DRAFTS


def quantizable(folder: Path, seed: int = 0) -> PreTrainedModel:
    """A float32 target; its unquantized copy, with a tokenizer, is saved to `folder`."""
    target = tiny("llama", seed, hidden=64, dtype=torch.float32)
    target.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return target


@pytest.mark.quantized
@pytest.mark.deprecated
def test_ui27_a_quantized_draft_given_by_name_to_a_pipeline(tmp_path: Path) -> None:
    """Stock casts it, which a 4-bit model refuses."""
    pytest.importorskip("bitsandbytes")
    target = quantizable(tmp_path / "full")
    folder = tmp_path / "nf4"
    load_draft(str(tmp_path / "full"), quantization="nf4").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    target.generation_config.semspec = {"scheme": "lossless", "num_draft_tokens": 3}
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=str(folder))
    with record_stats() as stats:
        written = pipe("Hello", max_new_tokens=12, do_sample=False)
    assert stats[0].accepted > 0
    target.generation_config.semspec = None
    assert written == pipeline("text-generation", model=target, tokenizer=tokenizer())(
        "Hello", max_new_tokens=12, do_sample=False
    )


def chat_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target with a list of EOS ids, as chat models have, and a base draft with one."""
    target = tiny("llama", 0, eos=[2, 7])
    draft = draft_of(target, "near")
    draft.config.eos_token_id = draft.generation_config.eos_token_id = 2
    target.generation_config.semspec = {"scheme": "lossless", "num_draft_tokens": 3}
    return target, draft


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("kind", TESTING)
@pytest.mark.deprecated
def test_ui26_pipeline_of_a_chat_target_and_a_base_draft(kind: str, with_tokenizer: bool) -> None:
    target, draft = chat_pair()
    target.generation_config = SemSpecConfig.from_dict({**target.generation_config.to_dict(), **semspec_of(kind)})
    extra: dict[str, Any] = {"assistant_tokenizer": tokenizer()} if with_tokenizer else {}
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft, **extra)
    with record_stats() as stats:
        written = pipe("Hello", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert len(stats) == 1
    assert stats[0].draft_forwards > 0
    ids = tokenizer()("Hello", return_tensors="pt")
    inputs = {"input_ids": ids.input_ids, "attention_mask": ids.attention_mask}
    target.generation_config.semspec = None
    expected = plain_rows(target, inputs, max_new_tokens=12, eos_token_id=[2, 7])[0]
    assert written == tokenizer().decode(expected, skip_special_tokens=True)


def semspec_of(kind: str) -> dict[str, Any]:
    from tests.helpers import exact

    return {"semspec": exact(kind).semspec}


@pytest.mark.deprecated
def test_ui26_pipeline_with_a_draft_given_by_name(tmp_path: Path) -> None:
    target, draft = chat_pair()
    draft.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=str(tmp_path))
    with record_stats() as stats:
        by_name = pipe("Hello", max_new_tokens=12, do_sample=False)
    assert len(stats) == 1
    assert by_name == pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft)(
        "Hello", max_new_tokens=12, do_sample=False
    )


def test_ui26_a_pipeline_of_really_different_models_is_still_refused() -> None:
    """The wrapper acts only where the vocabulary is the same; any other refusal of stock's stands."""
    target, _ = chat_pair()
    with pytest.raises(ValueError, match="tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=tiny("llama", 1, vocab=3000))


@pytest.mark.quantized
@pytest.mark.deprecated
def test_b13_a_quantized_draft_by_name_is_of_the_class_it_was_saved_as(tmp_path: Path) -> None:
    """A decoder without its encoder reads nothing of the source."""
    pytest.importorskip("bitsandbytes")
    target = whisper(cross=64).float()
    target.save_pretrained(tmp_path / "full")
    small = BitsAndBytesConfig(load_in_4bit=True)
    type(target).from_pretrained(tmp_path / "full", quantization_config=small, device_map="cpu").save_pretrained(
        tmp_path / "nf4"
    )
    tokenizer().save_pretrained(tmp_path / "nf4")
    draft, _ = pipelines_base.load_assistant_model(target, str(tmp_path / "nf4"), None)
    assert type(draft) is type(target)
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in speech(1).items()}
    output = assisted(target, draft, inputs, max_new_tokens=8)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=8))
