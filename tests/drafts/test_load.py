"""load_draft, the vocabulary checks, and the bytes a forward reads."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from hf_semspec.common import warn_once as notices
from hf_semspec.drafts import load as drafts
from hf_semspec.drafts import quantizations
from hf_semspec.drafts.load import load_draft
from hf_semspec.drafts.vocabulary import check_vocabularies, vocabulary_size
from hf_semspec.drafts.weights import weight_bytes
from tests.helpers import EXACT, WEAK_DRAFTS, assisted, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny, tokenizer

IDS = torch.arange(2, 12)[None]


@pytest.fixture
def target():
    # 64 columns: the smallest block that bitsandbytes quantizes to 4 bits.
    return tiny(hidden=64, dtype=torch.float32)


@pytest.fixture
def quiet_int8():
    """bitsandbytes logs one line a layer and forward about its cast to float16."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)


def storages(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model, before, logits) -> None:
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(IDS).logits, logits)
    assert getattr(model.config, "quantization_config", None) is None
    assert not model.training


class TestLoadDraft:
    @pytest.mark.seam
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_casts_a_copy_and_leaves_the_target_alone(self, target, dtype):
        before, logits = snapshot(target), target(IDS).logits
        draft = load_draft(target, dtype=dtype)
        assert draft.dtype == dtype
        assert type(draft) is type(target)
        assert not draft.training
        assert not storages(draft) & storages(target)
        assert draft.config is not target.config
        assert draft.generation_config is not target.generation_config
        with torch.no_grad():
            tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
            assert (draft(IDS).logits - logits).abs().max() < tolerance * logits.abs().max()
            for weight in draft.parameters():
                weight.zero_()
        assert_untouched(target, before, logits)

    @pytest.mark.seam
    @pytest.mark.parametrize("shape", ["gpt2", "gemma3", "qwen3", "mistral"])
    def test_copies_every_shape(self, shape):
        model = tiny(shape)
        draft = load_draft(model, dtype=torch.float64)
        assert torch.allclose(draft(IDS).logits, model(IDS).logits, atol=1e-4)
        assert draft.config._attn_implementation == model.config._attn_implementation

    def test_keeps_tied_weights_tied(self):
        config = tiny(hidden=64).config
        config.tie_word_embeddings = True
        model = AutoModelForCausalLM.from_config(config).eval()
        draft = load_draft(model, dtype=torch.bfloat16)
        assert draft.get_input_embeddings().weight is draft.get_output_embeddings().weight

    @pytest.mark.quantized
    @pytest.mark.parametrize(("quantization", "stored"), [("nf4", torch.uint8), ("int8", torch.int8)])
    def test_quantizes_a_copy_and_leaves_the_target_alone(self, target, quantization, stored, quiet_int8):
        before, logits = snapshot(target), target(IDS).logits
        draft = load_draft(target, quantization=quantization)
        assert draft.model.layers[0].mlp.up_proj.weight.dtype == stored
        assert draft.get_input_embeddings().weight.dtype == torch.float32
        assert not draft.training
        assert not storages(draft) & storages(target)
        draft_logits = draft(IDS).logits
        assert torch.isfinite(draft_logits).all()
        assert nn.functional.cosine_similarity(draft_logits, logits, dim=-1).median() > 0.8
        assert weight_bytes(draft) < weight_bytes(target)
        assert_untouched(target, before, logits)

    @pytest.mark.quantized
    @pytest.mark.parametrize("quantization", ["nf4", "int8"])
    def test_quantizes_a_folder_and_a_saved_quantized_draft_loads_by_name(
        self, target, quantization, tmp_path, quiet_int8
    ):
        target.save_pretrained(tmp_path / "plain")
        draft = load_draft(str(tmp_path / "plain"), quantization=quantization)
        assert draft.is_quantized
        draft.save_pretrained(tmp_path / "quantized")
        again = load_draft(str(tmp_path / "quantized"))
        assert again.is_quantized
        assert torch.allclose(again(IDS).logits.float(), draft(IDS).logits.float(), atol=1e-4)

    @pytest.mark.quantized
    def test_ui_27_never_moves_or_casts_a_quantized_draft(self, target, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("a quantized draft was moved or cast")

        for name in ("to", "half", "float", "double", "bfloat16", "cuda", "cpu"):
            monkeypatch.setattr(type(target), name, refuse)
        assert torch.isfinite(load_draft(target, quantization="nf4")(IDS).logits).all()

    def test_loads_a_folder_as_it_is_stored(self, target, tmp_path):
        target.to(torch.bfloat16).save_pretrained(tmp_path)
        assert load_draft(str(tmp_path)).dtype == torch.bfloat16
        assert load_draft(str(tmp_path), dtype=torch.float32, device="cpu").dtype == torch.float32

    def test_a_loaded_model_needs_a_form(self, target):
        with pytest.raises(ValueError, match=r"`quantization`.*`dtype`"):
            load_draft(target)

    def test_unknown_quantization(self, target):
        with pytest.raises(ValueError, match=r"quantization='int3'.*nf4, fp4, int8, torchao-int8"):
            load_draft(target, quantization="int3")

    def test_quantization_given_twice(self, target, monkeypatch):
        monkeypatch.setattr(quantizations, "find_spec", lambda name: object())
        with pytest.raises(ValueError, match="not both"):
            load_draft(target, quantization="nf4", quantization_config=object())

    def test_an_error_leaves_the_target_alone(self, target, monkeypatch):
        before, logits = snapshot(target), target(IDS).logits
        monkeypatch.setattr(drafts, "_unshare", lambda draft, model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_draft(target, dtype=torch.bfloat16)
        assert_untouched(target, before, logits)

    @pytest.mark.quantized
    def test_a_quantized_model_is_not_copied(self, target):
        draft = load_draft(target, quantization="nf4")
        with pytest.raises(ValueError, match="quantized already"):
            load_draft(draft, dtype=torch.bfloat16)

    def test_packed_weights_without_a_config_entry_are_not_copied(self, target):
        target.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
        with pytest.raises(ValueError, match="packed"):
            load_draft(target, dtype=torch.bfloat16)

    def test_an_offloaded_model_is_not_copied(self, target):
        with pytest.raises(ValueError, match="offloaded"):
            load_draft(target.to("meta"), dtype=torch.bfloat16)

    def test_a_model_unpacked_from_gguf_is_copied(self, target):
        target.config.quantization_config = {"quant_method": "gguf", "gguf_file": "absent.gguf"}
        draft = load_draft(target, dtype=torch.bfloat16)
        assert getattr(draft.config, "quantization_config", None) is None
        assert target.config.quantization_config["gguf_file"] == "absent.gguf"


class TestVocabularies:
    @pytest.fixture(autouse=True)
    def fresh_warnings(self):
        notices.forget()

    def test_equal_sizes_pass_silently(self, recwarn):
        check_vocabularies(tiny(), tiny(seed=1))
        assert not recwarn

    def test_ui_23_padded_sizes_pass_with_one_warning(self):
        model, draft = tiny(vocab=128), tiny(vocab=97)
        with pytest.warns(UserWarning, match="128 ids and the draft 97") as caught:
            check_vocabularies(model, draft)
            check_vocabularies(model, draft)
        assert len(caught) == 1
        with pytest.warns(UserWarning, match="97 ids and the draft 128"):
            check_vocabularies(draft, model)

    @pytest.mark.parametrize(("size", "fits"), [(97 + 1024, True), (97 + 1025, False)])
    def test_the_limit_is_1024(self, size, fits):
        model, draft = tiny(vocab=size), tiny(vocab=97)
        if fits:
            with pytest.warns(UserWarning, match="padded"):
                check_vocabularies(model, draft)
        else:
            with pytest.raises(ValueError, match="`tokenizer` and `assistant_tokenizer`"):
                check_vocabularies(model, draft)

    def test_tokenizers_decide_whatever_the_sizes(self, recwarn):
        check_vocabularies(tiny(vocab=2000), tiny(vocab=97), tokenizer(size=1900), tokenizer())
        same = tokenizer()
        check_vocabularies(tiny(), tiny(), same, same)
        assert not recwarn

    def test_ui_25_equal_sizes_with_permuted_ids_are_foreign(self):
        with pytest.raises(ValueError, match=r"foreign.*id 2 is .*lossless and easd.*smc.*load_draft"):
            check_vocabularies(tiny(), tiny(), tokenizer(), tokenizer(permute=3))
        assert check_vocabularies(tiny(), tiny(), tokenizer(), tokenizer(permute=3), allow_foreign=True)
        assert not check_vocabularies(tiny(), tiny(), tokenizer(), tokenizer(size=120), allow_foreign=True)

    def test_one_tokenizer_alone(self):
        check_vocabularies(tiny(), tiny(), tokenizer=tokenizer())
        with pytest.raises(ValueError, match="without `tokenizer`"):
            check_vocabularies(tiny(), tiny(), assistant_tokenizer=tokenizer())

    def test_size_is_that_of_the_text_config(self):
        model = tiny(vocab=128)
        assert vocabulary_size(model) == 128
        config = AutoConfig.for_model("llava", text_config=model.config.to_dict())
        wrapper = nn.Module()
        wrapper.config = config
        assert vocabulary_size(wrapper) == 128


class TestWeightBytes:
    def test_leaves_out_what_is_only_gathered(self):
        model = tiny("gpt2", dtype=torch.float32)
        tables = model.transformer.wte.weight.nbytes + model.transformer.wpe.weight.nbytes
        stored = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
        assert weight_bytes(model) == stored - tables

    def test_counts_a_tied_table_once(self):
        config = tiny().config
        config.tie_word_embeddings = True
        model = AutoModelForCausalLM.from_config(config)
        assert weight_bytes(model) == sum(p.nbytes for p in model.parameters()) + sum(
            b.nbytes for b in model.buffers()
        )

    def test_follows_the_dtype(self, target):
        buffers = sum(b.nbytes for b in target.buffers())
        half = load_draft(target, dtype=torch.bfloat16)
        assert weight_bytes(target) - buffers == 2 * (weight_bytes(half) - buffers)

    @pytest.mark.quantized
    def test_counts_packed_weights_with_their_scales(self, target):
        draft = load_draft(target, quantization="nf4")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        double = load_draft(target, dtype=torch.float32, quantization_config=config)
        elements = sum(m.in_features * m.out_features for m in target.model.modules() if isinstance(m, nn.Linear))
        dense = weight_bytes(target) - 4 * elements
        # Half a byte a weight, and one float32 scale for every block of 64.
        assert weight_bytes(draft) - dense == elements // 2 + 4 * (elements // 64)
        assert weight_bytes(double) < weight_bytes(draft)


@WEAK_DRAFTS
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
