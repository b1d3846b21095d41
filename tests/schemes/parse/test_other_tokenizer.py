import copy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, LogitsProcessorList

from hf_semspec import SemSpecConfig
from hf_semspec.schemes.parse.other_tokenizer import encode_after
from tests.helpers import WEAK_DRAFTS, Forwards, check_identities, new_tokens, plain_rows
from tests.models import VOCAB, prompts, tiny, tokenizer

OWN, FOREIGN = tokenizer(chat=True), tokenizer(permute=3)
ASKED = {"segment_tokens": 6, "labels": ("Y", "N"), "judge_prompt": "fine?", "full_judge_prompt": "right?"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = tiny(eos=1)
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # never the padding token, which has no text
    return model


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    """The target in another vocabulary: it writes the same text in other ids."""
    model = copy.deepcopy(target)
    theirs = FOREIGN.get_vocab()
    with torch.no_grad():
        for token, index in OWN.get_vocab().items():
            for weights in ("model.embed_tokens", "lm_head"):
                own, other = target.get_submodule(weights).weight, model.get_submodule(weights).weight
                other[theirs[token]] = own[index]
    return model


def call(target: Any, draft: Any, inputs: Any, *, other: Any = FOREIGN, **fields: Any) -> Any:
    processors = fields.pop("logits_processor", None)
    config = SemSpecConfig(
        "parse",
        **{**ASKED, "revise_with": None, "max_new_tokens": 40, "return_dict_in_generate": True, "do_sample": False}
        | fields,
    )
    return target.generate(
        **inputs,
        assistant_model=draft,
        generation_config=config,
        tokenizer=OWN,
        assistant_tokenizer=other,
        logits_processor=processors,
    )


@pytest.mark.parametrize("lengths", [(6,), (3, 7, 12)], ids=str)
@pytest.mark.parametrize("ngram", [False, True])
def test_a_draft_of_another_tokenizer_writes_the_same_text(
    target: Any, draft: Any, lengths: tuple[int, ...], ngram: bool
) -> None:
    inputs = prompts(lengths)
    output = call(target, draft, inputs, accept_threshold=0.0, draft_ngram=ngram, use_cache=False)
    assert new_tokens(output, inputs).tolist() == plain_rows(target, inputs, max_new_tokens=40).tolist()
    assert output.stats.full_accepts == len(lengths)
    assert output.stats.target_forwards == 1
    check_identities(output.stats)


@pytest.mark.parametrize("redrafts", [0, 2])
def test_where_nothing_is_kept_the_target_writes(target: Any, draft: Any, redrafts: int) -> None:
    inputs = prompts((3, 7, 12))
    output = call(target, draft, inputs, accept_threshold=2.0, prefix_threshold=2.0, max_redrafts=redrafts)
    assert new_tokens(output, inputs).tolist() == plain_rows(target, inputs, max_new_tokens=40).tolist()
    assert output.stats.kept == 0


def test_the_draft_is_fed_its_own_ids(target: Any, draft: Any) -> None:
    inputs = prompts((6,))
    with Forwards(draft) as spy:
        call(target, draft, inputs, accept_threshold=0.0)
    text = OWN.decode(inputs["input_ids"][0])
    assert spy.kwargs[0]["input_ids"].tolist() == FOREIGN(text, return_tensors="pt")["input_ids"].tolist()


def test_stop_strings_and_length_end_a_translated_answer(target: Any, draft: Any) -> None:
    inputs = prompts((6,))
    plain = plain_rows(target, inputs, max_new_tokens=40)[0].tolist()
    output = call(target, draft, inputs, accept_threshold=0.0, stop_strings=[OWN.decode(plain[5:7])])
    assert new_tokens(output, inputs)[0].tolist() == plain[:7]


@pytest.mark.parametrize("redrafts", [0, 2])
def test_the_target_revises_with_the_same_draft(target: Any, draft: Any, redrafts: int) -> None:
    """Answers go across as text, and in the revision those tokens that both vocabularies have."""
    inputs = prompts((3, 7, 12))
    fields = {"accept_threshold": 2.0, "prefix_threshold": 2.0, "max_redrafts": redrafts, "revise_with": "lossless"}
    output = call(target, draft, inputs, **fields)
    assert new_tokens(output, inputs).tolist() == plain_rows(target, inputs, max_new_tokens=40).tolist()
    assert output.stats.acceptance_rate == 1.0
    check_identities(output.stats)


class Even(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(1, scores.shape[1], 2), -torch.inf)


def test_constraints_by_id_are_refused(target: Any, draft: Any) -> None:
    with Forwards(target, draft) as spy, pytest.raises(ValueError, match=r"Even speaks of the target's token ids"):
        call(target, draft, prompts((6,)), logits_processor=LogitsProcessorList([Even()]))
    assert spy.calls == 0


def test_another_tokenizer_that_shares_its_ids_is_no_foreign_one(target: Any) -> None:
    inputs = prompts((6,))
    output = call(target, target, inputs, other=tokenizer(), accept_threshold=0.0)
    assert output.stats.substituted_tokens == 0
    assert new_tokens(output, inputs).tolist() == plain_rows(target, inputs, max_new_tokens=40).tolist()


@WEAK_DRAFTS
def test_a_draft_of_other_size_with_merges_runs(target: Any) -> None:
    """Tokens of two characters: the texts are cut elsewhere on either side."""
    letters = {name: i for i, name in enumerate(FOREIGN.get_vocab())}
    merges = [("a", "b"), ("Ġ", "t"), ("e", "r")]
    vocabulary = letters | {"".join(pair): len(letters) + i for i, pair in enumerate(merges)}
    core = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    merged = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    writer = tiny(seed=3, vocab=VOCAB + 3, eos=int(merged.eos_token_id))
    inputs = prompts((3, 7))
    output = call(target, writer, inputs, other=merged, prefix_threshold=0.3, max_redrafts=1)
    check_identities(output.stats)
    for row in range(2):
        assert output.kept_tokens[row] <= 40


class TestEncodeAfter:
    """The ids of a text behind other ids: they spell just that."""

    def test_the_ids_before_stay_as_they_are(self) -> None:
        before = OWN("is it ")["input_ids"]
        assert OWN.decode(before + encode_after(OWN, before, "so?")) == "is it so?"

    def test_text_that_the_tokenizer_cannot_spell_ends_the_answer(self) -> None:
        before = OWN("is it ")["input_ids"]
        assert OWN.decode(encode_after(OWN, before, "so ☃ then")) in ("so ", "so")
