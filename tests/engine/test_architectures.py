"""Models of other shapes: they work as in plain decoding, or are refused by name before any forward."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.helpers import VERSION, WEAK_DRAFTS, assisted, exact, new_tokens, plain_rows, refuses
from tests.models import VOCAB, draft_of, prompts, tiny

pytestmark = [WEAK_DRAFTS, pytest.mark.seam]
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SPECIAL}
LLAMA = {**SMALL, "intermediate_size": 64}
LONGROPE: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE |= {"rope_type": "longrope", "factor": 2.0} if Version("5") <= VERSION else {"type": "longrope"}


def build(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    config.initializer_range = 0.3
    return AutoModelForCausalLM.from_config(config).double().eval()


def longrope() -> PretrainedConfig:
    return Phi3Config(
        **LLAMA,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_scaling=dict(LONGROPE),
    )


def dynamic() -> PretrainedConfig:
    return LlamaConfig(**LLAMA, max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SMALL, intermediate_size=64),
        OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
        FalconConfig(**SMALL),
        CodeGenConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=128, **SPECIAL),
        GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], **SPECIAL
        ),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("kind", ["lossless", "chains"])
def test_these_equal_plain_decoding(config: PretrainedConfig, kind: str) -> None:
    model = build(config)
    inputs = prompts((5, 9, 3))
    output = assisted(model, draft_of(model, "near"), inputs, kind, max_new_tokens=16)
    assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **SPECIAL), "takes no position_ids"),
        (FalconConfig(**SMALL, alibi=True), "alibi"),
        (
            GPTNeoConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                **SPECIAL,
            ),
            "attention_layers='local'",
        ),
        (
            BartConfig(
                vocab_size=VOCAB,
                d_model=32,
                decoder_layers=2,
                decoder_attention_heads=4,
                decoder_ffn_dim=64,
                is_encoder_decoder=False,
                is_decoder=True,
                forced_eos_token_id=None,
                **SPECIAL,
            ),
            "takes no position_ids",
        ),
    ],
    ids=["bloom", "falcon-alibi", "gpt_neo-local", "bart"],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_these_are_refused_by_name(config: PretrainedConfig, message: str, role: str) -> None:
    odd, usual = build(config), tiny("llama")
    target, draft = (odd, usual) if role == "target" else (usual, odd)
    refuses(target, draft, prompts((5,)), message, generation_config=exact("lossless", max_new_tokens=4))


@pytest.mark.parametrize("rope", [longrope(), dynamic()], ids=["longrope", "dynamic"])
def test_texts_over_which_rotary_frequencies_change_are_refused(rope: PretrainedConfig) -> None:
    model = build(rope)
    config = exact("lossless", max_new_tokens=8)
    refuses(model, tiny("llama"), prompts((5, 9)), "rope_type", generation_config=config)
    inputs = prompts((5, 8))
    output = assisted(model, draft_of(model, "near"), inputs, max_new_tokens=8)
    assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=8))


def test_a_longrope_text_past_the_change_works() -> None:
    model = build(longrope())
    inputs = prompts((20, 17))
    output = assisted(model, draft_of(model, "near"), inputs, max_new_tokens=8)
    assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=8))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss"])
@pytest.mark.parametrize("kind", ["lossless", "parse"])
def test_b09_a_mixture_of_experts_whose_config_asks_for_router_logits(name: str, kind: str) -> None:
    """Their auxiliary loss reads a 2-D mask, and nobody asked for it."""
    fields = {**LLAMA, "num_key_value_heads": 2, "output_router_logits": True}
    fields |= {"moe_intermediate_size": 32, "head_dim": 8} if "oe" in name[5:] or name == "GptOss" else {}
    experts = "num_experts" if name in ("Qwen2Moe", "Qwen3Moe", "Olmoe") else "num_local_experts"
    model = build(getattr(transformers, f"{name}Config")(**fields, **{experts: 4}, num_experts_per_tok=2)).float()
    inputs = prompts((5, 9, 3))
    output = assisted(model, draft_of(model, "near"), inputs, kind, max_new_tokens=9)
    model.config.output_router_logits = False  # plain decoding trips over it, too, on transformers 4.57
    assert torch.equal(new_tokens(output, inputs), plain_rows(model, inputs, max_new_tokens=9))
