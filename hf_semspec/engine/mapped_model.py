"""A draft model that speaks the target's vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from .cache import text_config
from .model import CachedModel, Fed, Wanted
from .sources import Source


class MappedModel(CachedModel):
    """A draft model that speaks the target's vocabulary, on the target's device.

    Args:
        draft: a causal LM.
        vocabulary (`int`): the target's vocabulary size: ids the draft lacks get no mass, ids the target lacks are
            dropped, and a committed id that the draft cannot embed is fed to it as its pad token.
        device: where ids and laws live.
        batch, last_position, source: as [`CachedModel`].
    """

    def __init__(
        self,
        draft: Any,
        vocabulary: int,
        device: torch.device | None,
        batch: int,
        last_position: int,
        source: Source | None = None,
    ) -> None:
        super().__init__(draft, batch, last_position, source)
        config = text_config(draft)
        self.law_device = device or self.device
        self.vocabulary = vocabulary
        self.own_vocabulary = int(config.vocab_size)
        pad, eos = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        self.substitute = next(i for i in (pad, *_ids(eos), 0) if i is not None)

    def forward(self, ids: torch.Tensor, ends: Sequence[int], keep: int, with_hidden: Wanted = False) -> Fed:
        """As [`CachedModel.forward`]; the logits are float32 and stand on the target's vocabulary."""
        logits, hidden = super().forward(self._known(ids), ends, keep, with_hidden)
        return Fed(self._mapped(logits.to(device=self.law_device, dtype=torch.float32)), hidden)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """What it reads for `ids`."""
        if self.own_vocabulary >= self.vocabulary:
            return ids
        return torch.where(ids < self.own_vocabulary, ids, self.substitute)

    def _mapped(self, logits: torch.Tensor) -> torch.Tensor:
        """Its `logits` on the target's vocabulary."""
        missing = self.vocabulary - logits.shape[-1]
        if missing > 0:
            return functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[..., : self.vocabulary] if missing else logits


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
