"""Pairs small enough to be made and measured in a test."""

from hf_semspec.bench import Size, controlled_pair

SMALL = Size(layers=2, hidden=64, intermediate=64, heads=2)
SMALLEST = Size(layers=1, hidden=64, intermediate=64, heads=2)
# Arguments of `bench` and `check`.
PAIR = {"controlled": 0.7, "target_size": SMALLEST, "draft_size": SMALLEST, "vocab": 200}


def small_pair(agreement, **kwargs):
    return controlled_pair(agreement, target_size=SMALL, draft_size=SMALL, vocab=400, **kwargs)
