"""Many continuations of one prefix by target and draft, with the features that decoding would see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from ..engine.cache import RowStates
from ..engine.call import CallState
from ..engine.draft import NoDrafts
from ..engine.mapped_model import MappedModel
from ..engine.model import CachedModel
from ..engine.processors import Processors
from ..engine.request import Request
from ..engine.text import TokenTexts
from ..schemes.semantic.config import SemanticConfig
from ..schemes.semantic.reading import Reader, Writing
from ..schemes.semantic.segment import Segment


@dataclass(frozen=True)
class Continued:
    """The next segments of one prefix.

    Args:
        target_texts, draft_texts: the segments of each model.
        target, draft: (continuations, size) mean hidden states of each model on its own segments.
        crossed: (continuations, size) those of the target on the draft's segments.
    """

    target_texts: list[str]
    draft_texts: list[str]
    target: torch.Tensor
    draft: torch.Tensor
    crossed: torch.Tensor


class Continuer:
    """Continues prefixes at given sampling settings, by the code that decodes.

    Args:
        model, draft: the pair.
        tokenizer: the target's.
        config: says where segments end.
        sampling: `temperature`, `top_k` and `top_p`.
        eos (`list` of `int`): ids that end a text.
        pad (`int`): fills shorter prefixes.
    """

    def __init__(
        self,
        model: Any,
        draft: Any,
        tokenizer: Any,
        config: SemanticConfig,
        sampling: dict[str, Any],
        eos: list[int],
        pad: int,
    ) -> None:
        self.model, self.draft, self.config = model, draft, config
        self.sampling, self.eos, self.pad = sampling, eos, pad
        self.text: Callable[[Sequence[int]], str] = TokenTexts(tokenizer)

    def cuts(self, ids: Sequence[int]) -> list[int]:
        """Lengths of the beginnings of a text at which a segment begins."""
        segment = Segment(self.config.segment_stop, None, self.config.max_segment_tokens)
        found = [0]
        for length, token in enumerate(ids[:-1], start=1):
            segment.add(self.text([token]), 1)
            if segment.ended and ids[length] not in self.eos:
                found.append(length)
                segment.begin(segment.rest)
        return found

    def __call__(self, prefixes: Sequence[Sequence[int]], number: int) -> list[Continued]:
        """`number` continuations of each of `prefixes`, by either model."""
        call = self._call(prefixes, number)
        groups = range(0, call.batch, number)
        target = CachedModel(self.model, call.batch, call.longest)
        states = self._read(call, target, groups)
        target_texts, target_sums, counts = self._write(call, target, states, number)
        own = target_sums / counts
        draft = MappedModel(self.draft, call.vocabulary, call.device, call.batch, call.longest)
        draft_states = self._read(call, draft, groups)
        draft_texts, draft_sums, counts = self._write(call, draft, draft_states, number)
        target.cache.load([states[row // number] for row in call.rows])
        reader = Reader(call, target, Processors(call.request.processors), with_features=True)
        numbers = [int(count) for count in counts.squeeze(1).tolist()]
        reading = reader(call.rows, numbers, [length - 1 for length in call.lengths(call.rows)])
        assert reading.evidence.features is not None
        means = (own.cpu(), (draft_sums / counts).cpu(), (reading.evidence.features / counts).cpu())
        return [
            Continued(
                target_texts[first : first + number],
                draft_texts[first : first + number],
                *(mean[first : first + number].clone() for mean in means),
            )
            for first in groups
        ]

    def _call(self, prefixes: Sequence[Sequence[int]], number: int) -> CallState:
        device = self.model.device
        width = max(len(prefix) for prefix in prefixes)
        ids = torch.full((len(prefixes), width), self.pad)
        mask = torch.zeros_like(ids)
        for row, prefix in enumerate(prefixes):
            ids[row, width - len(prefix) :] = torch.tensor(prefix)
            mask[row, width - len(prefix) :] = 1
        ids, mask = (values.repeat_interleave(number, dim=0).to(device) for values in (ids, mask))
        length = width + self.config.max_segment_tokens
        config = GenerationConfig(do_sample=True, **self.sampling, max_length=length)
        config._pad_token_tensor = torch.tensor(self.pad, device=device)
        criteria: list[Any] = [MaxLengthCriteria(length)]
        if self.eos:
            criteria.append(EosTokenCriteria(torch.tensor(self.eos, device=device)))
        kwargs = {"attention_mask": mask}
        return CallState(
            Request(self.model, self.draft, self.config, config, ids, self._warpers(), criteria, None, kwargs)
        )

    def _warpers(self) -> list[Any]:
        """As `generate` orders them."""
        settings, warpers = self.sampling, list[Any]()
        if settings["temperature"] != 1.0:
            warpers.append(TemperatureLogitsWarper(settings["temperature"]))
        if settings["top_k"]:
            warpers.append(TopKLogitsWarper(settings["top_k"]))
        if settings["top_p"] < 1.0:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        return warpers

    @staticmethod
    def _read(call: CallState, model: CachedModel, rows: range) -> list[RowStates]:
        """What the model's cache holds of each prefix but its last token, read once."""
        lengths = [length - 1 for length in call.canvas.lengths(rows)]
        if max(lengths) == 0:
            return [[] for _ in rows]
        model.cache.load([[] for _ in rows])
        model.feed(call.canvas.read(rows, max(lengths) + 1, 0)[:, :-1], lengths, keep=1)
        return [model.cache.rows(place, length) for place, length in enumerate(lengths)]

    def _write(
        self, call: CallState, model: CachedModel, states: list[RowStates], number: int
    ) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """A segment for every row, left on the canvas behind it: texts, sums of features, counts (rows, 1)."""
        canvas = call.canvas
        model.cache.load([states[row // number] for row in call.rows])
        segments = [Segment(self.config.segment_stop, None, self.config.max_segment_tokens) for _ in call.rows]

        def stops(row: int, ids: list[int]) -> bool:
            return segments[row].add(self.text([token for token in ids if token not in self.eos]), len(ids))

        processors = Processors(call.request.processors)
        turn = Writing(
            call.within(), model, NoDrafts(), call.rows, pause=stops, processors=processors, with_features=True
        )
        turn.run([length - 1 for length in canvas.lengths(call.rows)])
        assert turn.features is not None
        counts = torch.tensor(canvas.generated, device=call.device, dtype=turn.features.dtype).unsqueeze(1)
        for row in call.rows:
            canvas.hold(row, 0)
        return [segment.text for segment in segments], turn.features, counts
