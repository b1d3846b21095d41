"""Users' reports about the draft: quantized, wrapped, weak, short-sighted (their numbers are in the test names)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline

from hf_semspec import SemSpecConfig, load_draft, record_stats
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    caught,
    check_identities,
    new_tokens,
    plain,
    plain_rows,
    refuses,
)
from tests.models import VOCAB, draft_of, prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS


@pytest.mark.parametrize("kind", EXACT)
def test_ui27_the_draft_is_never_moved_or_cast(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 8))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the draft was moved or cast")

    for name in ("to", "half", "float", "double", "bfloat16", "cpu", "cuda", "train", "requires_grad_"):
        monkeypatch.setattr(draft, name, forbidden)
    output = assisted(target, draft, inputs, kind, max_new_tokens=15)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=15))


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
def test_ui30_a_useless_draft_is_reported_once(kind: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "far")
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=32)
    drafted = 1 if kind == "semantic" else 4  # a segment is judged as a whole: only short ones are many
    with caught() as messages:
        for _ in range(5):
            output = assisted(
                target, draft, inputs, kind, num_draft_tokens=drafted, max_new_tokens=32, return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, expected)
            assert output.stats.acceptance_rate < 0.1
    assert len([message for message in messages if "accept" in message]) == 1
    with caught() as messages:
        assisted(target, draft_of(target, "near"), inputs, kind, num_draft_tokens=drafted, max_new_tokens=32)
    assert messages == []


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


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_ui42_text_that_outgrows_the_drafts_context(kind: str, shape: str) -> None:
    target = tiny("llama", 0)
    draft = tiny(shape, 0, positions=16)
    for lengths in ((4,), (20,), (3, 12, 20)):
        inputs = prompts(lengths)
        with caught() as messages:
            output = assisted(
                target, draft, inputs, kind, num_draft_tokens=4, max_new_tokens=40, return_dict_in_generate=True
            )
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=40))
        assert len([message for message in messages if "16" in message]) <= 1
        if shape == "gpt2":
            assert len([message for message in messages if "16" in message]) == 1
        check_identities(output.stats, [40] * len(lengths))


def test_ui42_smc_draws_from_the_target_where_the_draft_cannot_read() -> None:
    """Such tokens weigh nothing; what was drafted before keeps its weight."""
    target, draft = tiny("llama", 0), tiny("llama", 1, positions=24)
    inputs = prompts((26, 30), seed=1)
    fields = {"do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True}
    with caught() as messages:
        output = assisted(target, draft, inputs, "smc", **fields)
    assert len([message for message in messages if "context of 24" in message]) == 1
    assert output.stats.drafted == output.stats.draft_forwards == 0
    assert not output.log_weights.any()
    assert output.particles.unique(dim=1).shape[1] > 1
    shorter = prompts((18, 30), seed=1)
    with caught():
        mixed = assisted(target, draft, shorter, "smc", ess_threshold=0.0, **fields)
    assert mixed.log_weights[0].any()
    assert not mixed.log_weights[1].any()
    check_identities(mixed.stats, [12, 12])


@pytest.mark.deprecated
def test_ui43_the_draft_is_used_through_generate_pipeline_and_a_model_folder(tmp_path: Path) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=12)
    with Forwards(draft) as spy:
        assert torch.equal(assisted(target, draft, inputs, max_new_tokens=12), expected)
        assert spy.calls > 0
    target.generation_config = SemSpecConfig("lossless", num_draft_tokens=3, pad_token_id=0)
    with Forwards(draft) as spy:
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft)(
            "Hi", max_new_tokens=12
        )
        assert spy.calls > 0
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with Forwards(draft) as spy:
        assert torch.equal(loaded.generate(**inputs, assistant_model=draft, max_new_tokens=12), expected)
        assert spy.calls > 0


def test_ui43_no_draft_is_an_error_that_names_both_ways_out() -> None:
    target = tiny("llama", 0)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, None, prompts((4,)), r"(?s)assistant_model.*semspec=None", generation_config=config)


@pytest.mark.parametrize("kind", EXACT)
def test_ui44_the_draft_length_asked_for_is_the_one_used(kind: str) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "same")
    draft.generation_config.num_assistant_tokens = 10
    before = draft.generation_config.to_dict()
    inputs = prompts((5,))
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(
            target, draft, inputs, kind, num_draft_tokens=3, max_new_tokens=33, return_dict_in_generate=True
        )
    assert set(of_target.widths[1:-1]) == {4}
    # parse's draft writes a whole answer first.
    assert of_draft.calls <= 3 * output.stats.rounds + (33 if kind == "parse" else 0)
    assert output.stats.histogram[3] >= output.stats.rounds - 1
    assert draft.generation_config.to_dict() == before


@pytest.mark.parametrize(
    "field",
    [
        {"num_assistant_tokens": 3},
        {"num_assistant_tokens_schedule": "heuristic"},
        {"assistant_confidence_threshold": 0.0},
    ],
)
def test_ui44_stocks_knobs_are_answered_by_naming_ours(field: dict[str, Any]) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((5,))
    with caught() as messages:
        for _ in range(2):
            output = assisted(target, draft, inputs, max_new_tokens=12, **field)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=12))
    assert len([m for m in messages if "num_draft_tokens" in m and next(iter(field)) in m]) == 1


@pytest.mark.deprecated
def test_a_drafts_own_scheme_does_not_capture_stock_assisted_decoding() -> None:
    """Stock passes both a config and loose arguments to the draft, which it reports as deprecated itself."""
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    draft.generation_config.semspec = {"scheme": "lossless"}
    inputs = prompts((5,))
    expected = plain(target, inputs, max_new_tokens=12)
    with record_stats() as stats:
        assert torch.equal(target.generate(**inputs, assistant_model=draft, max_new_tokens=12), expected)
    assert stats == []
    assert expected.max() < VOCAB
