"""Models whose weights live elsewhere between forwards, by the real accelerate: they come back through hooks only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_semspec import load_draft
from hf_semspec.drafts.weights import own_bytes
from tests.helpers import EXACT, WEAK_DRAFTS, Forwards, assisted, check_identities, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny

# generate itself warns that an offloaded model stands on the device meta.
pytestmark = [WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:You are calling .generate")]

CPU = torch.device("cpu")
INPUTS = prompts((3, 8))
LENGTH = 8


def offload(model: PreTrainedModel, way: str, folder: Path) -> PreTrainedModel:
    """`model` with its weights on the CPU, on the disk, or half of its layers on each by a device map."""
    if way == "cpu":
        return cpu_offload(model, execution_device=CPU)
    if way == "disk":
        return disk_offload(model, str(folder / "weights"), execution_device=CPU)
    model.save_pretrained(folder / "model")
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
    }
    places |= {f"model.layers.{layer}": "disk" for layer in range(2, model.config.num_hidden_layers)}
    places |= {"model.norm": "cpu", "lm_head": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model",
        device_map=places,
        offload_folder=folder / "weights",
        dtype=model.dtype,
        attn_implementation="eager",
    ).eval()


def is_away(model: PreTrainedModel) -> bool:
    return any(weight.device.type == "meta" for weight in model.parameters())


@pytest.mark.parametrize(
    ("way", "kind"),
    [("cpu", "lossless"), ("disk", "lossless"), *(("map", kind) for kind in EXACT if kind != "chains")],
)
def test_ui32_offloaded_targets_and_drafts(way: str, kind: str, tmp_path: Path) -> None:
    target = tiny("llama", 0)
    expected = plain_rows(target, INPUTS, max_new_tokens=LENGTH)
    draft = draft_of(target, "near")
    if kind == "lossless":
        draft = offload(draft, way, tmp_path / "draft")
    target = offload(target, way, tmp_path)
    assert is_away(target)
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(target, draft, INPUTS, kind, max_new_tokens=LENGTH, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, INPUTS), expected)
    check_identities(output.stats, [LENGTH, LENGTH])
    assert of_target.calls == output.stats.target_forwards
    assert of_draft.calls == output.stats.draft_forwards
    assert is_away(target), "the weights stayed where a forward had brought them"


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_ui32_the_first_layers_of_an_offloaded_target_draft_through_its_hooks(way: str, tmp_path: Path) -> None:
    plainly = tiny("llama", layers=3)
    expected = plain_rows(plainly, INPUTS, max_new_tokens=LENGTH)
    logits = load_draft(plainly, layers=2)(INPUTS["input_ids"][1:]).logits
    target = offload(plainly, way, tmp_path)
    draft = load_draft(target, layers=2)
    assert own_bytes(draft, target) < 200
    with torch.no_grad():
        assert torch.allclose(draft(INPUTS["input_ids"][1:]).logits, logits, atol=1e-9)
    output = assisted(target, draft, INPUTS, max_new_tokens=LENGTH, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, INPUTS), expected)
    assert is_away(target)


def test_ui32_a_target_may_be_offloaded_after_its_draft_was_made() -> None:
    target = tiny("llama", layers=3)
    expected = plain_rows(target, INPUTS, max_new_tokens=LENGTH)
    draft = load_draft(target, layers=2)
    cpu_offload(target, execution_device=CPU)
    assert torch.equal(new_tokens(assisted(target, draft, INPUTS, max_new_tokens=LENGTH), INPUTS), expected)


def test_an_offloaded_model_is_not_copied_and_the_message_names_what_is_possible(tmp_path: Path) -> None:
    target = offload(tiny("llama", layers=3), "cpu", tmp_path)
    for form in ({"dtype": torch.bfloat16}, {"layers": 2, "dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"offloaded: pass its name or folder.*`layers` alone"):
            load_draft(target, **form)


def test_ui32_hooks_inside_the_shared_layers_run_for_both() -> None:
    """accelerate's hooks replace the `forward` of a module: a draft that reached past them would compute something
    else."""
    target = tiny("llama", layers=3)
    draft = load_draft(target, layers=2)
    calls: list[Any] = []

    class Counter(AlignDevicesHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return super().pre_forward(module, *args, **kwargs)

    add_hook_to_module(target.model.layers[0], Counter(execution_device=CPU))
    output = assisted(target, draft, INPUTS, max_new_tokens=LENGTH, return_dict_in_generate=True)
    assert len(calls) == output.stats.target_forwards + output.stats.draft_forwards
