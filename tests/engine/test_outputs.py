"""What is returned beside the text: scores, logits, statistics."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers import (
    CACHE,
    EXACT,
    TESTING,
    WEAK_DRAFTS,
    Inputs,
    assisted,
    cache_of,
    first_occurrence,
    new_tokens,
    plain,
    states,
)
from tests.models import draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def scored(
    target: PreTrainedModel, inputs: Inputs, *, draft: Any = None, kind: str = "lossless", **fields: Any
) -> Any:
    fields = {
        "max_new_tokens": 16,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        **fields,
    }
    return plain(target, inputs, **fields) if draft is None else assisted(target, draft, inputs, kind, **fields)


@pytest.mark.parametrize("kind", [*TESTING, "parse"])
@pytest.mark.parametrize("lengths", [(5,), (4, 9, 6)])
@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3, "suppress_tokens": [5, 6]}])
def test_ui50_scores_and_logits_are_plain_decodings(
    kind: str, lengths: tuple[int, ...], fields: dict[str, Any]
) -> None:
    target = tiny("llama", 2, attention="sdpa")
    inputs = prompts(lengths, seed=2)
    text = new_tokens(plain(target, inputs, max_new_tokens=16, **fields), inputs)[0].tolist()
    eos = next(token for i, token in enumerate(text) if i > 6 and first_occurrence(text, i))
    for ends in ({}, {"eos_token_id": eos}):
        expected = scored(target, inputs, **fields, **ends)
        for name in ("near", "far"):
            output = scored(target, inputs, draft=draft_of(target, name), kind=kind, **fields, **ends)
            assert torch.equal(output.sequences, expected.sequences)
            new = new_tokens(output, inputs)
            live = (
                torch.stack([(new[:, :t] != eos).all(dim=1) for t in range(new.shape[1])])
                if ends
                else torch.ones(new.shape[1], len(lengths), dtype=torch.bool)
            )
            for field in ("scores", "logits"):
                ours, theirs = getattr(output, field), getattr(expected, field)
                assert len(ours) == len(theirs) == new.shape[1]
                for got, want, alive in zip(ours, theirs, live, strict=True):
                    assert got.shape == want.shape
                    assert got.dtype == want.dtype == torch.float32
                    assert torch.allclose(got[alive], want[alive], atol=1e-4)
                    assert got[~alive].eq(0).all()
                    assert not got.requires_grad
            if not ends:
                transition = target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
                wanted = target.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
                assert torch.allclose(transition, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", EXACT)
def test_ui50_values_equal_a_teacher_forced_pass_when_sampling(kind: str) -> None:
    target = tiny("llama", 2)
    inputs = prompts((5,), seed=2)
    torch.manual_seed(3)
    output = scored(
        target, inputs, draft=draft_of(target, "near"), kind=kind, do_sample=True, temperature=0.7, top_k=5
    )
    with torch.no_grad():
        forced = target(output.sequences).logits[0, 4:-1]
    assert torch.allclose(torch.cat(output.logits), forced.float(), atol=1e-4)
    for scores, raw, token in zip(output.scores, forced, new_tokens(output, inputs)[0], strict=True):
        kept = scores[0].isfinite()
        assert kept.sum() == 5
        assert kept[token]
        assert torch.allclose(scores[0][kept], (raw.float() / 0.7)[kept], atol=1e-4)


def test_stats_are_no_items_of_the_output() -> None:
    """Pipelines iterate over the items, and break on what is no tensor."""
    target = tiny("llama", 2)
    output = assisted(target, draft_of(target, "near"), prompts((5,)), max_new_tokens=4, return_dict_in_generate=True)
    assert not {"stats", "triggers"} & set(output.keys())
    assert isinstance(assisted(target, draft_of(target, "near"), prompts((5,)), max_new_tokens=4), torch.Tensor)


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
