"""Batches, rows that end apart, padding."""

import functools
from typing import Any

import pytest
import torch

from tests.helpers import (
    EXACT,
    TESTING,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    check_identities,
    first_occurrence,
    new_tokens,
    plain,
    plain_rows,
)
from tests.models import DRAFTS, PAD, draft_of, prompts, row_of, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2"])
def test_ui01_rows_of_a_batch_equal_their_own_runs(shape: str, kind: str) -> None:
    target = tiny(shape, 0)
    draft = draft_of(target, "near")
    inputs = prompts((3, 7, 12), seed=5)
    fields = {"num_draft_tokens": 4, "max_new_tokens": 22}
    together = new_tokens(assisted(target, draft, inputs, kind, **fields), inputs)
    for row in range(3):
        one = row_of(inputs, row)
        alone = new_tokens(assisted(target, draft, one, kind, **fields), one)
        assert torch.equal(together[row], alone[0]), row
    assert torch.equal(together, plain_rows(target, inputs, max_new_tokens=22))


@functools.cache
def rows_with_eos(first: int, second: int) -> tuple[Any, Any, list[int]]:
    """A model, two prompts and EOS ids: the rows end at their tokens `first` and `second`, counted from 1."""
    for seed in range(200):
        target = tiny("llama", seed, attention="sdpa")
        inputs = prompts((4, 9), seed=seed)
        rows = plain_rows(target, inputs, max_new_tokens=24).tolist()
        eos = [rows[0][first - 1], rows[1][second - 1]]
        ends = [next((t + 1 for t, token in enumerate(row) if token in eos), 0) for row in rows]
        if ends == [first, second] and PAD not in rows[0] + rows[1]:
            return target, inputs, eos
    raise AssertionError("no seed has such rows")


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DRAFTS)
def test_ui03_a_finished_row_holds_only_padding(kind: str, name: str) -> None:
    target, inputs, eos = rows_with_eos(2, 15)
    draft = draft_of(target, name)
    fields = {"max_new_tokens": 24, "eos_token_id": eos, "output_scores": True, "return_dict_in_generate": True}
    expected = plain(target, inputs, **fields)
    with Forwards(target) as spy:  # the padding of a cache to return would be fed at the end
        output = assisted(target, draft, inputs, kind, num_draft_tokens=4, use_cache=False, **fields)
    new = new_tokens(output, inputs)
    assert new.shape[1] == 15
    assert new[0, 2:].eq(PAD).all()
    assert torch.equal(output.sequences, expected.sequences)
    assert all(scores[0].eq(0).all() for scores in output.scores[2:])
    check_identities(output.stats, [2, 15])
    assert spy.shapes[-1][0] == (3 if kind in ("chains", "smc") else 1), "finished rows leave the batch"


@pytest.mark.parametrize("kind", EXACT)
def test_ui03_the_rows_may_end_in_any_order(kind: str) -> None:
    target, inputs, eos = rows_with_eos(2, 15)
    inputs = {name: value.flip(0) for name, value in inputs.items()}
    expected = plain(target, inputs, max_new_tokens=24, eos_token_id=eos)
    assert torch.equal(
        assisted(target, draft_of(target, "near"), inputs, kind, max_new_tokens=24, eos_token_id=eos), expected
    )


@pytest.mark.parametrize("kind", [*TESTING, "parse"])
def test_ui04_several_sampled_sequences_a_prompt(kind: str) -> None:
    target = tiny("llama", 0)
    inputs = prompts((4, 6), seed=1)
    torch.manual_seed(0)
    output = assisted(
        target,
        draft_of(target, "near"),
        inputs,
        kind,
        max_new_tokens=9,
        do_sample=True,
        num_return_sequences=4,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape == (8, 6 + 9)
    assert torch.equal(output.sequences[:, :6], inputs["input_ids"].repeat_interleave(4, dim=0))
    assert len({tuple(row) for row in new_tokens(output, inputs).tolist()}) == 8
    check_identities(output.stats, [9] * 8)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("pads", [0, 1, 5])
@pytest.mark.parametrize("kind", EXACT)
def test_ui39_left_padding_changes_nothing(kind: str, pads: int, attention: str) -> None:
    target = tiny("llama", 1, attention=attention)
    draft = draft_of(target, "near")
    alone = prompts((6,), seed=2)
    first = plain(target, alone, max_new_tokens=20)[0, 6:].tolist()
    eos = next(token for i, token in enumerate(first) if i >= 10 and first_occurrence(first, i))
    # The pad id is the EOS id too: padding is what the mask says, never what the id says.
    padded = {
        "input_ids": torch.cat([torch.full((1, pads), eos), alone["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.zeros(1, pads, dtype=torch.long), alone["attention_mask"]], dim=1),
    }
    fields = {"max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": eos}
    expected = new_tokens(plain(target, alone, **fields), alone)
    with Forwards(target, draft) as spy:
        output = assisted(target, draft, padded, kind, **fields)
    assert torch.equal(new_tokens(output, padded), expected)
    assert spy.finite


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "gpt2"])
def test_ui39_padding_next_to_other_rows_reaches_neither_model(shape: str, attention: str) -> None:
    target = tiny(shape, 1, attention=attention)
    draft = draft_of(target, "near")
    inputs = prompts((1, 6, 11), seed=2)
    other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"].bool(), torch.tensor(41))}
    with Forwards(target, draft) as spy:
        output = new_tokens(assisted(target, draft, inputs, max_new_tokens=14), inputs)
    assert spy.finite
    assert torch.equal(output, new_tokens(assisted(target, draft, other, max_new_tokens=14), other))
    assert torch.equal(output, plain_rows(target, inputs, max_new_tokens=14))


def test_ui39_padding_is_found_from_the_pad_id_where_no_mask_is_given() -> None:
    target = tiny("llama", 2, attention="sdpa")
    inputs = prompts((3, 8), seed=3)
    ids = {"input_ids": inputs["input_ids"]}
    output = assisted(target, draft_of(target, "near"), ids, max_new_tokens=12)
    assert torch.equal(output, plain(target, ids, max_new_tokens=12))
