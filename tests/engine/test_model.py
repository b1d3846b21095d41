"""Models as they come: wrapped, as a training left them, of two dtypes, with hooks, on two devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers import EXACT, WEAK_DRAFTS, Forwards, assisted, new_tokens, plain, plain_rows
from tests.models import draft_of, prompts, tiny

pytestmark = WEAK_DRAFTS


class Wrapper(torch.nn.Module):
    """As PEFT wraps a model: not a PreTrainedModel, everything else of the model reached through it, keywords only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model
        self.eval()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, **kwargs: Any) -> Any:
        return self.base_model(**kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self.base_model.generate(**kwargs)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("wrapped", ["target", "draft", "both"])
def test_ui29_wrapped_models_work_by_keyword(kind: str, wrapped: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 8))
    expected = plain_rows(target, inputs, max_new_tokens=15)
    outer = Wrapper(target) if wrapped != "draft" else target
    inner = Wrapper(draft) if wrapped != "target" else draft
    output = assisted(outer, inner, inputs, kind, max_new_tokens=15)  # type: ignore[arg-type]
    assert torch.equal(new_tokens(output, inputs), expected)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("where", ["target", "draft", "both", "call"])
def test_ui29_use_cache_left_off_by_training(kind: str, where: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 8))
    expected = plain_rows(target, inputs, max_new_tokens=15)
    off = {"target": [target], "draft": [draft], "both": [target, draft], "call": []}[where]
    for model in off:
        model.config.use_cache = model.generation_config.use_cache = False
    fields = {"use_cache": False} if where == "call" else {}
    output = assisted(target, draft, inputs, kind, max_new_tokens=15, **fields)
    assert torch.equal(new_tokens(output, inputs), expected)
    assert all(model.config.use_cache is False for model in off)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(
    ("target_dtype", "draft_dtype"), [(torch.float64, torch.bfloat16), (torch.float32, torch.float64)]
)
def test_ui32_models_of_different_dtypes(kind: str, target_dtype: torch.dtype, draft_dtype: torch.dtype) -> None:
    target = tiny("llama", 0, dtype=target_dtype)
    draft = tiny("llama", 0, dtype=draft_dtype)
    inputs = prompts((3, 8))
    output = assisted(target, draft, inputs, kind, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))
    assert output.stats.acceptance_rate > 0.5
    assert (target.dtype, draft.dtype) == (target_dtype, draft_dtype)


@pytest.mark.parametrize("kind", EXACT)
def test_ui32_half_precision_target(kind: str) -> None:
    """A bfloat16 target may leave plain decoding's text only where its two best tokens are nearly tied."""
    target, draft = tiny("llama", 0, dtype=torch.bfloat16), tiny("llama", 0, dtype=torch.float32)
    inputs = prompts((6,))
    fields = {"max_new_tokens": 20, "output_logits": True, "return_dict_in_generate": True}
    expected = plain(target, inputs, **fields)
    output = assisted(target, draft, inputs, kind, **fields)
    different = new_tokens(output, inputs)[0] != new_tokens(expected, inputs)[0]
    if different.any():
        best = expected.logits[int(different.int().argmax())][0].topk(2).values
        assert best[0] - best[1] < 0.1


@pytest.mark.parametrize("kind", EXACT)
def test_ui32_models_are_called_through_their_hooks(kind: str) -> None:
    """Both as PyTorch registers hooks and as accelerate does, which replaces `forward`."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counter(ModelHook):
        calls = 0

        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 8))
    expected = plain_rows(target, inputs, max_new_tokens=15)
    counters = Counter(), Counter()
    for model, counter in zip((target, draft), counters, strict=True):
        add_hook_to_module(model, counter)
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(target, draft, inputs, kind, max_new_tokens=15, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, inputs), expected)
    assert counters[0].calls == of_target.calls == output.stats.target_forwards > 0
    assert counters[1].calls == of_draft.calls == output.stats.draft_forwards > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("split", [False, True])
def test_ui32_models_on_different_devices(kind: str, split: bool, tmp_path: Path) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 8))
    expected = plain_rows(target, inputs, max_new_tokens=15)
    if split:
        target.save_pretrained(tmp_path)
        places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu"}
        places |= {"model.norm": "cpu", "model.rotary_emb": 0, "lm_head": "cpu"}
        target = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, dtype=torch.float64)
    else:
        target = target.cuda()
    on_device = {name: value.cuda() for name, value in inputs.items()}
    output = assisted(target, draft, on_device, kind, max_new_tokens=15)
    assert output.device.type == "cuda"
    assert torch.equal(new_tokens(output, inputs).cpu(), expected)
