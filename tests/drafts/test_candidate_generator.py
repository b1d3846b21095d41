"""The draft side is a `CandidateGenerator`: it serves transformers' own assisted loop as well."""

from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_semspec.drafts.chain import ChainGenerator
from hf_semspec.drafts.ngram import NGramGenerator
from hf_semspec.engine.gamma import FixedLength
from hf_semspec.engine.processors import CallRandomness, Processors
from tests.helpers import WEAK_DRAFTS, Forwards, plain
from tests.models import VOCAB, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS, pytest.mark.deprecated]


def in_stocks_loop(target: Any, draft: Any, randomness: Any, inputs: Any, **fields: Any) -> tuple[Any, ChainGenerator]:
    """Stock assisted decoding with our generator in the place of its own."""
    length = inputs["input_ids"].shape[1]
    made = ChainGenerator(
        draft,
        VOCAB,
        Processors([]),
        randomness,
        FixedLength(3),
        max_length=length + fields["max_new_tokens"],
        with_laws=randomness is not None,
    )
    target._get_candidate_generator = lambda **_: made
    return plain(target, inputs, call={"assistant_model": draft}, **fields), made


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["same", "near", "far"])
def test_greedy_in_transformers_own_loop(name: str, shape: str) -> None:
    target = tiny(shape, 1)
    draft = draft_of(target, name)
    inputs = prompts((5,), seed=1)
    expected = plain(target, inputs, max_new_tokens=20)
    with Forwards(target) as spy:
        output, made = in_stocks_loop(target, draft, None, inputs, max_new_tokens=20)
    assert isinstance(made, CandidateGenerator)
    assert torch.equal(output, expected)
    assert made.decoder.forwards > 0
    if name == "same":
        assert spy.calls <= 6


def test_sampling_in_transformers_own_loop() -> None:
    target = tiny("llama", 1)
    randomness = CallRandomness(torch.device("cpu"))
    output, made = in_stocks_loop(
        target, draft_of(target, "near"), randomness, prompts((5,)), max_new_tokens=20, do_sample=True, top_k=0
    )
    assert output.shape == (1, 25)
    assert made.decoder.forwards > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_ngrams_in_transformers_own_loop(do_sample: bool) -> None:
    """Drafts that are looked up come without laws: stock takes what it would have chosen itself."""
    target = tiny("llama", 1)
    target.register_forward_hook(_cycle, with_kwargs=True)
    inputs = prompts((5,), seed=1)
    texts = {0: inputs["input_ids"][0].tolist()}
    made = NGramGenerator(VOCAB, 4, texts, max_length=45, with_laws=False, device=torch.device("cpu"))
    fields = {"max_new_tokens": 40, "do_sample": do_sample}
    expected = plain(target, inputs, **fields)
    target._get_candidate_generator = lambda **_: made
    with Forwards(target) as spy:
        output = plain(target, inputs, call={"assistant_model": target}, **fields)
    assert isinstance(made, CandidateGenerator)
    assert torch.equal(output, expected)
    assert spy.calls < 25
    assert len(made.texts[0]) > 40, "it learns what is committed"


def _cycle(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A model that is sure to repeat itself."""
    ids = kwargs["input_ids"][:, -output.logits.shape[1] :]
    output.logits.scatter_(-1, (2 + (ids * 5 + 1) % 11).unsqueeze(-1), 60.0)
    return output


def test_ngrams_look_up_the_latest_of_the_longest() -> None:
    made = NGramGenerator(VOCAB, 3, {0: [5, 6, 7, 8, 6, 7, 9, 9, 6, 7]}, max_length=20, with_laws=False, device=None)
    ids = torch.tensor([[5, 6, 7, 8, 6, 7, 9, 9, 6, 7]])
    assert made.get_candidates(ids)[0].tolist() == [[*ids[0].tolist(), 9, 9, 6]]
    longer = torch.cat([ids, torch.tensor([[50]])], dim=1)
    assert made.get_candidates(longer)[0] is longer, "nothing is drafted where nothing is found"
    again = torch.cat([longer, torch.tensor([[8]])], dim=1)
    assert made.get_candidates(again)[0].tolist() == [[*again[0].tolist(), 6, 7, 9]]
    full = NGramGenerator(VOCAB, 3, {0: ids[0].tolist()}, max_length=12, with_laws=False, device=None)
    assert full.get_candidates(ids)[0].shape[1] == 11, "and never more than fits"
