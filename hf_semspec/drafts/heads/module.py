"""An EAGLE-3 head: one decoder layer that reads a target's hidden states and the next token's embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from . import MODEL_TYPE


class EagleConfig(LlamaConfig):
    """Shapes of a head.

    Beside those of a layer of Llama:

    Args:
        target_hidden_size (`int`): size of the target's hidden states.
        draft_vocab_size (`int`): ids that the head scores; `vocab_size` is the target's.
        layer_ids (`list[int]`): the target's hidden states that it reads, k for `hidden_states[k]`: 0 is the
            embedding, k the output of the k-th layer, before any final norm.
        norm_before_residual (`bool`): the residual is the normed feature, not the feature.
        norm_before_fc (`bool`): one norm over the joined states before `fc`.
        fc_norm (`bool`): a norm for each of the states before `fc`.
        norm_output (`bool`): what is fed back went through the last norm.
        own_embeddings (`bool`): the checkpoint brings its own token embeddings.
    """

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        own: dict[str, Any] = {
            "target_hidden_size": None,
            "draft_vocab_size": None,
            "layer_ids": [],
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "own_embeddings": False,
        }
        values = {name: kwargs.pop(name, default) for name, default in own.items()}
        super().__init__(**kwargs)
        for name, value in values.items():
            setattr(self, name, value)


class _Attention(nn.Module):
    """Attention whose queries, keys and values read an embedding and a feature side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, bias = config.hidden_size, bool(getattr(config, "attention_bias", False))
        self.head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        inner, outer = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, inner, bias=bias)
        self.k_proj = nn.Linear(2 * size, outer, bias=bias)
        self.v_proj = nn.Linear(2 * size, outer, bias=bias)
        self.o_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, both: torch.Tensor, rotary: Any, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        shape = (*both.shape[:2], -1, self.head_dim)
        queries, keys, values = (
            part(both).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        keys, values = (states.repeat_interleave(self.groups, dim=1) for states in (keys, values))
        causal = mask is None and queries.shape[2] > 1
        read = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)
        projected: torch.Tensor = self.o_proj(read.transpose(1, 2).flatten(2))
        return projected


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.before_residual = config.norm_before_residual
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, *args: Any) -> torch.Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        states = (normed if self.before_residual else features) + self.self_attn(both, *args)
        mixed: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed


class EagleHead(PreTrainedModel):
    """A head. In column c it reads the target's feature of token c and the embedding of token c+1, and scores c+2.

    Args:
        config: its shapes.
        embeddings: the target's, which it shares unless it has its own; no parameter of the head.
    """

    config_class = EagleConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    conventions: dict[str, Any]

    def __init__(self, config: EagleConfig, embeddings: nn.Module | None = None) -> None:
        super().__init__(config)
        size, width = config.hidden_size, len(config.layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        if config.fc_norm:
            norms = (LlamaRMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in config.layer_ids)
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.rotary = LlamaRotaryEmbedding(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self._shared = (embeddings,)  # a tuple hides the target's module from the head's own
        self.conventions = {}

    def get_input_embeddings(self) -> Any:
        """Its own embeddings, or the target's."""
        return self.embed_tokens if self.config.own_embeddings else self._shared[0]

    def get_output_embeddings(self) -> nn.Module:
        """The projection onto the draft's vocabulary."""
        return self.lm_head

    def can_generate(self) -> bool:
        """It scores tokens."""
        return True

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that it reads."""
        return tuple(self.config.layer_ids)

    def ids(self) -> torch.Tensor:
        """(draft vocabulary,) the target's id of each of its own."""
        mapped: torch.Tensor = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        return mapped

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, width, 3 * target size) joined hidden states -> (batch, width, size) features."""
        states = states.to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        combined: torch.Tensor = self.fc(states)
        return combined

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits over its own vocabulary, and what is to be fed back.

        Args:
            input_ids: (batch, width) int64, the tokens after those that `features` belong to.
            features: (batch, width, size).
            attention_mask: additive, (batch or 1, 1, width, columns); causal by default.
            position_ids: (batch, width), from 0 by default.
            past_key_values: a cache with `update`.
            logits_to_keep: how many trailing places to score; 0 for all.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        embeddings = self.get_input_embeddings()
        place = getattr(embeddings, "weight", features).device
        if place.type == "meta":
            place = input_ids.device
        embedded = embeddings(input_ids.to(place)).to(device=features.device, dtype=features.dtype)
        rotary = self.rotary(features, position_ids)
        states = self.midlayer(embedded, features, rotary, attention_mask, past_key_values)
        normed = self.norm(states)
        logits = self.lm_head(normed[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, hidden_states=(normed if self.config.norm_output else states,))
