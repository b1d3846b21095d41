"""`compile_draft`: one-token forwards of the draft from fixed buffers, and a replay that reads nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_semspec import LosslessConfig, PARSEConfig, SemSpecConfig
from hf_semspec.drafts import static as static_draft
from hf_semspec.engine.model import keeps_no_tensors
from tests.helpers import EXACT, WEAK_DRAFTS, assisted, new_tokens, plain, plain_rows, refuses
from tests.models import draft_of, prompts, tiny

pytestmark = WEAK_DRAFTS


class Recording(TorchDispatchMode):
    """Runs the recorded operators again on the very same memory, as a CUDA graph does: no Python, no new addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [part for part in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        places = {part.untyped_storage().data_ptr() for part in tensors}
        made = [part for part in torch.utils._pytree.tree_leaves(out) if isinstance(part, torch.Tensor)]
        fresh = [part for part in made if part.untyped_storage().data_ptr() not in places]
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, made if fresh else []))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            again = [part for part in torch.utils._pytree.tree_leaves(again) if isinstance(part, torch.Tensor)]
            for place, value in zip(made, again if made else [], strict=True):
                place.copy_(value)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the CPU capture too; a 1 for each replay that followed a capture, a 0 for each capture."""
    events: list[int] = []

    def capture(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
        for _ in range(static_draft.WARM_UPS):
            run()
        with Recording() as recording:
            output = run()
        events.append(0)

        def replay() -> None:
            events.append(1)
            recording.replay()

        return replay, output

    monkeypatch.setattr(static_draft, "CAPTURING", ("cpu",))
    monkeypatch.setattr(static_draft, "capture", capture)
    return events


@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind != "semantic"])
def test_greedy_tokens_are_those_of_plain_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_draft, "CAPACITY", 16)
    target = tiny("llama", 0)
    inputs = prompts((3, 9, 6))
    output = assisted(
        target, draft_of(target, "near"), inputs, kind, max_new_tokens=24, compile_draft=True, pad_token_id=0
    )
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=24))


@pytest.mark.parametrize("shape", ["mistral", "gemma3", "gpt2"])
def test_windows_and_learned_positions(shape: str, captures: list[int]) -> None:
    target = tiny(shape, 0)
    inputs = prompts((3, 9, 6))
    output = assisted(target, draft_of(target, "near"), inputs, max_new_tokens=24, compile_draft=True)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=24))
    assert sum(captures) > 10


@pytest.mark.parametrize("kind", ["lossless", "easd", "chains", "smc"])
def test_draws_are_the_same_at_equal_seed(kind: str, captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and replayed, with buffers that grow and rows that leave in between."""
    monkeypatch.setattr(static_draft, "CAPACITY", 16)
    target = tiny("llama", 0, eos=[5, 6, 7, 8, 9, 10])
    inputs = prompts((3, 9, 6, 4), seed=2)
    texts = []
    for compiled in (False, True):
        torch.manual_seed(3)
        fields = {"do_sample": True, "max_new_tokens": 40, "compile_draft": compiled}
        texts.append(assisted(target, draft_of(target, "near"), inputs, kind, **fields))
    assert torch.equal(*texts)
    assert captures.count(0) > 1 and sum(captures) > captures.count(0)


def test_one_capture_serves_a_call_whose_rows_and_buffers_stay(captures: list[int]) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "far")
    output = assisted(
        target, draft, prompts((5, 5)), max_new_tokens=30, compile_draft=True, return_dict_in_generate=True
    )
    assert captures.count(0) == 1
    wide = 1 + sum(row.histogram[-1] for row in output.stats.rows if len(row.histogram) > 3)
    assert output.stats.draft_forwards - wide <= sum(captures) < output.stats.draft_forwards
    assert output.stats.draft_tokens >= 2 * sum(captures)


def test_a_replay_is_not_used_on_other_buffers(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the buffers matters: without it the same call goes wrong."""
    target = tiny("llama", 0)
    draft, inputs = draft_of(target, "near"), prompts((12,))
    right = assisted(target, draft, inputs, max_new_tokens=40, return_dict_in_generate=True)
    monkeypatch.setattr(static_draft, "CAPACITY", 16)
    output = assisted(target, draft, inputs, max_new_tokens=40, compile_draft=True, return_dict_in_generate=True)
    assert output.stats.accepted == right.stats.accepted
    forgotten = torch.zeros(1, 1, 1 << 20)
    monkeypatch.setattr(static_draft.StaticDraft, "_buffers", lambda self: forgotten)
    with pytest.raises(IndexError):
        assisted(target, draft, inputs, max_new_tokens=40, compile_draft=True)


def test_parse_writes_and_revises_with_one_static_draft(captures: list[int]) -> None:
    target = tiny("llama", 0)
    draft, inputs = draft_of(target, "near"), prompts((4, 9, 6))
    texts = []
    for compiled in (False, True):
        fields = {"prefix_threshold": 0.0, "max_redrafts": 1, "compile_draft": compiled}
        texts.append(assisted(target, draft, inputs, "parse", max_new_tokens=24, **fields))
    assert torch.equal(*texts)
    assert sum(captures) > 20


def test_a_draft_that_was_once_asked_for_hidden_states_is_not_hooked() -> None:
    """Since 5 transformers leaves the hooks that took them in the model."""
    target, inputs = tiny("llama", 0), prompts((3,))
    draft = draft_of(target, "near")
    asks = {"output_hidden_states": True, "return_dict_in_generate": True}
    before = draft.generate(**inputs, max_new_tokens=3, **asks)
    config = SemSpecConfig("lossless", compile_draft=True, max_new_tokens=8)
    ours = target.generate(**inputs, assistant_model=draft, generation_config=config)
    assert torch.equal(ours, plain(target, inputs, max_new_tokens=8))
    after = draft.generate(**inputs, max_new_tokens=3, **asks)
    assert torch.equal(before.hidden_states[0][1], after.hidden_states[0][1])
    assert keeps_no_tensors(draft)
    draft.lm_head.register_forward_hook(lambda *_: None)
    assert not keeps_no_tensors(draft)


def test_drafts_with_hooks_are_refused_before_any_forward() -> None:
    config = SemSpecConfig("lossless", max_new_tokens=4, compile_draft=True)
    match = "compile_draft=True .* the draft model LlamaForCausalLM has hooks .*: leave compile_draft out"
    refuses(tiny("llama", 0), tiny("llama", 1), prompts((3,)), match, generation_config=config)  # it counts by hooks


def rescaled() -> Any:
    draft = tiny("llama", 1)
    draft.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return draft


@pytest.mark.parametrize(
    ("draft", "match"),
    [
        (tiny("llama", 1).train(), r"is in train mode \(call .eval\(\)"),
        (rescaled(), "rotary frequencies"),
        (torch.nn.Sequential(tiny("llama", 1)), "is wrapped"),
        (tiny("llama", 1, attention="flex_attention", heads=2, hidden=32), "takes no 4-D mask"),
    ],
    ids=["train", "rope", "wrapped", "attention"],
)
def test_other_drafts_that_cannot_be_replayed_are_refused(draft: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"compile_draft=True .*{match}"):
        static_draft.check_static(draft)


def test_a_failed_capture_names_the_option(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(static_draft, "capture", fails)
    target = tiny("llama", 0)
    with pytest.raises(ValueError, match=r"compile_draft=True: .*capturing.* leave compile_draft out"):
        assisted(target, draft_of(target, "near"), prompts((3,)), max_new_tokens=12, compile_draft=True)


def test_bad_values_of_the_field() -> None:
    with pytest.raises(ValueError, match="`compile_draft` must be a bool, but is 'yes'"):
        SemSpecConfig("smc", compile_draft="yes")
    with pytest.raises(ValueError, match="`revise_with` must leave `compile_draft` off"):
        PARSEConfig(revise_with=LosslessConfig(compile_draft=True))
