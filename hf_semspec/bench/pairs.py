"""Pairs of random models with a chosen agreement: the cost of real layers, the acceptance of one's choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .agreement import Agreement, agreement_on
from .sizes import DRAFT_1_5M, TARGET_98M, Size

# What the layers may add, relative to the residual stream: they cost what layers cost and hardly move the logits.
LAYER_SHARE = 0.02
STRETCH = 20


@dataclass(frozen=True)
class ControlledPair:
    """A target and a draft that follow one cycle through the vocabulary, the draft wrongly on some tokens.

    Args:
        model (`LlamaForCausalLM`): the target; its greedy text from any token is the cycle.
        draft (`LlamaForCausalLM`): the draft; on tokens outside `agrees` it proposes another token.
        cycle (`torch.LongTensor` of shape `(vocab,)`): all ids in the order in which the target visits them.
        agrees (`torch.BoolTensor` of shape `(vocab,)`): by id, whether the draft continues as the target does.
    """

    model: LlamaForCausalLM
    draft: LlamaForCausalLM
    cycle: torch.Tensor
    agrees: torch.Tensor

    def prompts(self, batch: int, length: int, seed: int = 0) -> torch.Tensor:
        """Prompts `(batch, length)`: stretches of the cycle, spread evenly over it from a random start."""
        vocab = len(self.cycle)
        start = torch.randint(vocab, (1,), generator=torch.Generator().manual_seed(seed))
        starts = (start + torch.arange(batch) * vocab // batch)[:, None]
        return self.cycle[(starts + torch.arange(length)) % vocab]

    def ideal_rounds(self, text: torch.Tensor, num_draft_tokens: int) -> int:
        """Rounds that greedy speculative decoding needs for `text` `(length,)`, the prompt's last token first.

        The first new token comes from the prefill and is not counted as a round.
        """
        agrees = self.agrees[text].tolist()
        rounds, position = 0, 1
        while position < len(text) - 1:
            run = 0
            while run < num_draft_tokens and position + run < len(text) - 1 and agrees[position + run]:
                run += 1
            position += run + 1
            rounds += 1
        return rounds

    def measure(self, text: torch.Tensor) -> Agreement:
        """Agreement on `text` `(batch, length)`, every position read by both models once."""
        return agreement_on(self.model, self.draft, text)


def controlled_pair(
    agreement: float,
    *,
    target_size: Size = TARGET_98M,
    draft_size: Size = DRAFT_1_5M,
    vocab: int | None = None,
    seed: int = 0,
    logit_scale: float = 12.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> ControlledPair:
    """Random Llamas whose next token is fixed by the current one, alike on a share `agreement` of the vocabulary.

    The head's row for a token's successor is the token's own embedding, and the layers add little to the residual
    stream, so the successor's logit is about `logit_scale` and all others are about normal with standard deviation
    `logit_scale / sqrt(hidden)`. Successors form one cycle: a text visits every token once before it repeats.

    Args:
        agreement (`float`): share of tokens, in [0, 1], on which the draft's successor is the target's. What a text
            shows varies around it: see [`ControlledPair.measure`].
        target_size, draft_size (`Size`): shapes; by default 98M and 1.5M parameters.
        vocab (`int`, *optional*): vocabulary size, at least 4; by default the target size's.
        seed (`int`): seeds weights, cycle and disagreements; the global generator is left alone.
        logit_scale (`float`): the successor's logit, in nats; larger means lower entropy.
        dtype (`torch.dtype`): of both models.
        device (`str` or `torch.device`): where the weights are made and stay. The draws differ from device to device.

    Raises:
        ValueError: an agreement outside [0, 1] or a vocabulary below 4.
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement={agreement}: must be in [0, 1].")
    vocab = target_size.vocab if vocab is None else vocab
    if vocab < 4:
        raise ValueError(f"vocab={vocab}: must be at least 4.")
    generator = torch.Generator().manual_seed(seed)
    cycle = torch.randperm(vocab, generator=generator)
    successor = torch.empty_like(cycle)
    successor[cycle] = cycle.roll(-1)
    wrong = cycle[_spread(1 - agreement, vocab, generator)]
    wrong = wrong[torch.randperm(len(wrong), generator=generator)]
    agrees = torch.ones(vocab, dtype=torch.bool)
    agrees[wrong] = False
    # Wrong tokens exchange their successors, so the draft's successors are a permutation too.
    draft_successor = successor.clone()
    draft_successor[wrong] = successor[wrong.roll(1)]
    if torch.device(device).type != "cpu":
        generator = torch.Generator(device).manual_seed(seed)
    model = _successor_llama(target_size, successor, logit_scale, generator, dtype, device)
    draft = _successor_llama(draft_size, draft_successor, logit_scale, generator, dtype, device)
    return ControlledPair(model, draft, cycle, agrees)


def random_llama(size: Size, *, vocab: int) -> LlamaForCausalLM:
    """A Llama of the given shape with random float32 weights, the same ones each time, without an end-of-text token,
    in eval mode."""
    generator = torch.Generator().manual_seed(0)
    model = _llama(size, vocab, torch.float32, "cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    return model


def _spread(share: float, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Positions `(n,)`, n about `share * vocab`, random within stretches of 20 and equally many in each.

    Short texts then show the chosen share too. A single position is none: it has no other to exchange with.
    """
    bounds = range(0, vocab + STRETCH, STRETCH)
    positions = [
        start
        + torch.randperm(min(STRETCH, vocab - start), generator=generator)[: round(share * end) - round(share * start)]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    chosen = torch.cat(positions)
    return chosen if len(chosen) > 1 else chosen[:0]


def _successor_llama(
    size: Size,
    successor: torch.Tensor,
    logit_scale: float,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: str | torch.device,
) -> LlamaForCausalLM:
    """A Llama whose argmax after token i is `successor[i]`, with logit about `logit_scale`."""
    model = _llama(size, len(successor), dtype, device)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Unit inputs give unit outputs; the two projections that write to the residual stream are scaled down.
            std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= LAYER_SHARE / math.sqrt(size.layers)
            parameter.data.normal_(0.0, std, generator=generator)
    embedding = model.get_input_embeddings().weight.data
    embedding.normal_(0.0, 1.0, generator=generator)
    embedding *= math.sqrt(size.hidden) / embedding.norm(dim=-1, keepdim=True)
    model.get_output_embeddings().weight.data[successor.to(device)] = embedding * (logit_scale / size.hidden)
    return model


def _llama(size: Size, vocab: int, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    """A Llama with norms of one and weights yet to be filled, made where it is to live: nothing is moved or cast."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads or size.heads,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    # Its buffers are computed when it is made, which the meta device cannot do.
    with torch.device(device):
        model.model.rotary_emb = LlamaRotaryEmbedding(config=config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model.eval()
