"""`semantic` over servers, by the likelihood of segments or the target's top k: what needs no hidden states."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from ..common.fields import integer
from ..engine.outputs import SegmentRecord
from ..engine.text import TokenTexts
from ..schemes.semantic.config import SemanticConfig
from ..schemes.semantic.rules import accepted, leading_matches, score_ratio
from ..schemes.semantic.segment import Segment
from .asking import Prompt, check_alike, check_reviser, each
from .client import Completion, Connection, Law, OpenAIServer
from .results import Served


async def semantic(
    prompts: Sequence[Prompt],
    *,
    target: OpenAIServer,
    draft: OpenAIServer,
    config: SemanticConfig,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
) -> list[Served]:
    """Answer `prompts` segment by segment, all at once: the draft writes one, and it stands if the target finds it as
    likely as the draft does, or each of its tokens is among the target's best. Segments end, and stand, by the code of
    the scheme in process.

    Args:
        prompts (`Sequence`): see [`parse`].
        target, draft ([`OpenAIServer`]): two servers, or one twice, with the same tokenizer.
        config ([`SemanticConfig`]): with the scorer `"likelihood"`, or `"none"` beside `top_k_accept`; `revise_chunk`
            has no effect here.
        max_new_tokens (`int`): of every answer.
        temperature (`float`): 0 is greedy; else 1, as servers give log-probabilities before temperature.
        seed (`int`): of draws.
        chat (`bool`): see [`parse`].

    Returns:
        `list[Served]`: in the order of the prompts; one that failed has its `error`, and the others their answers.

    Raises:
        ValueError: tokenizers that differ, or a config that servers cannot follow.
    """
    check_alike(target, draft)
    check_reviser(config.revise_with)
    integer("max_new_tokens", max_new_tokens, 1)
    if config.scorer not in ("likelihood", "none") or config.residual == "exact":
        raise ValueError(
            f"scorer={config.scorer!r} with residual={config.residual!r} reads what servers do not hand out: take "
            'scorer="likelihood", or "none" with `top_k_accept`, and residual="plain"'
        )
    if temperature not in (0, 1):
        raise ValueError(f"temperature {temperature}: must be 0 or 1, since servers give log-probabilities before it")
    texts = TokenTexts(target.tokenizer)

    async def one(number: int, ids: list[int], served: Served, p: Connection, q: Connection) -> None:
        row = _Row(config, texts, set(target.tokenizer.all_special_ids), max_new_tokens, ids, served)
        row.law = {"temperature": float(temperature), "seed": seed}
        row.draw = random.Random(f"{seed}/{number}") if temperature else None
        await row.answer(f"prompt {number}", p, q)

    return await each(prompts, target, draft, one, chat)


class _Row:
    """One prompt. `text` holds its new ids."""

    law: dict[str, float]
    draw: random.Random | None

    def __init__(
        self,
        config: SemanticConfig,
        texts: TokenTexts,
        special: set[int],
        room: int,
        prompt: list[int],
        served: Served,
    ) -> None:
        self.config, self.texts, self.special = config, texts, special
        self.room, self.prompt, self.served, self.text = room, prompt, served, served.ids
        self.segment = Segment(config.segment_stop, config.think_end, config.max_segment_tokens)
        self.finishing = self.ended = False
        self.begun = 0  # where the target's own segment begins
        self.scores: tuple[float, float] | None = None  # of the drafted segment that failed before it
        self.marks = [mark for mark in (config.segment_stop, config.think_end) if mark is not None]

    async def answer(self, name: str, p: Connection, q: Connection) -> None:
        drafts = self.config.first_segment == "draft"
        while not self.ended:
            drafts = await self._draft(name, p, q) if drafts and not self.finishing else await self._write(name, p)
            self.ended = self.ended or len(self.text) >= self.room
        self._close("finish" if self.finishing else "")

    async def _draft(self, name: str, p: Connection, q: Connection) -> bool:
        """The draft writes a segment, which stands or falls; whether it writes the next one, too."""
        config, start = self.config, len(self.text)
        what = f"the draft's segment at {start} for {name}"
        most = min(self.room - start, config.max_segment_tokens)
        before = [*self.prompt, *self.text]
        written = await q.complete(what, self.served.draft, before, most, stop=self.marks or None, **self.law)
        drafted = self.segment.copy()
        count = self._cut(drafted, written)
        if drafted.thought_ended:
            self._finish()
            return False
        if not count:
            return False
        ids = written.ids[:count]
        what = f"the reading of the segment at {start} for {name}"
        tops = max(config.top_k_accept, 1)
        read = await p.complete(what, self.served.target, [*before, *ids], 1, prompt_logprobs=tops, **self.law)
        laws = [law or {} for law in read.prompt[len(before) :]]
        stands, scores, by_score = self._judge(ids, written.log_probs[:count], laws)
        ends = ids[-1] in self.special and written.stopped
        if stands:
            self.text += ids
            self._record(start, "draft", "score" if by_score else "top_k", scores)
            self.ended = ends or len(self.text) >= self.room
            bonus: list[int] = []
            if config.bonus and not self.ended:
                bonus = read.ids[:1]
                self.text += bonus
                self._record(start + count, "target", "bonus", None)
                self.ended = not bonus or self._closes(bonus, read)
            self.begun = len(self.text)
            self._next(self.texts(bonus))
            return not self.finishing
        self.scores = scores
        if config.salvage and self.draw is None:
            choices = torch.tensor([[max(law, key=law.__getitem__) for law in laws]])
            kept = int(leading_matches(choices, torch.tensor([ids]), torch.tensor([count])))
            self.text += ids[:kept]
            self.segment.add(self.texts(ids[:kept]), kept)
        return False

    def _judge(self, ids: list[int], log_q: list[float], laws: list[Law]) -> tuple[bool, tuple[float, float], bool]:
        """Whether the segment stands, P̂ and Q̂, and whether these alone let it."""
        config, count = self.config, len(ids)
        log_p = [law[token] for law, token in zip(laws, ids, strict=True)]
        scores = (0.0, 1.0)
        if config.scorer == "likelihood":
            scores = math.exp(sum(log_p) / count), math.exp(sum(log_q) / count)
        ratio = score_ratio(*(torch.tensor([score], dtype=torch.float64) for score in scores))
        uniforms = None if self.draw is None else torch.tensor([self.draw.random()], dtype=torch.float64)
        by_score = config.scorer != "none" and bool(
            accepted(ratio, uniforms, config.accept_floor, config.accept_ratio)
        )
        top_k = config.top_k_accept > 0 and all(
            sum(value > own for value in law.values()) < config.top_k_accept
            for law, own in zip(laws, log_p, strict=True)
        )
        return by_score or top_k, scores, by_score

    async def _write(self, name: str, p: Connection) -> bool:
        """The target writes to the end of its segment, or of the answer; whether the draft writes next."""
        start, segment = len(self.text), self.segment
        what = f"the target's turn at {start} for {name}"
        most, stop = self.room - start, None
        if not self.finishing:
            most, stop = min(most, max(segment.most - segment.tokens, 1)), self.marks or None
        written = await p.complete(what, self.served.target, [*self.prompt, *self.text], most, stop=stop, **self.law)
        if self.finishing:
            self.text += written.ids
            self.ended = True
            return False
        count = self._cut(segment, written)
        self.text += written.ids[:count]
        if not count or self._closes(written.ids[:count], written):
            self.ended = True
        elif segment.thought_ended:
            self._finish()
        elif segment.ended:
            self._close()
            self._next(segment.rest)
            return not self.finishing
        return False

    def _cut(self, segment: Segment, written: Completion) -> int:
        """How many of the new tokens belong to `segment`, which gets them."""
        for count, token in enumerate(written.ids, 1):
            if segment.add(self.texts([token]), 1):
                return count
        return len(written.ids)

    def _closes(self, ids: list[int], written: Completion) -> bool:
        return written.stopped and len(ids) == len(written.ids) and ids[-1] in self.special

    def _next(self, text: str) -> None:
        self.segment.begin(text)
        if self.segment.thought_ended:
            self._finish()

    def _finish(self) -> None:
        self._close()
        self.finishing = True
        if self.config.max_finish_tokens is not None:
            self.room = min(self.room, len(self.text) + self.config.max_finish_tokens)

    def _close(self, rule: str = "") -> None:
        """The target's own segment ends here, if it has one."""
        self._record(self.begun, "target", rule or ("first" if self.scores is None else "rejected"), self.scores)
        self.begun, self.scores = len(self.text), None

    def _record(self, start: int, source: str, rule: str, scores: tuple[float, float] | None) -> None:
        if len(self.text) > start:
            found = (math.nan, math.nan) if scores is None else scores
            self.served.segments.append(SegmentRecord(start, len(self.text), source, rule, *found))
