"""The server of examples/serving.py: requests at once give what each gives alone; and what transformers' own lacks."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import draft_of, tiny, tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from fastapi.testclient import TestClient

EXAMPLES = Path(__file__).parents[2] / "examples"
PATH = "/v1/chat/completions"
pytestmark = [pytest.mark.filterwarnings("ignore:fewer than 10%"), pytest.mark.deprecated]


@pytest.fixture(scope="module")
def client() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("serving", EXAMPLES / "serving.py")
        assert spec is not None
        assert spec.loader is not None
        serving = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(serving)
    finally:
        sys.path.remove(str(EXAMPLES))
    model = tiny("llama", 0, dtype=torch.float64)
    with TestClient(serving.create_app(model, draft_of(model, "near"), tokenizer(chat=True))) as one:
        yield one


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **fields}


def answer(client: Any, body: dict[str, Any]) -> str:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def events(client: Any, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_the_answer_is_plain_decodings(client: Any) -> None:
    model, words = tiny("llama", 0, dtype=torch.float64), tokenizer(chat=True)
    prompt = words.apply_chat_template(asked("Hello")["messages"], tokenize=False, add_generation_prompt=True)
    inputs = words(prompt, return_tensors="pt", return_token_type_ids=False)
    text = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer(client, asked("Hello")) == words.decode(text, skip_special_tokens=True)


def test_a_stream_is_the_answer_in_parts(client: Any) -> None:
    *parts, last = events(client, asked("Hello"))
    assert last == "[DONE]"
    assert len(parts) > 2
    text = "".join(json.loads(part)["choices"][0]["delta"]["content"] for part in parts)
    assert text == answer(client, asked("Hello"))


def test_seeds_decide_sampled_answers(client: Any) -> None:
    one, two = (asked("Hello", temperature=1.0, seed=seed) for seed in (1, 2))
    assert answer(client, one) == answer(client, one) != answer(client, two)
    unseeded = asked("Hello", temperature=1.0)
    assert answer(client, unseeded) != answer(client, unseeded)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_requests_at_once_give_what_each_gives_alone(client: Any, fields: dict[str, Any]) -> None:
    bodies = [asked(text, **fields, seed=seed) for seed, text in enumerate(("Hello", "Hi there", "How", "Why"))]
    alone = [answer(client, body) for body in bodies]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(lambda body: answer(client, body), bodies)) == alone


def test_a_request_starts_while_another_decodes(client: Any) -> None:
    """The lock is free again from the first token on."""
    lock = client.app.routes[-1].endpoint.__globals__["seeding"]
    with client.stream("POST", PATH, json=asked("Hello", stream=True)) as response:
        assert next(response.iter_lines()).startswith("data: ")
        assert not lock.locked()


def test_mistakes_are_answers_too_and_hold_no_one_up(client: Any) -> None:
    for body in (asked("Hello", max_tokens=0), {"max_tokens": 3}, asked("Hello", temperature=-1.0), asked("")):
        response = client.post(PATH, json=body)
        assert response.status_code in (200, 400)
    response = client.post(PATH, json=asked("Hello", max_tokens=0))
    assert response.status_code == 400
    assert "max_new_tokens" in response.json()["detail"]
    *_, last = events(client, asked("Hello", max_tokens=0))
    assert "max_new_tokens" in json.loads(last)["error"]
    assert answer(client, asked("Hello"))


def test_transformers_own_server_takes_no_draft() -> None:
    """If this fails, docs/pipelines.md is to say how `transformers serve` runs a scheme."""
    spec = importlib.util.find_spec("transformers.cli.serve")
    if spec is None or spec.origin is None:
        pytest.skip("this transformers has no server")
    folder = Path(spec.origin).parent
    sources = [folder / "serve.py", *(folder / "serving").glob("*.py")]
    assert len(sources) > 1
    assert not [path.name for path in sources if "assistant_model" in path.read_text(encoding="utf-8")]
