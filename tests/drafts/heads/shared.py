"""Heads with made-up weights, written by hand in the three layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYOUTS = ("safeailab", "specforge", "speculators")
SIZE = 32
LAYERS = [1, 2, 3]


def weights(target: Any, draft_vocabulary: int = 97, seed: int = 0, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """A head's weights under SafeAILab's names, float64."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = target.config.vocab_size

    def drawn(*shape: int) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    state = {"fc.weight": drawn(SIZE, 3 * SIZE), "norm.weight": torch.ones(SIZE, dtype=torch.float64)}
    for name, shape in (("q", (SIZE, 2 * SIZE)), ("k", (16, 2 * SIZE)), ("v", (16, 2 * SIZE)), ("o", (SIZE, SIZE))):
        state[f"midlayer.self_attn.{name}_proj.weight"] = drawn(*shape)
    for name, shape in (("gate", (64, SIZE)), ("up", (64, SIZE)), ("down", (SIZE, 64))):
        state[f"midlayer.mlp.{name}_proj.weight"] = drawn(*shape)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        state[f"midlayer.{name}.weight"] = 1 + drawn(SIZE)
    state["lm_head.weight"] = drawn(draft_vocabulary, SIZE)
    chosen = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
    state["d2t"] = chosen - torch.arange(draft_vocabulary)
    state["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, chosen, True)
    return state


def write(folder: Path, layout: str, state: dict[str, torch.Tensor], residual: bool | None = False) -> str:
    """A checkpoint in `layout`; ids of SpecForge are those of layers, one less than those of hidden states."""
    shapes = {
        "hidden_size": SIZE,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "vocab_size": len(state["t2d"]),
        "rms_norm_eps": 1e-6,
    }
    own: dict[str, Any] = {"draft_vocab_size": len(state["d2t"])}
    own |= {} if residual is None else {"norm_before_residual": residual}
    if layout == "speculators":
        entries = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": shapes | {"model_type": "llama"},
            "eagle_aux_hidden_state_layer_ids": LAYERS,
            **own,
        }
        state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
    elif layout == "specforge":
        ids = {"eagle_aux_hidden_state_layer_ids": [index - 1 for index in LAYERS]}
        entries = {"architectures": ["LlamaForCausalLMEagle3"], **shapes, **own, "eagle_config": ids}
    else:
        entries = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shapes, **own}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    if layout == "safeailab":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return str(folder)
