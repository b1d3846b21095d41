"""Vocabularies of two sizes, and tokens that one side lacks."""

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    caught,
    check_identities,
    new_tokens,
    plain_rows,
    refuses,
)
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS


def resized(model: PreTrainedModel, vocab: int) -> PreTrainedModel:
    """A copy of a tiny Llama whose vocabulary has `vocab` ids; those that both have keep their weights."""
    copy = tiny("llama", 99, vocab=vocab, attention=model.config._attn_implementation)
    own = copy.state_dict()
    for name, weight in model.state_dict().items():
        shared = min(weight.shape[0], own[name].shape[0])
        own[name][:shared] = weight[:shared]
    return copy


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("target_size", "draft_size"), [(128, 97), (97, 128)])
def test_ui23_padded_vocabularies(kind: str, target_size: int, draft_size: int) -> None:
    target = tiny("llama", 0, vocab=target_size)
    inputs = prompts((3, 8), seed=1)
    expected = plain_rows(target, inputs, max_new_tokens=24)
    for name in ("same", "near"):
        draft = resized(draft_of(target, name), draft_size)
        with caught() as messages:
            output = assisted(target, draft, inputs, kind, max_new_tokens=24, return_dict_in_generate=True)
        assert torch.equal(new_tokens(output, inputs), expected)
        check_identities(output.stats, [24, 24])
        assert len([m for m in messages if str(target_size) in m and str(draft_size) in m]) == 1
        # The last token of a row may never be fed to the draft; every other one the draft cannot embed is counted.
        foreign = int((expected >= draft_size).sum())
        assert foreign - 2 <= output.stats.substituted_tokens <= foreign
        assert (target_size < draft_size) == (foreign == 0)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("target_size", "draft_size"), [(128, 97), (97, 128)])
def test_ui23_sampling_stays_inside_the_targets_vocabulary(kind: str, target_size: int, draft_size: int) -> None:
    target = tiny("llama", 0, vocab=target_size, initializer_range=0.02)
    draft = resized(target, draft_size)
    torch.manual_seed(0)
    with caught():
        output = assisted(target, draft, prompts((3, 8)), kind, max_new_tokens=60, do_sample=True, top_k=0)
    new = output[:, 8:]
    assert new.max() < target_size
    assert new.max() >= 97 - 12, "every id of the target can come up"
    if target_size > draft_size:
        assert (new >= draft_size).any(), "ids that the draft lacks come from the residual and the bonus"


def test_ui23_a_prompt_may_hold_ids_that_the_draft_lacks() -> None:
    target = tiny("llama", 0, vocab=128)
    inputs = prompts((5,), vocab=128)
    inputs["input_ids"][0, 2] = 127
    with caught():
        output = assisted(target, resized(target, 97), inputs, max_new_tokens=12, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=12))
    assert output.stats.substituted_tokens >= 1


@pytest.mark.parametrize("scheme", ["lossless", "smc", "semantic"])
@pytest.mark.parametrize("wrong", [97, -100])
def test_an_id_that_the_target_lacks_is_refused(scheme: str, wrong: int) -> None:
    """On an accelerator it would end the process."""
    target, inputs = tiny("llama", 0), prompts((3, 8))
    inputs["input_ids"][1, 2] = wrong
    segments = {"scorer": "none", "segment_stop": None, "think_end": None} if scheme == "semantic" else {}
    config = SemSpecConfig(scheme, max_new_tokens=4, **segments)
    refuses(
        target, draft_of(target, "near"), inputs, f"holds the id {wrong}, .* from 0 to 96", generation_config=config
    )


@pytest.mark.parametrize("size", [97, 128])
def test_ui25_same_size_or_not_other_tokens_are_found(size: int) -> None:
    """Found where both tokenizers are given: the draft then counts for the tokens that both have, under smc not at
    all; taken for one vocabulary it is useless."""
    target, draft = tiny("llama", 0), tiny("llama", 1, vocab=size)
    inputs = prompts((4,))
    call = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(size=size, permute=5)}
    config = SemSpecConfig("smc", max_new_tokens=4)
    refuses(target, draft, inputs, "foreign.*smc", generation_config=config, **call)
    with Forwards(draft) as spy:
        output = assisted(target, draft, inputs, call=call, max_new_tokens=9)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=9))
    theirs = call["assistant_tokenizer"].get_vocab()
    read = [theirs[token] for token in tokenizer().convert_ids_to_tokens(inputs["input_ids"][0])]
    assert spy.kwargs[0]["input_ids"][0, :4].tolist() == read


def test_ui25_sizes_far_apart_without_tokenizers_say_what_to_pass() -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1, vocab=97 + 1025)
    config = SemSpecConfig("lossless", max_new_tokens=4)
    refuses(target, draft, prompts((4,)), "assistant_tokenizer", generation_config=config)
    refuses(draft, target, prompts((4,)), "assistant_tokenizer", generation_config=config)


@pytest.mark.parametrize("size", [97, 97 + 1025])
def test_ui25_two_tokenizers_that_agree_are_accepted(size: int) -> None:
    """Stock refuses them where the sizes are equal; where they are far apart they are what settles it."""
    target = tiny("llama", 0)
    draft = resized(target, size)
    inputs = prompts((4,))
    call = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(size=size)}
    with caught():
        output = assisted(target, draft, inputs, call=call, max_new_tokens=9)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=9))
