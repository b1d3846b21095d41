"""Tiny float64 models, drafts and tokenizers, built in code: a token mismatch they show is a fault, not rounding."""

import copy
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB = 97
WINDOW = 8
PAD = 0

# Every shape the equality tests run over; the sliding windows are short enough to be crossed within twenty tokens.
SHAPES = ("llama", "mistral", "gemma3", "qwen3", "gpt2")
DRAFTS = ("same", "near", "far")


def tiny(
    shape: str = "llama",
    seed: int = 0,
    *,
    vocab: int = VOCAB,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    initializer_range: float = 0.3,
    eos: int | list[int] | None = None,
    pad: int | None = PAD,
    window: int = WINDOW,
    positions: int = 256,
    attention: str = "eager",
    dtype: torch.dtype = torch.float64,
) -> PreTrainedModel:
    """A random model of one of `SHAPES` in eval mode; `initializer_range` keeps its logits well apart."""
    config = _config(
        shape,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        initializer_range=initializer_range,
        eos=eos,
        pad=pad,
        window=window,
        positions=positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


def _config(shape: str, **n: object) -> PretrainedConfig:
    # Embeddings are untied everywhere: a tied random model repeats its last token for ever, which hides faults.
    if shape == "gpt2":
        return GPT2Config(
            vocab_size=n["vocab"],
            n_embd=n["hidden"],
            n_layer=n["layers"],
            n_head=n["heads"],
            n_positions=n["positions"],
            initializer_range=n["initializer_range"],
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=n["eos"],
            pad_token_id=n["pad"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    common = {
        "vocab_size": n["vocab"],
        "hidden_size": n["hidden"],
        "intermediate_size": 2 * n["hidden"],
        "num_hidden_layers": n["layers"],
        "num_attention_heads": n["heads"],
        "num_key_value_heads": n["kv_heads"],
        "max_position_embeddings": n["positions"],
        "initializer_range": n["initializer_range"],
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": n["eos"],
        "pad_token_id": n["pad"],
    }
    mixed = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(n["layers"])]
    head_dim = n["hidden"] // n["heads"]
    if shape == "llama":
        return LlamaConfig(**common)
    if shape == "mistral":
        return MistralConfig(**common, sliding_window=n["window"])
    if shape == "gemma3":
        return Gemma3TextConfig(
            **common,
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            sliding_window=n["window"],
            layer_types=mixed,
        )
    if shape == "qwen3":
        return Qwen3Config(
            **common,
            head_dim=head_dim,
            use_sliding_window=True,
            sliding_window=n["window"],
            layer_types=mixed,
        )
    raise ValueError(f"shape must be one of {SHAPES}, got {shape!r}")


def draft_of(model: PreTrainedModel, kind: str, *, seed: int = 0, noise: float = 0.04) -> PreTrainedModel:
    """A draft for `model`: "same" accepts all, "near" (weights disturbed by `noise`) some, "far" (new weights) few."""
    if kind not in DRAFTS:
        raise ValueError(f"kind must be one of {DRAFTS}, got {kind!r}")
    draft = copy.deepcopy(model)
    if kind == "same":
        return draft
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for weight in _matrices(draft):
            fresh = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            spread = weight.std()
            weight.copy_(fresh * spread if kind == "far" else weight + noise * spread * fresh)
    return draft


def _matrices(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    return (weight for weight in model.parameters() if weight.dim() > 1)


def prompts(lengths: tuple[int, ...], *, seed: int = 0, vocab: int = VOCAB, pad: int = PAD) -> dict[str, torch.Tensor]:
    """Random prompts, padded on the left to the longest: `input_ids` and `attention_mask`, (B, max length)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, vocab, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def row_of(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """The prompt of one row, alone and without its padding."""
    keep = inputs["attention_mask"][row].bool()
    ids = inputs["input_ids"][row, keep][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tokenizer(*, size: int = VOCAB, permute: int = 0, chat: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: <pad>, <eos> and the 95 printable ASCII characters, one token each.

    Args:
        size: number of tokens; above 97 the rest are filler tokens, so two sizes share their first ids.
        permute: rotate the ids of the characters by so many places (same size, other meaning).
        chat: add a minimal chat template.
    """
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [space.pre_tokenize_str(chr(code))[0][0] for code in range(0x20, 0x7F)]
    if permute:
        characters = characters[permute:] + characters[:permute]
    names = ["<pad>", "<eos>", *characters]
    names += [f"<extra_{i}>" for i in range(size - len(names))]
    vocabulary = {name: index for index, name in enumerate(names[:size])}
    core = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = space
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    made.padding_side = "left"
    if chat:
        made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return made
