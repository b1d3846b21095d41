"""Shapes of the Llamas that controlled pairs are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a Llama.

    Args:
        layers, hidden, intermediate, heads (`int`): layers, hidden size, intermediate size, attention heads.
        kv_heads (`int`, *optional*): heads of keys and values; as many as `heads` by default.
        vocab (`int`): the vocabulary that a pair of this shape gets unless another is asked for.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int | None = None
    vocab: int = 8192


TARGET_98M = Size(layers=12, hidden=768, intermediate=2048, heads=12)
DRAFT_1_5M = Size(layers=2, hidden=80, intermediate=216, heads=2)
GOAL_LLAMA = Size(layers=4, hidden=128, intermediate=256, heads=4)
# The shapes of the published checkpoints; the weights are random, and the head is not tied to the embedding.
LLAMA_8B = Size(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128_256)
LLAMA_1B = Size(layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, vocab=128_256)
SIZES = {
    "98M": TARGET_98M,
    "7M": Size(layers=4, hidden=256, intermediate=512, heads=4),
    "1.5M": DRAFT_1_5M,
    "0.7M": GOAL_LLAMA,
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.2-1b": LLAMA_1B,
}
_FORM = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?:/(\d+))?")


def size_by_name(option: str, text: str) -> Size:
    """The size that `text` stands for: a key of `SIZES`, or `layers x hidden x intermediate x heads[/kv_heads]`.

    Raises:
        ValueError: it is neither, or no Llama can have that shape; the message names `option`.
    """
    if text in SIZES:
        return SIZES[text]
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{option} {text}: must be one of {', '.join(SIZES)}, or LAYERSxHIDDENxINTERMEDIATExHEADS such as "
            "12x768x2048x12 (12/4 for 4 heads of keys and values)"
        )
    layers, hidden, intermediate, heads, kv_heads = (None if part is None else int(part) for part in match.groups())
    assert layers is not None and hidden is not None and intermediate is not None and heads is not None
    shared = heads if kv_heads is None else kv_heads
    if not (layers and hidden and intermediate and heads and shared):
        raise ValueError(f"{option} {text}: every number must be at least 1")
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"{option} {text}: the hidden size must be an even multiple of the number of heads")
    if heads % shared:
        raise ValueError(f"{option} {text}: the heads must be a multiple of the heads of keys and values")
    return Size(layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads)
