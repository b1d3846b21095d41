"""Targets and drafts with adapters, by the real PEFT: what `load_draft` makes of them, and decoding through them."""

import sys
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import load_draft
from hf_semspec.drafts.weights import _storages, own_bytes
from tests.helpers import EXACT, WEAK_DRAFTS, assisted, check_identities, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny

peft = pytest.importorskip("peft")
BaseTunerLayer = pytest.importorskip("peft.tuners.tuners_utils").BaseTunerLayer
# PEFT itself asks for what transformers 5.24 has renamed.
RENAMED = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
pytestmark = [WEAK_DRAFTS, RENAMED]

IDS = torch.arange(2, 12)[None]


def lora(**fields: Any) -> Any:
    """Adapters that change what the model computes from the start."""
    targets = {"target_modules": ["q_proj", "v_proj", "up_proj"], **fields}
    return peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM", **targets)


def base(**fields: Any) -> PreTrainedModel:
    return tiny(layers=3, dtype=torch.float32, **fields)


def adapted(how: str = "wrapped", **fields: Any) -> Any:
    model = base()
    if how == "wrapped":
        return peft.get_peft_model(model, lora(**fields)).eval()
    return peft.inject_adapter_in_model(lora(**fields), model).eval()


def snapshot(model: torch.nn.Module) -> Any:
    return (
        [(name, type(module), module.training) for name, module in model.named_modules()],
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )


def same(first: Any, second: Any) -> bool:
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize("how", ["wrapped", "injected"])
def test_a_copy_has_the_adapters_merged_and_the_target_keeps_its_own(how: str) -> None:
    target = adapted(how)
    before, logits = snapshot(target), target(IDS).logits
    draft = load_draft(target, dtype=torch.float64)
    assert not any("lora" in name for name, _ in draft.named_parameters())
    assert torch.allclose(draft(IDS).logits.float(), logits, atol=1e-3)
    assert not torch.allclose(logits, base()(IDS).logits, atol=0.1), "the adapters change nothing"
    assert not _storages(draft).keys() & _storages(target).keys()
    assert same(snapshot(target), before)
    assert torch.equal(target(IDS).logits, logits)


def test_adapters_that_are_off_are_not_merged_and_of_two_the_active_one() -> None:
    target = adapted()
    target.add_adapter("other", lora(target_modules=["o_proj"]))
    with target.disable_adapter():
        assert torch.allclose(
            load_draft(target, dtype=torch.float64)(IDS).logits.float(), base()(IDS).logits, atol=1e-3
        )
    for name in ("default", "other"):
        target.set_adapter(name)
        draft = load_draft(target, dtype=torch.float64)
        assert torch.allclose(draft(IDS).logits.float(), target(IDS).logits, atol=1e-3), name


def test_modules_that_were_trained_whole_are_taken() -> None:
    target = adapted(modules_to_save=["lm_head"])
    with torch.no_grad():
        target.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    draft = load_draft(target, dtype=torch.float64)
    assert torch.allclose(draft(IDS).logits.float(), target(IDS).logits, atol=1e-3)


@pytest.mark.quantized
def test_a_quantized_copy_is_one_of_the_adapted_target() -> None:
    pytest.importorskip("bitsandbytes")
    target = peft.get_peft_model(tiny(hidden=64, dtype=torch.float32), lora()).eval()
    before = snapshot(target)
    merged = load_draft(target, dtype=torch.bfloat16).float()
    draft = load_draft(target, quantization="nf4")
    again = load_draft(merged, quantization="nf4")
    assert torch.nn.functional.cosine_similarity(draft(IDS).logits, again(IDS).logits, dim=-1).median() > 0.98
    assert same(snapshot(target), before)


@pytest.mark.parametrize("how", ["wrapped", "injected"])
def test_first_layers_share_the_adapters(how: str) -> None:
    target = adapted(how)
    before = snapshot(target)
    draft = load_draft(target, layers=2)
    assert own_bytes(draft, target) < 200
    assert same(snapshot(target), before)
    logits = draft(IDS).logits
    cut = load_draft(load_draft(target, dtype=torch.float64), layers=2)
    assert torch.allclose(logits, cut(IDS).logits.float(), atol=1e-3)
    # Switched off at the target, they are off in the draft.
    plain_cut = load_draft(base(), layers=2)(IDS).logits
    if how == "wrapped":
        with target.disable_adapter():
            off = draft(IDS).logits
    else:
        for module in target.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(False)
        off = draft(IDS).logits
    assert torch.allclose(off, plain_cut, atol=1e-4)
    assert not torch.allclose(off, logits, atol=0.1)


def test_an_adapter_in_the_prompt_is_refused() -> None:
    target = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    for form in ({"layers": 2}, {"dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"\(PromptTuningConfig\) puts tokens in front of the prompt"):
            load_draft(target, **form)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_ui29_an_adapter_in_the_prompt_is_refused_by_name(role: str) -> None:
    """Its tokens stand in no id that we are given, so the text would silently be another."""
    models: dict[str, Any] = {"target": base(), "draft": base()}
    tuning = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    models[role] = peft.get_peft_model(models[role], tuning).eval()
    with pytest.raises(ValueError, match=rf"the {role} model .* adapter in its prompt \(PromptTuningConfig\)"):
        assisted(models["target"], models["draft"], prompts((3, 8)), max_new_tokens=4)
    # The method that PEFT lends to the model inside is gone again, and with it the refusal.
    inner = models["target"].get_base_model() if role == "target" else models["target"]
    assert assisted(inner, base(), prompts((3, 8)), max_new_tokens=4).shape == (2, 12)


def test_adapters_that_cannot_be_merged_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = adapted()
    before = snapshot(target)
    layer = type(target.base_model.model.model.layers[0].mlp.up_proj)

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(layer, "merge", refuse)
    with pytest.raises(ValueError, match=r"cannot be merged.*merge_and_unload.*layers="):
        load_draft(target, dtype=torch.bfloat16)
    assert same(snapshot(target), before)
    assert load_draft(target, layers=2)(IDS).logits.isfinite().all()


def test_an_error_while_copying_leaves_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = adapted()
    before = snapshot(target)
    monkeypatch.setattr("hf_semspec.drafts.load._unshare", lambda draft, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_draft(target, dtype=torch.bfloat16)
    assert same(snapshot(target), before)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("wrapped", ["target", "draft", "both"])
def test_ui29_peft_models_decode_through_their_wrapper(kind: str, wrapped: str) -> None:
    target: Any = tiny(layers=2)
    draft: Any = draft_of(target, "near")
    inputs = prompts((3, 8))
    if wrapped != "draft":
        target = peft.get_peft_model(target, lora(), autocast_adapter_dtype=False).double().eval()
    if wrapped != "target":
        draft = peft.get_peft_model(draft, lora(), autocast_adapter_dtype=False).double().eval()
    output = assisted(target, draft, inputs, kind, max_new_tokens=12, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=12))
    check_identities(output.stats, [12, 12])


@pytest.mark.parametrize("form", [{"layers": 2}, {"dtype": torch.float64}], ids=["layers", "copy"])
def test_ui29_a_target_with_adapters_drafts_for_itself(form: dict[str, Any]) -> None:
    target = adapted()
    inputs = prompts((3, 8))
    output = assisted(target, load_draft(target, **form), inputs, max_new_tokens=12, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=12))
    if "dtype" in form:
        assert output.stats.acceptance_rate > 0.9


def test_peft_is_not_needed_for_models_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_semspec.drafts.copies.find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert load_draft(base(), dtype=torch.bfloat16).dtype == torch.bfloat16
