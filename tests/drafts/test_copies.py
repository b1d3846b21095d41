"""Drafts made of the target: its first layers on its own modules, and copies of a target with adapters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_semspec import load_draft
from hf_semspec.drafts import copies as self_drafts
from hf_semspec.drafts.weights import _storages, own_bytes, weight_bytes
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    assisted,
    cache_of,
    check_identities,
    new_tokens,
    plain,
    plain_rows,
    states,
)
from tests.models import PAD, VOCAB, WINDOW, prompts, tiny

pytestmark = WEAK_DRAFTS

IDS = torch.arange(2, 26)[None]  # longer than the sliding windows
LAYERS = 3
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
KV = {"intermediate_size": 64, "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OTHER: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(
        **COMMON, **KV, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, layer_types=MIXED
    ),
    "gemma": GemmaConfig(**COMMON, **KV, head_dim=8),
    "gemma2": Gemma2Config(**COMMON, **KV, head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    "gpt_neox": GPTNeoXConfig(**COMMON, intermediate_size=64),
    "opt": OPTConfig(
        **{name: value for name, value in COMMON.items() if name != "initializer_range"},
        init_std=0.3,
        ffn_dim=64,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
}
SHAPES = ("llama", "mistral", "qwen3", "gemma3", "gpt2", *OTHER)


def model_of(shape: str, layers: int = LAYERS) -> PreTrainedModel:
    if shape not in OTHER:
        return tiny(shape, layers=layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(OTHER[shape], attn_implementation="eager").double().eval()


def shorter(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of fewer layers, built by its own class from a config of its own and given copies of the weights."""
    fields = {name: value for name, value in model.config.to_dict().items() if name != "layer_types"}
    kinds = getattr(model.config, "layer_types", None)
    kinds = {} if kinds is None else {"layer_types": kinds[:layers]}
    config = type(model.config)(**{**fields, "num_hidden_layers": layers, **kinds})
    config._attn_implementation = "eager"
    made = type(model)(config).double().eval()
    state = model.state_dict()
    made.load_state_dict({name: state[name] for name in made.state_dict()})
    return made


def unchanged(model: PreTrainedModel) -> Any:
    """What must be the same before and after a draft was made of `model`."""
    return (
        [(name, id(module), module.training) for name, module in model.named_modules()],
        [
            (name, weight.data_ptr(), weight.requires_grad, weight.detach().double().sum().item())
            for name, weight in _all(model)
        ],
        model.config.to_dict(),
        model.generation_config.to_dict(),
        model(IDS).logits.sum().item(),
    )


def _all(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class TestFirstLayers:
    @pytest.mark.seam
    @pytest.mark.parametrize("shape", SHAPES)
    def test_computes_what_a_model_of_so_many_layers_does(self, shape: str) -> None:
        model = model_of(shape)
        before = unchanged(model)
        draft = load_draft(model, layers=2)
        assert type(draft) is type(model)
        assert torch.allclose(draft(IDS).logits, shorter(model, 2)(IDS).logits, atol=1e-9)
        assert not torch.allclose(draft(IDS).logits, model(IDS).logits, atol=1e-2)
        config = draft.config
        assert config.num_hidden_layers == 2
        assert len(getattr(config, "layer_types", None) or [0, 0]) == 2
        assert config._attn_implementation == model.config._attn_implementation
        assert unchanged(model) == before

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shares_every_weight(self, shape: str) -> None:
        model = model_of(shape)
        draft = load_draft(model, layers=2)
        theirs = {weight.data_ptr() for weight in model.parameters()}
        assert all(weight.data_ptr() in theirs for weight in draft.parameters())
        # Of its own it has nothing but tables of rotary embeddings, which hold no weight.
        assert own_bytes(draft, model) == sum(buffer.nbytes for name, buffer in draft.named_buffers() if "rot" in name)
        assert own_bytes(draft, model) < 200
        assert weight_bytes(draft) < weight_bytes(model)

    @pytest.mark.parametrize("kind", EXACT)
    def test_drafts_under_every_scheme(self, kind: str) -> None:
        model = model_of("llama")
        inputs = prompts((3, 8))
        output = assisted(
            model, load_draft(model, layers=2), inputs, kind, max_new_tokens=12, return_dict_in_generate=True
        )
        assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=12))
        check_identities(output.stats, [12, 12])

    @pytest.mark.seam
    @pytest.mark.parametrize("shape", SHAPES)
    def test_drafts_for_every_architecture_past_its_window(self, shape: str) -> None:
        model = model_of(shape)
        inputs = prompts((3, 8))
        output = assisted(model, load_draft(model, layers=2), inputs, max_new_tokens=10)
        assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=10))

    @pytest.mark.deprecated
    def test_keeps_its_keys_and_values_apart(self) -> None:
        """In transformers' own loop too, where each model makes its own cache; then both decode alone as before."""
        model = model_of("llama")
        inputs = prompts((5,))
        expected = plain(model, inputs, max_new_tokens=12)
        draft = load_draft(model, layers=2)
        alone = plain(draft, inputs, max_new_tokens=12)
        assert torch.equal(alone, plain(shorter(model, 2), inputs, max_new_tokens=12))
        stock = model.generate(**inputs, assistant_model=draft, max_new_tokens=12, do_sample=False)
        assert torch.equal(stock, expected)
        assert torch.equal(plain(model, inputs, max_new_tokens=12), expected)
        assert torch.equal(plain(draft, inputs, max_new_tokens=12), alone)
        assert len(states(cache_of(draft(IDS, use_cache=True)))) == 2

    def test_asks_the_target_for_nothing_once_it_is_made(self) -> None:
        model = model_of("llama")
        draft = load_draft(model, layers=2)
        expected = draft(IDS).logits
        for part in (model, model.model):
            part.forward = None
        model.model.layers = model.model.norm = model.lm_head = model.config = None
        assert torch.equal(draft(IDS).logits, expected)

    def test_new_weights_of_the_target_count_at_once(self) -> None:
        model = model_of("llama")
        draft = load_draft(model, layers=2)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        assert torch.equal(draft(IDS).logits, shorter(model, 2)(IDS).logits)

    @pytest.mark.parametrize("training", [False, True])
    def test_leaves_the_mode_as_it_is(self, training: bool) -> None:
        model = model_of("llama").train(training)
        model.model.layers[1].eval()
        before = unchanged(model)
        draft = load_draft(model, layers=2)
        assert draft.training is draft.model.training is draft.model.layers[0].training is training
        assert unchanged(model) == before

    def test_rotary_tables_that_grow_with_the_text_are_its_own(self) -> None:
        model = model_of("llama")
        config = copy.deepcopy(model.config)
        config.max_position_embeddings = 8
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        if hasattr(config, "rope_parameters"):
            config.rope_parameters = rope
        else:
            config.rope_scaling = rope
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
        table = model.model.rotary_emb.inv_freq.clone()
        load_draft(model, layers=2)(IDS)
        assert torch.equal(model.model.rotary_emb.inv_freq, table)
        model(IDS)
        assert not torch.equal(model.model.rotary_emb.inv_freq, table), "the table does not grow: nothing was tested"

    def test_an_error_leaves_the_target_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = model_of("llama")
        before = unchanged(model)
        adopt = self_drafts._adopt

        def fails(*arguments: Any) -> None:
            adopt(*arguments)
            raise ZeroDivisionError

        monkeypatch.setattr(self_drafts, "_adopt", fails)
        with pytest.raises(ZeroDivisionError):
            load_draft(model, layers=2)
        assert unchanged(model) == before

    @pytest.mark.parametrize("layers", [0, -1, LAYERS, LAYERS + 1, True, 1.0, "2"])
    def test_a_number_out_of_range(self, layers: Any) -> None:
        with pytest.raises(ValueError, match=rf"layers={layers!r}: must be a number from 1 to 2.*has 3"):
            load_draft(model_of("llama"), layers=layers)

    def test_a_name_is_not_cut(self, tmp_path: Any) -> None:
        with pytest.raises(ValueError, match=r"layers=2 cuts a loaded model: load the target"):
            load_draft(tmp_path, layers=2)

    def test_a_model_that_is_wrapped_by_a_stranger(self) -> None:
        with pytest.raises(ValueError, match=r"Linear is neither.*unwrap"):
            load_draft(nn.Linear(2, 2), layers=2)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("shape", "reason"),
        [
            ("t5", "is no decoder"),
            ("albert", "has no plain list of layers"),
            ("gemma3n", "has weights for every layer"),
        ],
    )
    def test_models_that_cannot_be_cut(self, shape: str, reason: str) -> None:
        if shape == "t5":
            model: Any = T5ForConditionalGeneration(
                T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
            )
        elif shape == "albert":  # one layer, called again and again
            model = AlbertForMaskedLM(
                AlbertConfig(
                    vocab_size=VOCAB,
                    embedding_size=8,
                    hidden_size=8,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=8,
                )
            )
        else:  # a table with columns for every layer
            model = AutoModelForCausalLM.from_config(
                Gemma3nTextConfig(
                    vocab_size=VOCAB,
                    vocab_size_per_layer_input=VOCAB,
                    hidden_size=16,
                    hidden_size_per_layer_input=4,
                    intermediate_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    head_dim=8,
                    num_kv_shared_layers=0,
                    layer_types=["sliding_attention", "full_attention"],
                    activation_sparsity_pattern=[0.0, 0.0],
                    laurel_rank=2,
                )
            )
        with pytest.raises(ValueError, match=rf"{reason}.*pass another draft"):
            load_draft(model, layers=1)

    @pytest.mark.seam
    def test_with_a_dtype_it_is_a_copy_of_these_layers(self) -> None:
        model = model_of("gemma3")
        draft = load_draft(model, layers=2, dtype=torch.float32)
        assert draft.dtype == torch.float32
        assert not _storages(draft).keys() & _storages(model).keys()
        assert torch.allclose(draft(IDS).logits.double(), shorter(model, 2)(IDS).logits, atol=1e-3)

    @pytest.mark.quantized
    def test_with_a_quantization_it_is_a_quantized_copy_and_a_quantized_target_is_shared(self) -> None:
        pytest.importorskip("bitsandbytes")
        model = tiny(layers=LAYERS, hidden=64, dtype=torch.float32)
        draft = load_draft(model, layers=2, quantization="nf4")
        assert draft.model.layers[1].mlp.up_proj.weight.dtype == torch.uint8
        assert not _storages(draft).keys() & _storages(model).keys()
        target = load_draft(model, quantization="nf4")
        shared = load_draft(target, layers=2)
        assert own_bytes(shared, target) < 200
        assert shared.hf_quantizer is target.hf_quantizer
        with torch.no_grad():
            assert torch.allclose(shared(IDS).logits, draft(IDS).logits, atol=1e-4)
        inputs = prompts((3, 8))
        output = assisted(target, shared, inputs, max_new_tokens=8)
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=8))
