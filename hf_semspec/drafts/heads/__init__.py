"""EAGLE-3 heads: drafts that read the target's hidden states (arXiv 2503.01840)."""

from typing import Any

MODEL_TYPE = "semspec_eagle3"


def is_head(draft: Any) -> bool:
    """Whether `draft` is a loaded head; imports nothing that only heads need."""
    return getattr(getattr(draft, "config", None), "model_type", None) == MODEL_TYPE
