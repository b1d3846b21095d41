"""What a forward is asked for, and what it gave."""

from typing import NamedTuple

import torch

# Hidden states of a forward: none, those of the last layer, or those named, see `hooks.call_for_states`.
Wanted = bool | tuple[int, ...]


class Fed(NamedTuple):
    """What a forward gave.

    Args:
        logits: (batch, kept places, vocabulary).
        hidden: (batch, width, size) of the last layer, after the final norm, at every place, or of the layers asked
            for, side by side; `None` if not asked for.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None
