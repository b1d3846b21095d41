"""What belongs to a call goes with it, by reference counts alone: an accelerator's memory cannot wait for the
collector."""

import collections
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from tests.digest_cases import CASES
from tests.digest_cases import model as digest_model
from tests.helpers import WEAK_DRAFTS, Recorder, assisted
from tests.models import draft_of, prompts, tiny
from tests.test_digests import run

pytestmark = [
    WEAK_DRAFTS,
    *(
        pytest.mark.filterwarnings(f"ignore:{message}")
        for message in ("of .* particles hardly more", "The target scores", "input_ids holds only", "residual=")
    ),
]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> collections.Counter[str]:
    """Objects of this package and caches of transformers, by class."""
    kinds = (type(item) for item in gc.get_objects())
    places = ("hf_semspec", "transformers.cache_utils")
    return collections.Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(places))


def left_by(call: Callable[[], Any]) -> dict[str, int]:
    """What two calls leave behind, of which the first may fill what is kept for a pair of models."""
    call()
    gc.collect()
    before = alive()
    call()
    return dict(alive() - before)


LASTING = (
    *("lossless sampled", "lossless compiled chains", "lossless foreign chains", "lossless ngram and model"),
    *("lossless t5 chains", "lossless bart sampled", "lossless two turns", "lossless stream", "easd chains"),
    *("parse redrafts", "parse compiled", "parse foreign", "parse easd", "parse packed", "parse lossless"),
    *("semantic probe", "semantic easd", "semantic lossless", "semantic exact", "semantic text", "semantic two turns"),
    *("smc two each", "smc compiled", "smc rules", "smc two turns"),
)


@pytest.mark.parametrize("name", LASTING)
def test_nothing_of_a_call_outlives_it(name: str) -> None:
    digest_model(CASES[name].target)

    def call() -> None:
        run(name)

    assert left_by(call) == {}


class CriterionError(Exception):
    pass


class Fails(StoppingCriteria):
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.width:
            raise CriterionError
        return torch.zeros(len(input_ids), dtype=torch.bool)


KINDS = ("lossless", "easd", "chains", "smc", "parse", "semantic")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_call_outlives_its_error(kind: str) -> None:
    target = tiny("llama", 1)
    draft, inputs = draft_of(target, "near"), prompts((7, 3), seed=2)

    def call() -> None:
        with contextlib.suppress(CriterionError):
            assisted(target, draft, inputs, kind, call={"stopping_criteria": [Fails(14)]}, max_new_tokens=20)
            raise AssertionError("it should have failed")

    assert left_by(call) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_calls_take_no_more_memory_than_two(kind: str) -> None:
    """Tensors, with the collector off."""
    target = tiny("llama", 1, dtype=torch.float32)
    draft, inputs = draft_of(target, "near"), prompts((7, 3), seed=2)

    def held() -> int:
        tensors = (item for item in gc.get_objects() if type(item) is torch.Tensor)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    sizes = []
    for number in range(50):
        returned = {"return_dict_in_generate": True, "output_scores": True}
        call = {} if kind in ("smc", "parse") else {"streamer": Recorder()}
        one = {name: value[:1] for name, value in inputs.items()} if call else inputs
        assisted(target, draft, one, kind, call=call, max_new_tokens=6, **returned)
        sizes.append(held() if number in (1, 10, 49) else 0)
    assert sizes[1] == sizes[10] == sizes[49]
