"""A real language model on real prompts: SmolLM2-135M-Instruct on the first eight questions of GSM8K's test set."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_semspec import EASDConfig, SemSpecConfig, calibrate_easd, load_draft
from hf_semspec.tools.models import load_smollm2
from tests.questions import questions

NEW_TOKENS = 24
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def smollm2() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """The float32 model, its bfloat16 copy and the tokenizer."""
    model, tokenizer = load_smollm2()
    return model, load_draft(model, dtype=torch.bfloat16), tokenizer


def plain(model: PreTrainedModel, inputs: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


def assert_equal_up_to_near_ties(name: str, mine: torch.Tensor, reference: Any, row: int, width: int) -> None:
    """`mine` equals plain greedy text, or first differs where the target's two best logits are within `NEAR_TIE`."""
    expected = reference.sequences[row, width:]
    length = max(len(mine), len(expected))
    differs = next((t for t in range(length) if mine[t : t + 1].tolist() != expected[t : t + 1].tolist()), None)
    if differs is None:
        return
    best = reference.logits[differs][row].topk(2).values
    gap = float(best[0] - best[1])
    print(f"{name}: first difference at new token {differs}, gap of the two best logits {gap:.2e}")
    assert gap <= NEAR_TIE


def test_greedy_lossless_equals_plain_on_gsm8k(smollm2: Any) -> None:
    model, draft, tokenizer = smollm2
    config = SemSpecConfig(
        "lossless", num_draft_tokens=4, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True
    )
    alone = []
    for index, text in enumerate(questions(tokenizer)):
        inputs = tokenizer(text, return_tensors="pt")
        reference = plain(model, inputs)
        output = model.generate(**inputs, assistant_model=draft, generation_config=config)
        width = inputs["input_ids"].shape[1]
        assert_equal_up_to_near_ties(f"prompt {index}", output.sequences[0, width:], reference, 0, width)
        assert output.stats.target_forwards < NEW_TOKENS / 2
        alone.append(reference)
    inputs = tokenizer(questions(tokenizer), return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, assistant_model=draft, generation_config=config)
    width = inputs["input_ids"].shape[1]
    for row, reference in enumerate(alone):
        own = reference.sequences.shape[1] - len(reference.logits)
        mine = output.sequences[row, width : width + len(reference.logits)]
        assert_equal_up_to_near_ties(f"row {row} of the batch", mine, reference, 0, own)


def test_calibrated_easd_runs_on_gsm8k(smollm2: Any) -> None:
    model, draft, tokenizer = smollm2
    texts = questions(tokenizer)
    calibration = calibrate_easd(
        model, draft, texts[:2], percentile=75, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, progress=False
    )
    config = SemSpecConfig(
        calibration.config, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True
    )
    assert isinstance(config.scheme_config, EASDConfig)
    inputs = tokenizer(texts[2], return_tensors="pt")
    output = model.generate(**inputs, assistant_model=draft, generation_config=config)
    assert 0 < output.stats.trigger_rate < 1
    assert int(output.triggers.sum()) > 0
