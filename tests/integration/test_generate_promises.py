"""Neighbours of the reports: what callers of `generate` rely on without saying so."""

import json
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_semspec import record_stats
from tests.helpers import (
    CACHE,
    EXACT,
    WEAK_DRAFTS,
    Recorder,
    assisted,
    cache_of,
    exact,
    new_tokens,
    plain,
    plain_rows,
    states,
)
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize("kind", EXACT)
def test_a_batch_streams_the_columns_that_plain_decoding_streams(kind: str) -> None:
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((3, 7), seed=4)
    rows = plain_rows(target, inputs, max_new_tokens=18)
    eos = [int(rows[0, 3]), int(rows[1, 11])]
    for fields in ({}, {"eos_token_id": eos}):
        streams = []
        for run in (plain, assisted):
            models = (target,) if run is plain else (target, draft_of(target, "near"))
            args = () if run is plain else (kind,)
            streamer = Recorder()
            run(*models, inputs, *args, call={"streamer": streamer}, max_new_tokens=18, **fields)
            assert streamer.ends == 1
            streams.append([value.tolist() for value in streamer.puts])
        assert streams[0] == streams[1]


class Careless(LogitsProcessor):
    """Writes into the scores it is given and reshapes both arguments in place, as plain decoding lets it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.view(-1).shape[0] == input_ids.numel()
        scores.view(-1)[::7] -= 1.0
        scores[:, 5] = -torch.inf
        return scores


class KeepsLast(StoppingCriteria):
    """Ends a row when two tokens in a row are congruent modulo 5, from a tensor it kept of the call before."""

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids.view(-1)
        kept, self.before = self.before, input_ids
        if kept is None or kept.shape[1] != input_ids.shape[1] - 1:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return (kept[:, -1] % 5 == input_ids[:, -1] % 5) & (input_ids[:, -1] != kept[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", EXACT)
def test_callables_may_write_into_scores_and_keep_what_they_saw(kind: str, dtype: torch.dtype) -> None:
    target = tiny("llama", 4, attention="sdpa", dtype=dtype)
    draft = draft_of(target, "near")
    for lengths in ((6,), (3, 7)):
        inputs = prompts(lengths, seed=4)
        call = {"logits_processor": LogitsProcessorList([Careless()])}
        expected = plain(target, inputs, call=call, max_new_tokens=18)
        assert torch.equal(assisted(target, draft, inputs, kind, call=call, max_new_tokens=18), expected)
    inputs = prompts((6,), seed=4)
    outputs = []
    for run in (plain, assisted):
        models = (target,) if run is plain else (target, draft)
        call = {"stopping_criteria": StoppingCriteriaList([KeepsLast()])}
        outputs.append(run(*models, inputs, call=call, max_new_tokens=40))
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] < 46


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_returned_may_enter_autograd(dtype: torch.dtype) -> None:
    """Tensors made in inference mode may not: none of them leaves the call."""
    target = tiny("llama", 4, dtype=dtype)
    inputs = prompts((6, 3), seed=4)
    fields = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    for kind in EXACT:
        output = assisted(target, draft_of(target, "near"), inputs, kind, max_new_tokens=7, **fields)
        tensors = [output.sequences, *output.scores, *output.logits]
        tensors += [part for layer in states(cache_of(output)) for part in layer]
        assert not any(tensor.is_inference() for tensor in tensors)
        target(output.sequences[:, -1:], **{CACHE: cache_of(output)}).logits.sum().backward()
        target.zero_grad()


@pytest.mark.parametrize("kind", EXACT)
def test_a_mask_with_holes_is_honoured(kind: str) -> None:
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((9, 7), seed=4)
    inputs["attention_mask"][0, 3:5] = 0
    inputs["attention_mask"][1, 6] = 0
    output = assisted(target, draft_of(target, "near"), inputs, kind, max_new_tokens=14)
    assert torch.equal(output, plain(target, inputs, max_new_tokens=14))


def test_ids_may_be_positional_and_are_not_changed() -> None:
    target = tiny("llama", 4)
    draft = draft_of(target, "near")
    ids = prompts((6,), seed=4)["input_ids"]
    before = ids.clone()
    output = target.generate(ids, assistant_model=draft, generation_config=exact("lossless", max_new_tokens=9))
    assert torch.equal(output, plain(target, {"input_ids": ids}, max_new_tokens=9))
    assert torch.equal(ids, before)
    output[:] = 0
    assert torch.equal(ids, before)


def test_stats_are_json() -> None:
    target = tiny("llama", 4)
    with record_stats() as stats:
        assisted(target, draft_of(target, "near"), prompts((6, 3)), max_new_tokens=9)
        assisted(target, draft_of(target, "near"), prompts((6,)), max_new_tokens=1)
    for entry in stats:
        values = json.loads(json.dumps(entry.to_dict(), allow_nan=False))
        assert values["scheme"] == "lossless"
        assert values["emitted"] == sum(row["emitted"] for row in values["rows"])


@pytest.mark.parametrize("kind", EXACT)
def test_a_long_conversation_over_one_cache(kind: str) -> None:
    """Ten turns, so that buffers grow; every turn equals plain decoding of the whole text."""
    target = tiny("gemma3", 4, attention="sdpa", positions=512)
    draft = draft_of(target, "near")
    cache = DynamicCache()
    inputs = prompts((5, 9), seed=4)
    for turn in range(10):
        fields = {"num_draft_tokens": 4, "max_new_tokens": 9, "return_dict_in_generate": True}
        output = assisted(target, draft, inputs, kind, call={CACHE: cache}, **fields).sequences
        if turn % 3 == 2:
            assert torch.equal(output, plain(target, inputs, max_new_tokens=9)), turn
        ids = torch.cat([output, torch.full((2, 2), 3 + turn)], dim=1)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}


def test_finished_rows_in_a_returned_cache_can_be_continued() -> None:
    """Rows that ended apart: plain decoding goes on from the cache, padding and all, as from its own."""
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((3, 7), seed=4)
    rows = plain_rows(target, inputs, max_new_tokens=18)
    eos = [int(rows[0, 3]), int(rows[1, 11])]
    fields = {"max_new_tokens": 18, "eos_token_id": eos, "return_dict_in_generate": True}
    first = assisted(target, draft_of(target, "near"), inputs, **fields)
    ids = torch.cat([first.sequences, torch.tensor([[11, 23]]).expand(2, -1)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :7] = inputs["attention_mask"]
    mask[:, 7 : first.sequences.shape[1]] = (new_tokens(first, inputs) != 0).long()
    turn = {"input_ids": ids, "attention_mask": mask}
    expected = plain(target, turn, max_new_tokens=9)
    assert torch.equal(plain(target, turn, call={CACHE: cache_of(first)}, max_new_tokens=9), expected)
