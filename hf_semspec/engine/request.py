"""What one call of `generate` hands over, and what one round of it has scored and decided."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
        return {**self.scheme.resolved_dict(), **sampling}


@dataclass(frozen=True)
class Block:
    """A scored block: γ drafts (none for a plain step) for each of `chains` chains of the live rows.

    Args:
        rows: the live rows, indices into the caller's batch.
        draft: the drafted ids, and the law they came from if it was kept; `None` for a plain step.
        scores: (rows, chains, γ+1, vocabulary) float32, the target's processed scores.
        logits: the same before the processors; `None` unless the caller wants them.
        log_p: log-probabilities of the processed law; `None` unless laws are kept.
        choices: (rows, chains, γ+1) int64 argmax of `scores`; `None` when sampling.
        uniforms: (rows, chains, γ) in [0, 1); `None` when greedy.
        faults: (rows, chains, γ+1) int64, what is wrong with the target's scores, see [`processors.faults`].
        hidden: (rows * chains, width, size) the target's last hidden states; `None` unless they are wanted.
    """

    rows: list[int]
    draft: Draft | None
    scores: torch.Tensor
    logits: torch.Tensor | None
    log_p: Any
    choices: torch.Tensor | None
    uniforms: Any
    faults: torch.Tensor
    hidden: torch.Tensor | None = None

    @property
    def drafts(self) -> torch.Tensor:
        """The drafted ids, (rows, chains, γ) int64."""
        assert self.draft is not None
        return self.draft.ids

    @property
    def log_q(self) -> Any:
        """(rows, chains, γ, vocabulary), the law they were drawn from; `None` unless laws are kept."""
        assert self.draft is not None
        return self.draft.log_q

    @property
    def valid(self) -> torch.Tensor | None:
        """(rows, chains, γ) bool, which of them were really drafted; `None` if all were."""
        assert self.draft is not None
        return self.draft.valid

    def one_chain(self) -> "Block":
        """The first chain alone, all shapes without the chains' dimension."""
        names = ("scores", "logits", "log_p", "choices", "uniforms")
        block: Block = _first_chain(self, names, draft=_first_chain(self.draft, ("ids", "valid", "log_q")))
        return block


def _first_chain(record: Any, names: tuple[str, ...], **others: Any) -> Any:
    values = {name: getattr(record, name) for name in names}
    return replace(
        record, **others, **{name: None if value is None else value[:, 0] for name, value in values.items()}
    )


class Decided(NamedTuple):
    """What a round has decided, on the host: lists with an entry a row.

    Args:
        accepted, outcomes, chains: as in [`acceptance.Acceptance`].
        tokens: the ids to be committed: the accepted ones and, if there is room and a law for it, the next one.
        masked: whether a row was stopped by a place where every id is masked out, which has no next token.
    """

    accepted: list[int]
    outcomes: list[int]
    chains: list[int]
    tokens: list[list[int]]
    masked: list[bool]
