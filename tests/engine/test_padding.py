"""The returned cache where rows are padded: plain decoding's, entry by entry, padding included."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.encoder_models import encoder_decoder, one_of
from tests.encoder_models import sources as sources_of
from tests.helpers import CACHE, EXACT, WEAK_DRAFTS, assisted, cache_of, new_tokens, plain, plain_rows, states
from tests.models import PAD, draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

LENGTHS = (3, 8, 6)
APART = (2, 5, 9)  # tokens after which the rows end


def same(ours: Any, theirs: Any, atol: float = 1e-9) -> None:
    for mine, other in zip(states(ours), states(theirs), strict=True):
        for got, want in zip(mine, other, strict=True):
            assert got.shape == want.shape
            assert torch.allclose(got, want, rtol=0, atol=atol), (got - want).abs().amax(dim=(1, 3))


def ends(target: PreTrainedModel, inputs: dict[str, torch.Tensor], pad: int | None = None) -> dict[str, Any]:
    """Rows that end after so many tokens each, if none of the ids comes before."""
    rows = plain_rows(target, inputs, max_new_tokens=16)
    eos = [int(row[length - 1]) for row, length in zip(rows, APART, strict=True)]
    return {"eos_token_id": eos, "pad_token_id": eos[0] if pad is None else pad, "max_new_tokens": 16}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma3", "gpt2"])
def test_prompts_padded_on_the_left(shape: str, kind: str) -> None:
    target, inputs = tiny(shape, 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    fields = {"max_new_tokens": 9, "return_dict_in_generate": True}
    output = assisted(target, draft_of(target, "near"), inputs, kind, **fields)
    expected = plain(target, inputs, **fields)
    assert torch.equal(output.sequences, expected.sequences)
    same(cache_of(output), cache_of(expected))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("draft", ["near", "far"])
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_rows_that_end_apart(shape: str, draft: str, kind: str) -> None:
    target, inputs = tiny(shape, 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    fields = {**ends(target, inputs), "return_dict_in_generate": True}
    output = assisted(target, draft_of(target, draft), inputs, kind, **fields)
    expected = plain(target, inputs, **fields)
    assert torch.equal(output.sequences, expected.sequences)
    assert len({row.emitted for row in output.stats.rows}) > 1
    same(cache_of(output), cache_of(expected))


@pytest.mark.parametrize("kind", EXACT)
def test_a_second_turn_without_a_mask_is_plain_decodings(kind: str) -> None:
    """pad = EOS, as many models have it: whoever gives no mask has the padding read."""
    target, inputs = tiny("llama", 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    fields = {**ends(target, inputs), "return_dict_in_generate": True}
    texts = []
    for run in (plain, assisted):
        args = () if run is plain else (draft_of(target, "near"),)
        more = () if run is plain else (kind,)
        first = run(target, *args, inputs, *more, **fields)
        ids = torch.cat([first.sequences, torch.tensor([[11, 23]]).expand(3, -1)], dim=1)
        turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        texts.append(plain(target, turn, call={CACHE: cache_of(first)}, max_new_tokens=9))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", EXACT)
def test_a_turn_with_holes_in_a_cache_of_the_callers_own(kind: str) -> None:
    """What the rows lack between the turns is in the middle of their text; the forward that reads it is counted."""
    target, inputs = tiny("llama", 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    caches, fields = [], {**ends(target, inputs, pad=PAD), "return_dict_in_generate": True}
    for run in (plain, assisted):
        args = () if run is plain else (draft_of(target, "near"),)
        more = () if run is plain else (kind,)
        given = DynamicCache()
        first = run(target, *args, inputs, *more, call={CACHE: given}, **fields)
        assert cache_of(first) is given
        new = new_tokens(first, inputs)
        ids = torch.cat([first.sequences, torch.tensor([[PAD, 11, 23]] * 2 + [[9, 11, 23]])], dim=1)
        mask = torch.cat([inputs["attention_mask"], (new != PAD).long(), torch.ones(3, 3, dtype=torch.long)], dim=1)
        mask[:2, -3] = 0
        turn = {"input_ids": ids, "attention_mask": mask}
        run(target, *args, turn, *more, call={CACHE: given}, max_new_tokens=7)
        caches.append(given)
    same(*caches)


@pytest.mark.parametrize("kind", ["lossless", "smc", "parse", "semantic"])
def test_eager_attention_spreads_over_the_whole_prompt(kind: str) -> None:
    """A query that may see nothing looks at everything there: the whole prompt is fed."""
    target, inputs = tiny("llama", 1, dtype=torch.float32), prompts(LENGTHS, seed=2)
    fields = {"max_new_tokens": 9, "return_dict_in_generate": True}
    output = assisted(target, draft_of(target, "near"), inputs, kind, **fields)
    same(cache_of(output), cache_of(plain(target, inputs, **fields)), atol=1e-4)


def test_padding_is_read_once_and_only_for_a_cache_that_is_returned() -> None:
    target, inputs = tiny("llama", 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    draft, counts = draft_of(target, "near"), []
    for use_cache in (True, False):
        fields = {"max_new_tokens": 9, "return_dict_in_generate": True, "use_cache": use_cache}
        output = assisted(target, draft, inputs, **fields)
        counts.append((output.stats.target_forwards, output.stats.target_tokens))
    assert counts[0] == (counts[1][0] + 1, counts[1][1] + 2 * 5), "two padded rows, of at most five columns"


@pytest.mark.parametrize("kind", ["lossless", "chains", "easd"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_rows_of_an_encoder_decoder_that_end_apart(family: str, kind: str) -> None:
    target, inputs = encoder_decoder(family, eos=None), sources_of((4, 9, 6))
    rows = [plain(target, one_of(inputs, row), max_new_tokens=12)[0, 1:] for row in range(3)]
    eos = [int(row[length - 1]) for row, length in zip(rows, APART, strict=True)]
    fields = {"eos_token_id": eos, "pad_token_id": eos[0], "max_new_tokens": 12, "return_dict_in_generate": True}
    output = assisted(target, draft_of(target, "near"), inputs, kind, **fields)
    expected = plain(target, inputs, **fields)
    assert torch.equal(output.sequences, expected.sequences)
    same(cache_of(output).self_attention_cache, cache_of(expected).self_attention_cache)


@pytest.mark.parametrize("fields", [{"revise_with": None}, {}])
@pytest.mark.parametrize("redrafts", [1, 4])
def test_rows_that_pause_for_another_draft(redrafts: int, fields: dict[str, Any]) -> None:
    """A row of `parse` that ends after its neighbour has paused; some rows pause many times, some not at all."""
    target, inputs = tiny("llama", 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    fields = {**fields, "max_redrafts": redrafts, "segment_tokens": 3, **ends(target, inputs)}
    output = assisted(target, draft_of(target, "near"), inputs, "parse", return_dict_in_generate=True, **fields)
    own = {name: value for name, value in fields.items() if name.endswith("_id") or name == "max_new_tokens"}
    same(cache_of(output), cache_of(plain(target, inputs, return_dict_in_generate=True, **own)))


@pytest.mark.parametrize("fields", [{"revise_chunk": 1}, {"max_finish_tokens": 3, "think_end": "."}])
def test_rows_of_semantic_that_wait(fields: dict[str, Any]) -> None:
    """Every row has its own phases; one may be cut short by `max_finish_tokens`."""
    target, inputs = tiny("llama", 1, attention="sdpa"), prompts(LENGTHS, seed=2)
    call = {"tokenizer": tokenizer()}
    fields = {**fields, "max_segment_tokens": 2, **ends(target, inputs)}
    fields["return_dict_in_generate"] = True
    output = assisted(target, draft_of(target, "far"), inputs, "semantic", call=call, **fields)
    limits = [row.emitted for row in output.stats.rows]
    held = cache_of(output)
    with torch.no_grad():
        ids, width = output.sequences[:, :-1], inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, ids.shape[1] - width, dtype=torch.long)], dim=1)
        cache = DynamicCache()
        target(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{CACHE: cache})
    assert min(limits) < max(limits)
    same(held, cache)
