"""Users' reports about vocabularies and tokenizers (their numbers are in the test names)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, pipeline

from hf_semspec import SemSpecConfig, record_stats
from tests.helpers import (
    EXACT,
    TESTING,
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


def chat_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target with a list of EOS ids, as chat models have, and a base draft with one."""
    target = tiny("llama", 0, eos=[2, 7])
    draft = draft_of(target, "near")
    draft.config.eos_token_id = draft.generation_config.eos_token_id = 2
    target.generation_config.semspec = {"scheme": "lossless", "num_draft_tokens": 3}
    return target, draft


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("kind", TESTING)
@pytest.mark.deprecated
def test_ui26_pipeline_of_a_chat_target_and_a_base_draft(kind: str, with_tokenizer: bool) -> None:
    target, draft = chat_pair()
    target.generation_config = SemSpecConfig.from_dict({**target.generation_config.to_dict(), **semspec_of(kind)})
    extra: dict[str, Any] = {"assistant_tokenizer": tokenizer()} if with_tokenizer else {}
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft, **extra)
    with record_stats() as stats:
        written = pipe("Hello", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert len(stats) == 1
    assert stats[0].draft_forwards > 0
    ids = tokenizer()("Hello", return_tensors="pt")
    inputs = {"input_ids": ids.input_ids, "attention_mask": ids.attention_mask}
    target.generation_config.semspec = None
    expected = plain_rows(target, inputs, max_new_tokens=12, eos_token_id=[2, 7])[0]
    assert written == tokenizer().decode(expected, skip_special_tokens=True)


def semspec_of(kind: str) -> dict[str, Any]:
    from tests.helpers import exact

    return {"semspec": exact(kind).semspec}


@pytest.mark.deprecated
def test_ui26_pipeline_with_a_draft_given_by_name(tmp_path: Path) -> None:
    target, draft = chat_pair()
    draft.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=str(tmp_path))
    with record_stats() as stats:
        by_name = pipe("Hello", max_new_tokens=12, do_sample=False)
    assert len(stats) == 1
    assert by_name == pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=draft)(
        "Hello", max_new_tokens=12, do_sample=False
    )


def test_ui26_a_pipeline_of_really_different_models_is_still_refused() -> None:
    """The wrapper acts only where the vocabulary is the same; any other refusal of stock's stands."""
    target, _ = chat_pair()
    with pytest.raises(ValueError, match="tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer(), assistant_model=tiny("llama", 1, vocab=3000))
