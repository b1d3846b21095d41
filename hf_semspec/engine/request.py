"""What one call of `generate` hands over, and what one round of it has scored."""

from dataclasses import dataclass
from typing import Any

import torch

from ..common.fields import SAMPLING_SETTINGS
from .draft import Draft


@dataclass(frozen=True)
class Request:
    """What `generate` hands over, with the scheme's config; `inputs_tensor` is what an encoder reads, before rows are
    repeated for `num_return_sequences`."""

    model: Any
    draft: Any
    scheme: Any
    generation_config: Any
    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    streamer: Any
    model_kwargs: dict[str, Any]
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    inputs_tensor: Any = None
    trace: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The scheme's fields, and the resolved sampling settings."""
        sampling = {name: getattr(self.generation_config, name, None) for name in SAMPLING_SETTINGS}
        return {**self.scheme.to_dict(), **sampling}


@dataclass(frozen=True)
class Block:
    """A scored block: γ drafts (none for a plain step) for each of `chains` chains of the live rows.

    Args:
        draft: the drafted ids, and the law they came from if it was kept; `None` for a plain step.
        scores: (rows, chains, γ+1, vocabulary) float32, the target's processed scores.
        logits: the same before the processors; `None` unless the caller wants them.
        log_p: log-probabilities of the processed law; `None` unless laws are kept.
        choices: (rows, chains, γ+1) int64 argmax of `scores`; `None` when sampling.
        uniforms: (rows, chains, γ) in [0, 1); `None` when greedy.
        broken: () bool, whether the target's scores hold nan or a row without mass.
    """

    draft: Draft | None
    scores: torch.Tensor
    logits: torch.Tensor | None
    log_p: torch.Tensor | None
    choices: torch.Tensor | None
    uniforms: torch.Tensor | None
    broken: torch.Tensor
