"""Adapters that PEFT binds to rows, or to places in a prompt, for one call."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.helpers import WEAK_DRAFTS, exact, new_tokens, plain
from tests.models import draft_of, prompts, tiny, tokenizer

RENAMED = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
pytestmark = [pytest.mark.seam, WEAK_DRAFTS, RENAMED]


def adapted(**fields: Any) -> Any:
    """A tiny Llama with a LoRA adapter "a" that changes its text."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM", **fields)
    model = get_peft_model(tiny("llama", 0, attention="sdpa"), config, adapter_name="a").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 2.0, generator=torch.Generator().manual_seed(1))
    return model


def write(model: Any, draft: PreTrainedModel, inputs: Any, kind: str, **call: Any) -> Any:
    config = exact(kind, max_new_tokens=12)
    words = {"tokenizer": tokenizer()} if kind == "parse" else {}
    return model.generate(**inputs, **words, assistant_model=draft, generation_config=config, **call)


@pytest.mark.parametrize("kind", ["lossless", "easd"])
@pytest.mark.parametrize("name", ["a", "__base__"])
def test_the_adapter_of_a_single_prompt_counts(kind: str, name: str) -> None:
    model, inputs = adapted(), prompts((5,))
    expected = model.generate(**inputs, adapter_names=[name], max_new_tokens=12, do_sample=False)
    output = write(model, draft_of(tiny("llama", 0), "near"), inputs, kind, adapter_names=[name])
    assert torch.equal(output, expected)
    with model.disable_adapter():
        base = plain(model, inputs, max_new_tokens=12)
    assert torch.equal(new_tokens(base, inputs), new_tokens(output, inputs)) == (name == "__base__")


@pytest.mark.parametrize("kind", ["lossless", "easd", "chains", "smc", "parse", "semantic"])
def test_adapters_bound_to_rows_are_refused_by_name(kind: str) -> None:
    model, draft = adapted(), tiny("llama", 0)
    with pytest.raises(ValueError, match="adapter_names assigns an adapter to each row"):
        write(model, draft, prompts((5, 5)), kind, adapter_names=["a", "__base__"])
    if kind not in ("lossless", "easd"):
        with pytest.raises(ValueError, match="adapter_names assigns an adapter to each row"):
            write(model, draft, prompts((5,)), kind, adapter_names=["a"])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["lossless", "chains", "smc", "parse", "semantic"])
def test_adapters_bound_to_a_place_are_refused_by_name(kind: str) -> None:
    inputs = prompts((5,))
    model = adapted(alora_invocation_tokens=inputs["input_ids"][0, 2:4].tolist())
    with pytest.raises(ValueError, match="alora_offsets switches an adapter on"):
        write(model, tiny("llama", 0), inputs, kind)


def test_one_adapter_for_the_call_works() -> None:
    model, inputs = adapted(), prompts((5, 5))
    config = SemSpecConfig("lossless", max_new_tokens=12)
    draft = draft_of(tiny("llama", 0), "near")
    expected = plain(model, inputs, max_new_tokens=12)
    assert torch.equal(model.generate(**inputs, assistant_model=draft, generation_config=config), expected)
