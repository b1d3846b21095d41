"""Whole answers by a draft with another tokenizer: text goes across, and is encoded anew on either side."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, MaxTimeCriteria, logits_process

from ...drafts.other_tokenizer import encode_after
from ...engine.cache import text_config
from ...engine.call import CallState
from ...engine.model import CachedModel
from ...engine.outputs import DecodingStats
from ...engine.processors import HISTORYLESS
from ...engine.request import Request
from ...engine.rounds import Speculation
from ...engine.stopping import StopRules
from .answers import AnswerWriter, Run
from .judge import Answer

# Processors that mean the same on any vocabulary; the others speak of the target's ids.
_ANY_VOCABULARY = (
    *(kind for kind in HISTORYLESS if kind is not logits_process.SuppressTokensLogitsProcessor),
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
)
SPARE_TOKENS = 1.25  # the draft may need more tokens than the target for the same text; ours


class TranslatingWriter(AnswerWriter):
    """An `AnswerWriter` whose draft reads and writes through its own tokenizer. Its cache is not kept: what it reads
    is encoded anew for every answer.

    Args:
        call, run, ngrams: as [`AnswerWriter`].
        tokenizer: the target's.

    Raises:
        ValueError: a logits processor that speaks of the target's ids.
    """

    def __init__(self, call: CallState, run: Run, ngrams: bool, tokenizer: Any) -> None:
        super().__init__(call, run, ngrams)
        request = call.request
        self.tokenizer, self.own = tokenizer, request.assistant_tokenizer
        self.vocabulary = int(text_config(request.draft).vocab_size)
        self.model = CachedModel(request.draft, call.batch, self.context - 1)
        timed = [criterion for criterion in request.criteria if isinstance(criterion, MaxTimeCriteria)]
        eos = request.draft.generation_config.eos_token_id
        ends = [] if eos is None else [EosTokenCriteria(torch.as_tensor(eos).view(-1))]
        self.criteria = [*ends, *timed]
        others = [criterion for criterion in request.criteria if criterion not in timed]
        self.rules = StopRules(others, call.canvas.prompt_width, request.generation_config.max_length)
        for processor in self.processors.processors:
            if type(processor) not in _ANY_VOCABULARY:
                raise ValueError(
                    f"logits_processor {type(processor).__name__} speaks of the target's token ids, which a draft "
                    "with another tokenizer does not know: leave it out, or pass a draft with the target's tokenizer"
                )

    def write(self, live: Sequence[int]) -> list[Answer]:
        """Write an answer for each of the rows `live` onto the canvas."""
        texts = self.call.canvas.texts(live)
        answers = self._drafted(live, texts)
        return [
            self._take(row, encode_after(self.tokenizer, before, text), closed)
            for row, before, (text, closed) in zip(live, texts, answers, strict=True)
        ]

    def _drafted(self, live: Sequence[int], texts: list[list[int]]) -> list[tuple[str, bool]]:
        """The draft's answers to `texts`, ids of the target, as text; and whether each was closed by its EOS."""
        prompts = [self.own(self.tokenizer.decode(ids, skip_special_tokens=True))["input_ids"] for ids in texts]
        prompts = [ids or [self.own.eos_token_id or 0] for ids in prompts]
        rooms = [self.call.rules.room - self.call.canvas.generated[row] for row in live]
        wanted = [
            int(SPARE_TOKENS * room * max(len(own) / len(ids), 1)) + 1
            for room, own, ids in zip(rooms, prompts, texts, strict=True)
        ]
        limits = [min(want, self.context + 1 - len(own)) for want, own in zip(wanted, prompts, strict=True)]
        writing = [i for i, limit in enumerate(limits) if limit > 0]
        answers = [("", False)] * len(live)
        if not writing:
            return answers
        stats = DecodingStats(self.stats.scheme, [self.stats.rows[live[i]] for i in writing])
        call = self._call([prompts[i] for i in writing], max(limits)).within(stats=stats)
        self.model.cache.load([[] for _ in writing])
        state = Speculation(
            call,
            self.model,
            self._lookup(call, call.rows),
            limits=[limits[i] for i in writing],
            pause_masked=True,
            processors=self.processors,
        )
        state.prefill([0] * call.batch)
        self.run(state)
        for i, row in zip(writing, call.rows, strict=True):
            first = call.canvas.prompt_width
            ids = call.canvas.shown[row, 0, first : first + call.canvas.generated[row]].tolist()
            text = self.own.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            answers[i] = text, ids[-1:] != [] and ids[-1] in call.rules.eos_ids
        return answers

    def _call(self, prompts: list[list[int]], room: int) -> CallState:
        """The draft's own call, on its own vocabulary."""
        request, width = self.call.request, max(len(ids) for ids in prompts)
        config = copy.copy(request.generation_config)
        config.max_length, config.return_dict_in_generate = width + room, False
        pad = self.own.pad_token_id
        pad = pad if pad is not None and pad < self.vocabulary else 0
        config._pad_token_tensor = torch.tensor(pad)
        ids = torch.tensor([[pad] * (width - len(own)) + own for own in prompts])
        mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
        call = CallState(
            Request(
                model=request.draft,
                draft=request.draft,
                scheme=request.scheme,
                generation_config=config,
                input_ids=ids,
                processors=self.processors.processors,
                criteria=self.criteria,
                streamer=None,
                model_kwargs={"attention_mask": mask},
            ),
            randomness=self.call.randomness,
        )
        return call

    def _take(self, row: int, ids: list[int], closed: bool) -> Answer:
        """Put an answer, in the target's ids, behind the text of `row`."""
        call, canvas, rules = self.call, self.call.canvas, self.rules
        start, width = canvas.generated[row], canvas.widths([row])[0]
        ends = [own for own in (self.tokenizer.eos_token_id, *sorted(rules.eos_ids)) if own in rules.eos_ids]
        ids = [*ids, *ends[:1]] if closed else ids
        ids = ids[: rules.room - start]
        if not ids:
            return Answer(start, [], False, False)
        canvas.write([row], 0, torch.tensor([[ids]], device=call.device))
        (end,) = rules.cut([ids], [row], [width], lambda at: canvas.shown[:, 0, :at])
        length = end or len(ids)
        call.clear(row, start + length, start + len(ids))
        canvas.hold(row, start + length)
        closed = ids[length - 1] in rules.eos_ids
        ids = ids[: length - closed]
        return Answer(start, ids, end is not None or start + length == rules.room, closed)
