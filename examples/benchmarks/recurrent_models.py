"""Tiny models with recurrent layers, one of every family that tests and the sweep build."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_PURE = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id", "bos_token_id")}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_TURNS = ["linear_attention", "full_attention"] * 2

# What each family's config gets beside the sizes; the name of its classes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("Qwen3_5", {**_SIZES, **_DELTA, "head_dim": 8, "layer_types": _TURNS}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_SIZES,
            **_DELTA,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": _TURNS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "mamba2": (
        "Mamba2",
        {**_PURE, "num_hidden_layers": 3, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}
        | {"chunk_size": 16},
    ),
    "falcon_h1": ("FalconH1", {**_SIZES, **_MAMBA, "mamba_d_ssm": 64}),
    "bamba": ("Bamba", {**_SIZES, **_MAMBA, "attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_SIZES,
            **_MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{key: value for key, value in _SIZES.items() if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **_SIZES,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "hybrid_layer_ids": [1, 3],
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "adapter_rank": 4,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**_SIZES, **_DELTA, "linear_num_key_heads": 4, "layer_types": _TURNS},
    ),
    "lfm2": ("Lfm2", {**_SIZES, "layer_types": ["conv", "full_attention"] * 2}),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        {
            **_SIZES,
            **_DELTA,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": _TURNS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "lfm3": ("Lfm3", {**_SIZES, "layer_types": ["conv", "full_attention"] * 2}),
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "layer_types": _TURNS,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FAMILIES |= {
    "lara_mini": (
        "LaraMini",
        {
            **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
            **_DELTA,
            **_EXPERTS,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "sliding_window": 8,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **_SIZES,
            **_EXPERTS,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
    "kimi_linear": ("KimiLinear", {**_LATENT, "linear_head_dim": 8, "linear_num_heads": 4}),
    "bailing_hybrid": ("BailingHybrid", {**_LATENT, "head_dim": 8, "num_mtp_layers": 0}),
}
# Their layers ignore a state when they read several tokens, or keep it on the modules.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**_PURE, "num_hidden_layers": 2, "state_size": 4}),
    "falcon_mamba": ("FalconMamba", {**_PURE, "num_hidden_layers": 2, "state_size": 4}),
    "jamba": (
        "Jamba",
        {
            **_SIZES,
            **_EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {**_SIZES, "lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
}


def recurrent(family: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of the family with weights large enough for texts that vary."""
    name, fields = {**FAMILIES, **REFUSED}[family]
    config: Callable[..., Any] = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config(**fields)).to(dtype).eval()
    if any("experts" in key for key in fields):
        model.set_experts_implementation("eager")  # the other kernels know no float64
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1 and "conv1d" not in key:
                weight.normal_(0, 0.25)
    return model
