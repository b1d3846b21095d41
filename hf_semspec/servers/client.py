"""A model behind an OpenAI-compatible server, asked by token ids: `POST base_url/completions`."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from ..common.fields import integer
from .results import Usage

try:
    import httpx
except ImportError as error:
    raise ImportError('hf_semspec.servers needs httpx: pip install "hf-semspec[servers]"') from error

LONGEST_WAIT = 30.0  # seconds between two tries
Law = dict[int, float]  # id -> log-probability


class ServerError(RuntimeError):
    """A request that a server did not answer; the message names it. `transient` says whether asking again may help."""

    def __init__(self, message: str, *, transient: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.status = status


@dataclass(frozen=True)
class Completion:
    """What a server wrote.

    Args:
        ids: the new ids.
        log_probs: of each of them, natural log, before temperature.
        tops: at each place the likeliest ids; the one written is among them.
        prompt: the same at each place of the prompt, `None` at the first; empty unless asked for.
        stopped: whether an EOS or a stop text ended it, and not the limit.
    """

    ids: list[int]
    log_probs: list[float]
    tops: list[Law]
    prompt: list[Law | None]
    stopped: bool


class OpenAIServer:
    """A model that an OpenAI-compatible server runs.

    Prompts and answers travel as token ids, so that the tokens are the model's own. Beside the protocol this takes
    three of vLLM's options: `prompt_logprobs`, `return_tokens_as_token_ids` and prompts of ids.

    Args:
        base_url (`str`): such as `http://localhost:8000/v1`.
        model (`str`): the model's name there.
        api_key (`str`, *optional*): sent as a bearer token.
        tokenizer (*optional*): the model's; loaded by `model` as a name or a folder by default.
        concurrency (`int`): requests under way at once.
        retries (`int`): how often a request is repeated after 429, 5xx, a broken connection, a timeout, or an answer
            that is no JSON of the protocol; the waits double from `backoff` to 30 seconds.
        backoff (`float`): the first wait, in seconds.
        timeout (`float`): of one try, in seconds.

    Raises:
        ServerError: nothing answers, or the server gives no log-probabilities of prompts.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        tokenizer: Any = None,
        concurrency: int = 64,
        retries: int = 8,
        backoff: float = 0.5,
        timeout: float = 600.0,
    ) -> None:
        self.url = base_url.rstrip("/") + "/completions"
        self.model = model
        self.concurrency = integer("concurrency", concurrency, 1)
        self.retries = integer("retries", retries, 0)
        self.backoff, self.timeout = backoff, timeout
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.tokenizer = AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
        self.probe()

    def probe(self) -> None:
        """See that the server knows the model and gives log-probabilities of prompts."""
        ids = self.tokenizer("1 1", add_special_tokens=False)["input_ids"]
        body = self.body(ids, 1, prompt_logprobs=1, logprobs=1)
        what = f"the probe of {self.url}"
        try:
            answer = httpx.post(self.url, json=body, headers=self.headers, timeout=self.timeout)
        except httpx.HTTPError as error:
            raise ServerError(f"{what} failed: {_said(error)}", transient=True) from error
        if answer.is_error:
            raise ServerError(f"{what} was refused: {_refusal(answer)}", status=answer.status_code)
        try:
            read = _completion(answer.json())
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{what} gave an answer that is not of the protocol: {error!r}") from error
        if len(read.prompt) != len(ids):
            raise ServerError(
                f"{self.url} gives no log-probabilities of prompts (`prompt_logprobs`): parse and semantic need a "
                "server that does, such as vLLM"
            )

    def body(self, ids: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        """A request. What a server takes from the model's own generation config is set here, as in process it is the
        caller's."""
        plain = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        return {
            "model": self.model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            **plain,
            **options,
        }

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Inside the block requests can be made."""
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(headers=self.headers, timeout=self.timeout, limits=limits) as client:
            yield Connection(self, client, asyncio.Semaphore(self.concurrency))


class Connection:
    """Requests to one server, at most `concurrency` at once."""

    def __init__(self, server: OpenAIServer, client: httpx.AsyncClient, places: asyncio.Semaphore) -> None:
        self.server, self.client, self.places = server, client, places

    async def complete(self, what: str, usage: Usage, ids: list[int], max_tokens: int, **options: Any) -> Completion:
        """Go on with `ids`.

        Args:
            what: names the request in errors.
            usage: is added to.
            ids, max_tokens, options: see [`OpenAIServer.body`].

        Raises:
            ServerError: it was refused, or failed at every try.
        """
        server = self.server
        what, wait = f"{what} at {server.url}", 0.0
        body = server.body(ids, max_tokens, **options)
        for attempt in range(server.retries + 1):
            if attempt:
                await asyncio.sleep(wait)
            wait = min(server.backoff * 2**attempt, LONGEST_WAIT) * random.uniform(0.75, 1.25)
            try:
                async with self.places:
                    answer = await self.client.post(server.url, json=body)
                if answer.is_success:
                    content = answer.json()
                    completion = _completion(content)
                    _add(usage, content.get("usage") or {})
                    return completion
                failure = _refusal(answer)
                if answer.status_code != 429 and answer.status_code < 500:
                    raise ServerError(f"{what} was refused: {failure}", status=answer.status_code)
                wait = max(wait, _asked_wait(answer))
            except (httpx.TransportError, httpx.DecodingError) as error:
                failure = _said(error)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                failure = f"its answer is not of the protocol: {error!r}"
        raise ServerError(f"{what} failed {server.retries + 1} times, at last: {failure}", transient=True)


def _completion(content: dict[str, Any]) -> Completion:
    choice = content["choices"][0]
    found = choice["logprobs"]
    ids = [_id(token) for token in found["tokens"]]
    tops = [{_id(token): float(value) for token, value in top.items()} for top in found["top_logprobs"]]
    prompt = [
        None if law is None else {int(token): float(entry["logprob"]) for token, entry in law.items()}
        for law in choice.get("prompt_logprobs") or []
    ]
    values = [float(value) for value in found["token_logprobs"]]
    if not len(ids) == len(tops) == len(values):
        raise ValueError("tokens and log-probabilities differ in number")
    return Completion(ids, values, tops, prompt, choice["finish_reason"] == "stop")


def _id(token: str) -> int:
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"token {token!r} is no `token_id:N`, which `return_tokens_as_token_ids` asks for")
    return int(number)


def _add(usage: Usage, said: dict[str, Any]) -> None:
    usage.requests += 1
    usage.prompt_tokens += said.get("prompt_tokens") or 0
    usage.completion_tokens += said.get("completion_tokens") or 0
    usage.cached_tokens += (said.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(answer: httpx.Response) -> str:
    return f"status {answer.status_code}, {answer.text[:300]}"


def _asked_wait(answer: httpx.Response) -> float:
    try:
        return min(float(answer.headers.get("Retry-After", 0)), LONGEST_WAIT)
    except ValueError:
        return 0.0


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def log_sum(values: list[float]) -> float:
    """log Σ exp of `values`, -inf of none."""
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))
