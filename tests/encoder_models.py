"""Tiny float64 models that read more than text, built in code: encoder-decoders, speech and image-text models."""

import functools
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    PreTrainedModel,
    T5Config,
    UMT5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.models import PAD, VOCAB

EOS = 1
IMAGE = VOCAB - 1
MELS = 8
FRAMES = 20  # of one segment; Whisper's encoder halves them
FAMILIES = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus")


def encoder_decoder(
    family: str = "t5", seed: int = 2, *, vocab: int = VOCAB, eos: int | None = EOS, positions: int = 64
) -> PreTrainedModel:
    """A random encoder-decoder of text in eval mode."""
    if family in ("t5", "mt5", "umt5"):
        kind = {"t5": T5Config, "mt5": MT5Config, "umt5": UMT5Config}[family]
        config = kind(
            vocab_size=vocab,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=eos,
            tie_word_embeddings=False,
        )
    else:
        kind = {"bart": BartConfig, "mbart": MBartConfig, "marian": MarianConfig, "pegasus": PegasusConfig}[family]
        config = kind(
            vocab_size=vocab,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=positions,
            init_std=0.3,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            pad_token_id=PAD,
            eos_token_id=eos,
            bos_token_id=3,
            tie_word_embeddings=False,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
        _spread(model, seed)
    return _ready(model)


def whisper(seed: int = 0, *, mels: int = MELS, eos: int | None = EOS, cross: int = 32) -> PreTrainedModel:
    """A random Whisper in eval mode, for segments of `FRAMES` frames."""
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=mels,
        d_model=cross,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=48,
        init_std=0.3,
        decoder_start_token_id=2,
        pad_token_id=PAD,
        eos_token_id=eos,
        bos_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager")
        _spread(model, seed)
    model.generation_config.no_timestamps_token_id = VOCAB - 30
    model.generation_config.is_multilingual = False
    return _ready(model)


def llava(seed: int = 0, *, layers: int = 2, image_size: int = 8, eos: int | None = None) -> PreTrainedModel:
    """A random Llava in eval mode; an image takes four places of `IMAGE` in the prompt."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=image_size,
        patch_size=4,
        initializer_range=0.3,
    )
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=eos,
        bos_token_id=None,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, pad_token_id=PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
        _spread(model, seed)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = eos
    return _ready(model)


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that the source decides what is written, and a head of its own: a random model with a tied
    one repeats its last token for ever."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                crossed = "encoder_attn" in name or "EncDecAttention" in name
                placed = any(part in name for part in ("embed", "shared", "relative"))
                scale = 2.0 if placed else 0.2 if crossed else 0.3
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    return model.double().eval()


def sources(lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts for an encoder, padded on the right to the longest."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(4, VOCAB, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def speech(batch: int, *, frames: int = FRAMES, mels: int = MELS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Log-mel features, (batch, mels, frames)."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(batch, mels, frames, generator=generator, dtype=torch.float64)}


def pictures(texts: tuple[tuple[int, int], ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of `(before, after)` tokens around an image each, padded on the left, with their pixels."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [
            *torch.randint(2, IMAGE, (before,), generator=generator).tolist(),
            *[IMAGE] * 4,
            *torch.randint(2, IMAGE, (after,), generator=generator).tolist(),
        ]
        for before, after in texts
    ]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    pixels = torch.randn(len(rows), 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "pixel_values": pixels}


def one_of(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """The inputs of one row, without its padding."""
    own = {name: value[row : row + 1] for name, value in inputs.items()}
    if "attention_mask" in own:
        keep = own["attention_mask"][0].bool()
        own["input_ids"], own["attention_mask"] = own["input_ids"][:, keep], own["attention_mask"][:, keep]
    return own


model = functools.cache(encoder_decoder)
speaker = functools.cache(whisper)
RAGGED = (4, 9, 6)
LOGS = pytest.mark.deprecated  # Whisper's own generate logs a deprecation of what it calls itself
