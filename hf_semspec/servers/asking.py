"""What both schemes over servers share: prompts as ids, all of them at once, and what servers cannot follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..drafts.vocabulary import first_clash
from ..schemes.lossless.config import LosslessConfig
from .client import Connection, OpenAIServer, ServerError
from .results import Served

Prompt = str | list[dict[str, Any]] | list[int]
Answering = Callable[[int, list[int], Served, Connection, Connection], Awaitable[None]]


def check_alike(target: OpenAIServer, draft: OpenAIServer) -> None:
    """Refuse a draft with another tokenizer."""
    if first_clash(target.tokenizer, draft.tokenizer) is not None:
        raise ValueError("target and draft must have the same tokenizer: over servers texts travel as token ids")


def check_reviser(revise_with: Any) -> None:
    """Refuse a reviser that changes the target's law."""
    if revise_with is not None and not isinstance(revise_with, LosslessConfig):
        raise ValueError(
            f"`revise_with` {type(revise_with).__name__} decides about tokens, which a server keeps to itself: take "
            '"lossless" or None'
        )


def as_ids(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """The ids of `prompt`."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
        return list(prompt)
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(prompt, str) and not (chat and tokenizer.chat_template):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def each(
    prompts: Sequence[Prompt], target: OpenAIServer, draft: OpenAIServer, one: Answering, chat: bool
) -> list[Served]:
    """`one` for every prompt, at the same time; an error costs its prompt alone. Cancelling this cancels them all."""

    async def answered(number: int, prompt: Prompt, p: Connection, q: Connection) -> Served:
        served = Served()
        try:
            ids = as_ids(target.tokenizer, prompt, chat)
            if not ids:
                raise ValueError("the prompt has no tokens")
            await one(number, ids, served, p, q)
        except (ServerError, ValueError) as error:
            transient = isinstance(error, ServerError) and error.transient
            return Served(
                target=served.target, draft=served.draft, error=f"prompt {number}: {error}", transient=transient
            )
        served.text = target.tokenizer.decode(served.ids, skip_special_tokens=True)
        served.stats.emitted = len(served.ids)
        return served

    async with target.connect() as p, draft.connect() as q:
        return list(await asyncio.gather(*(answered(i, prompt, p, q) for i, prompt in enumerate(prompts))))
