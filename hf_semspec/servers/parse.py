"""`parse` over servers: whole answers by the draft's, judged with their prefixes and gone on with by the target's."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

from ..common.fields import integer
from ..engine.text import TokenTexts
from ..schemes.parse.config import PARSEConfig
from ..schemes.parse.judge import Answer, Verdict, decide, label_ids, questions
from ..schemes.parse.prefixes import boundaries, segment_ended
from .asking import Prompt, check_alike, check_reviser, each
from .client import Connection, OpenAIServer
from .results import Served
from .verdicts import judged


async def parse(
    prompts: Sequence[Prompt],
    *,
    target: OpenAIServer,
    draft: OpenAIServer,
    config: PARSEConfig | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
) -> list[Served]:
    """Answer `prompts` by parallel prefix verification (arXiv 2605.04263), all at once.

    Prefixes are cut, asked about, and kept by the code of the scheme in process. The target goes on alone, by token
    ids: the law of `revise_with="lossless"` and of `None`.

    Args:
        prompts (`Sequence`): texts, lists of messages, or lists of ids; a text is put as a user's turn where the
            tokenizer has a chat template and `chat` is set.
        target, draft ([`OpenAIServer`]): two servers, or one twice, with the same tokenizer.
        config ([`PARSEConfig`], *optional*): of the scheme. What belongs to a forward in process (`compile_draft`,
            `draft_ngram`, `max_packed_tokens`) has no effect here.
        max_new_tokens (`int`): of every answer.
        temperature (`float`): 0 is greedy.
        seed (`int`): of draws.
        chat (`bool`): see `prompts`.

    Returns:
        `list[Served]`: in the order of the prompts; one that failed has its `error`, and the others their answers.

    Raises:
        ValueError: tokenizers that differ, or a config that servers cannot follow.
    """
    config = PARSEConfig() if config is None else config
    check_alike(target, draft)
    check_reviser(config.revise_with)
    integer("max_new_tokens", max_new_tokens, 1)
    rules = _Rules(target, config, max_new_tokens, temperature, seed)

    async def one(number: int, ids: list[int], served: Served, p: Connection, q: Connection) -> None:
        await rules.answer(f"prompt {number}", random.Random(f"{seed}/{number}"), ids, served, p, q)

    return await each(prompts, target, draft, one, chat)


class _Rules:
    def __init__(
        self, target: OpenAIServer, config: PARSEConfig, max_new_tokens: int, temperature: float, seed: int
    ) -> None:
        self.config, self.room = config, max_new_tokens
        self.tokenizer = target.tokenizer
        self.pieces = TokenTexts(self.tokenizer).pieces
        self.part, self.full = questions(self.tokenizer, config)
        self.labels = label_ids(self.tokenizer, config.labels)
        self.special = set(self.tokenizer.all_special_ids)
        self.law = {"temperature": temperature, "seed": seed}

    async def answer(
        self, name: str, draw: random.Random, prompt: list[int], served: Served, p: Connection, q: Connection
    ) -> None:
        """The box of the scheme, for one prompt."""
        config, text = self.config, served.ids
        for attempt in range(config.max_redrafts + 1):
            start = len(text)
            written = await q.complete(
                f"the draft's answer to {name}", served.draft, [*prompt, *text], self.room - start, **self.law
            )
            closed = written.stopped and bool(written.ids) and written.ids[-1] in self.special
            answer = Answer(start, written.ids[:-1] if closed else written.ids, True, closed)
            verdict = await self._judge(name, [*prompt, *text], answer, served, p)
            served.verdicts += verdict.confidences
            served.boundaries += [start + length for length in verdict.lengths]
            kept, _ = decide(config, answer, verdict, draw.random())
            text += written.ids[:kept]
            served.kept_tokens += kept
            served.stats.written += answer.written
            served.stats.kept += kept
            if kept == answer.written or len(text) == self.room:
                return
            last = attempt == config.max_redrafts
            if await self._revise(name, prompt, served, p, last):
                return

    async def _judge(self, name: str, before: list[int], answer: Answer, served: Served, p: Connection) -> Verdict:
        """c_i for the answer and its prefixes, all asked at once, or the prefixes after the whole."""
        config = self.config
        lengths = boundaries(self.pieces(answer.ids), config.segment_tokens) or [0]

        def ask(length: int, question: list[int], threshold: float) -> asyncio.Future[float]:
            what = f"the verdict on {length} tokens for {name}"
            ids = [*before, *answer.ids[:length], *question]
            return asyncio.ensure_future(judged(p, what, served.target, ids, self.labels, threshold))

        whole = ask(lengths[-1], self.full, config.accept_threshold)
        parts = [] if config.boundary == "cascade" else lengths[:-1]
        asked = [whole]
        try:
            if config.single_pass or await whole < config.accept_threshold:
                asked += [ask(length, self.part, config.prefix_threshold) for length in parts]
            values = await asyncio.gather(*asked)
        finally:
            for future in asked:
                future.cancel()
        partial = [*values[1:], *[math.nan] * (len(lengths) - len(values))]
        return Verdict(lengths, [*partial, values[0]])

    async def _revise(self, name: str, prompt: list[int], served: Served, p: Connection, to_the_end: bool) -> bool:
        """The target goes on to the end or for a segment; whether the answer has ended."""
        text = served.ids
        left = self.room - len(text)
        most = left if to_the_end else min(left, 2 * self.config.segment_tokens)
        what = f"the target's turn for {name}"
        written = await p.complete(what, served.target, [*prompt, *text], most, **self.law)
        ids, pieces = written.ids, self.pieces(written.ids)
        if not to_the_end:
            cut = next((n for n in range(1, len(ids)) if segment_ended(pieces[:n], self.config.segment_tokens)), None)
            if cut is not None:
                text += ids[:cut]
                return False
        text += ids
        return written.stopped or len(text) == self.room
